"""Reads the weights of a Hugging Face folder, one tensor at a time, in every common format.

The formats are safetensors and torch's `.bin` (zip or legacy), in one file or in shards with an
index, in float32, float16 and bfloat16. torch is not needed, and nothing in a file is executed. All
files are untrusted: a false header, a truncated file, or an index that names a file outside its
folder raises a `UserError` that names the file.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from io import FileIO
from pathlib import Path

from mlx_t5.backend import mx
from mlx_t5.checkpoints.limits import MAX_TENSORS
from mlx_t5.checkpoints.safetensors_file import read_header
from mlx_t5.checkpoints.small_files import read_object, require_own
from mlx_t5.checkpoints.stored_tensor import StoredTensor
from mlx_t5.checkpoints.torch_file import read_torch
from mlx_t5.errors import UserError, reason, shown

SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
# The embedding is stored under one or more of these names. MADLAD uses only the last name.
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
LAST_NORMS = ("decoder.norm.weight", "encoder.norm.weight")  # in MLX folders
_MAX_SHARDS = 1000
_LFS_POINTER = b"version https://git-lfs.github.com/"


class Checkpoint:
    """The tensors of a checkpoint.

    As a context manager, it closes the files that it has opened.

    Attributes:
        names: the names of all tensors, in the order of their bytes in the files, so that a loop
            over the names reads each file sequentially.
        metadata: the string pairs in the safetensors header (MLX folders have `format`: `mlx`).
    """

    def __init__(self, tensors: list[StoredTensor], metadata: dict[str, str]):
        order = {path: i for i, path in enumerate(dict.fromkeys(t.path for t in tensors))}
        tensors = sorted(tensors, key=lambda tensor: (order[tensor.path], tensor.offset))
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self.names = list(self._tensors)
        self.metadata = metadata
        self._files: dict[Path, FileIO] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the tensor's shape."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Returns the name of the stored type, which may be a type that `read` refuses."""
        return self._tensors[name].dtype

    def nbytes(self, name: str) -> int:
        """Returns the tensor's size in bytes, in its stored type."""
        return self._tensors[name].nbytes

    def storage(self, name: str) -> Hashable:
        """Returns a key that is equal for two names if and only if they share one stored tensor."""
        tensor = self._tensors[name]
        return tensor.path, tensor.offset, tensor.dtype, tensor.shape, tensor.strides

    def require_readable(self, name: str) -> None:
        """Raises `UserError` unless `read` supports the tensor's type."""
        self._tensors[name].require_readable()

    def read(self, name: str) -> mx.array:
        """Reads one whole tensor in its stored type.

        Raises:
            UserError: the type is not supported, or the file has been truncated.
        """
        tensor = self._tensors[name]
        return tensor.read(self._open(tensor.path))

    def row_tiles(self, name: str, max_bytes: int) -> Iterator[mx.array]:
        """Yields a tensor as tiles in its stored type: whole rows, about `max_bytes` per tile."""
        tensor = self._tensors[name]
        return tensor.row_tiles(self._open(tensor.path), max_bytes)

    def sample(self, name: str, places: int, width: int = 64) -> bytes:
        """Returns a sample of a tensor: `width` bytes at each of `places` equidistant offsets."""
        tensor = self._tensors[name]
        file, size = self._open(tensor.path), tensor.extent * tensor.itemsize
        samples = []
        for i in range(places):
            file.seek(tensor.offset + max(size - width, 0) * i // max(places - 1, 1))
            samples.append(file.read(min(width, size)))
        return b"".join(samples)

    def items(self) -> Iterator[tuple[str, mx.array]]:
        """Yields pairs of a name and its tensor, read one by one, in the order of `names`."""
        return ((name, self.read(name)) for name in self.names)

    def close(self) -> None:
        """Closes the open files; a later read opens its file again."""
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, path: Path) -> FileIO:
        if path not in self._files:
            self._files[path] = open(path, "rb", buffering=0)
        return self._files[path]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_checkpoint(
    folder: str | Path,
    names: tuple[str, str] = (SAFETENSORS, TORCH),
    root: Path | None = None,
) -> Checkpoint:
    """Opens the weights of a folder; prefers safetensors to `.bin`, and one file to shards.

    Args:
        folder: the folder. It holds `model.safetensors` or `pytorch_model.bin`, or the index of
            either (with `.index.json` added to the name) and the shards that the index names.
        names: the file names to use in place of `model.safetensors` and `pytorch_model.bin`.
        root: the model folder, if `folder` is inside it; see `small_files.require_own`.

    Raises:
        UserError: there are no weights, a shard is missing, a file is damaged, a pickle contains
            objects other than tensors, or a file is a link that leads out of the folder.
    """
    folder = Path(folder)
    try:
        for main in names:
            if (folder / main).is_file():
                return _merge([folder / main], None, root)
            index = folder / f"{main}.index.json"
            if index.is_file():
                return _open_sharded(index, root)
    except OSError as error:
        raise UserError(f"cannot read the checkpoint: {reason(error)}") from error
    there = sorted(shown(path.name) for path in folder.glob("[!.]*"))
    raise UserError(
        f"{folder}: no {names[0]} or {names[1]}, nor an index of either"
        + (f"; it holds {', '.join(there[:8])}" if there else "; the folder is empty or missing")
    )


def stored_dtype(checkpoint: Checkpoint) -> str | None:
    """Returns the floating-point type in which a T5 is stored; None if no tensor shows the type.

    The embedding shows the type. If the embedding is quantized, the last norm shows it instead: the
    decoder's norm or, in a model without a decoder, the encoder's norm.
    """
    names = [name for name in EMBEDDINGS if name in checkpoint.names]
    if names and names[0].replace(".weight", ".scales") in checkpoint.names:
        names = [name for name in LAST_NORMS if name in checkpoint.names]
    return checkpoint.dtype(names[0]) if names else None


def _open_sharded(index: Path, root: Path | None) -> Checkpoint:
    weight_map = read_weight_map(index, root)
    shards = sorted(set(weight_map.values()))
    if len(shards) > _MAX_SHARDS:
        raise UserError(f"{index} names {len(shards)} files; at most {_MAX_SHARDS} are read")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        cure = "fetch them"
        if index.name.startswith(SAFETENSORS) and any(index.parent.glob("pytorch_model*.bin")):
            cure += ", or delete the index to use the .bin files beside it"
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        names = ", ".join(map(shown, missing[:3])) + more
        raise UserError(f"{index} names files that are missing: {names}; {cure}")
    checkpoint = _merge([index.parent / shard for shard in shards], weight_map, root)
    absent = sorted(weight_map.keys() - set(checkpoint.names))
    if absent:
        name, file = shown(absent[0]), shown(weight_map[absent[0]])
        raise UserError(f"{index} puts {name} into {file}, which lacks it")
    return checkpoint


def read_weight_map(index: Path, root: Path | None = None) -> dict[str, str]:
    """Reads an index of shards.

    Returns:
        The name of each tensor's file, keyed by the tensor's name. File names contain no folders.

    Raises:
        UserError: the index has no `weight_map`, or names a file outside its folder.
    """
    weight_map = read_object(index, "fetch it again", root).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} has no weight_map: fetch it again")
    for file in weight_map.values():
        if type(file) is not str or file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise UserError(f"{index}: names {shown(file)!r}, which is no file of its own folder")
    return weight_map


def _merge(paths: list[Path], weight_map: dict[str, str] | None, root: Path | None) -> Checkpoint:
    """Merges the tensors of all files; `weight_map` decides between tensors of the same name."""
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    count = 0
    for path in paths:
        require_own(path, root)
        _refuse_pointer(path)
        if path.suffix == ".safetensors":
            listed, facts = read_header(path)
            metadata |= facts
        else:
            listed = read_torch(path)
        count += len(listed)
        if count > MAX_TENSORS:
            raise UserError(f"{path.parent} has more than {MAX_TENSORS} tensors; that is no T5")
        for tensor in listed:
            if not weight_map or weight_map.get(tensor.name, path.name) == path.name:
                tensors[tensor.name] = tensor
    return Checkpoint(list(tensors.values()), metadata)


def _refuse_pointer(path: Path) -> None:
    with open(path, "rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise UserError(f"{path} is a Git LFS pointer; run `git lfs pull` in its folder")
