"""Finds the folder of a model by its name.

A name is a folder (converted, or as Hugging Face saved it), the name of a folder in `models/`, or
a Hub id. Command lines convert a Hub id into `models/` at its first use; `model.load` reads its
snapshot as it is. A model in MLX's format on the Hub is never converted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_t5.errors import UserError, log, shown

CONVERTED = Path("models")  # in the working directory, where convert.py writes
BUNDLED = Path(__file__).parents[1] / "demo"  # the bundled pair
Convert = Callable[[str, Path], object]
ADAPTED = " with adapter "
AUTO, NONE, LOOKUP = "auto", "none", "lookup"  # in place of a draft's name


def locate(name: str, convert: Convert | None = None, revision: str | None = None) -> Path:
    """Returns the folder of a model's name; downloads a Hub id that is new here.

    A folder in `models/` is named after the last part of a Hub id, which other ids may share. So
    the id that it was converted from, which its config.json records, must be the requested one.

    Args:
        name: the user's name for the model.
        convert: converts a Hub id that is no MLX folder, such as `convert.convert`; None reads
            every snapshot as it is.
        revision: a branch, tag or commit of a Hub id, which is then not looked for in `models/`.

    Raises:
        UserError: the path does not exist, the Hub id cannot be downloaded or converted, the folder
            was converted from another id, or a revision is given for a folder.
    """
    from mlx_t5.checkpoints.hub import resolve

    folder, typed = folder_of(name), Path(name).expanduser()
    if folder == typed and revision is not None:
        raise UserError(f"{name} is a folder, and a revision is of a Hub id; leave it out")
    if folder.is_dir() and revision is None:
        if folder != typed:
            require_same(name, folder)
        return folder
    snapshot = resolve(name, revision)
    if convert is None or _is_mlx(snapshot):
        return snapshot
    convert(name, folder)
    log(f"converted {name} to {folder}; it is there from now on")
    return folder


def _is_mlx(folder: Path) -> bool:
    """Whether a folder was written by `convert.py` or `distill.py`."""
    from mlx_t5.checkpoints.checkpoint import open_checkpoint

    with open_checkpoint(folder) as stored:
        return stored.metadata.get("format") == "mlx"


def folder_of(name: str) -> Path:
    """Returns the folder of a model's name; for a Hub id it may not exist yet.

    Raises:
        UserError: the path does not exist.
    """
    from mlx_t5.checkpoints.small_files import place

    place(name)  # refuses what leads nowhere
    path = Path(name).expanduser()
    if not name:
        raise UserError("a model's name is empty; give a folder or a Hub id")
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{name} is a file; give the folder that has config.json and the weights")
    if not _may_be_hub_id(name):
        raise UserError(f"there is no model folder {name}; make one with: python convert.py")
    return CONVERTED / name.rsplit("/", 1)[-1]


def require_same(name: str, folder: Path) -> None:
    """Refuses a folder in `models/` that was converted from another Hub id than `name`.

    A folder without a record (converted from a local folder, or long ago) is accepted, with a
    warning if `name` has an owner.
    """
    from mlx_t5.checkpoints.hub import full_id

    hub_id, source = full_id(name), source_of(folder)
    if "/" not in hub_id or source == hub_id:  # without an owner it is the folder's own name
        return
    if source:
        raise UserError(
            f"{folder} was converted from {shown(source)}, not from {hub_id}; give {folder} to run "
            f"it, or convert the other one: python convert.py --model {name} --mlx-path "
            f"{folder.with_name(hub_id.replace('/', '-'))}"
        )
    if "/" in name:
        log(
            f"warning: {folder} does not say which model it was converted from; it is taken for "
            f"{name} (python convert.py --model {name} --overwrite makes it anew)"
        )


def source_of(folder: Path) -> str | None:
    """Returns the Hub id, with its owner, that a folder was converted from; None if not recorded.

    If an adapter was merged it is another model, and the result names the adapter, too.
    """
    from mlx_t5.checkpoints.hub import full_id
    from mlx_t5.checkpoints.small_files import snapshot_id
    from mlx_t5.network.weights import read_config

    try:
        record = read_config(folder).get("converted_from")
    except UserError:
        return None  # loading it reports what is wrong
    if not isinstance(record, dict):
        record = {"model": snapshot_id(folder)}
    model, adapter = record.get("model"), record.get("adapter")
    name = full_id(model) if isinstance(model, str) else None
    return name if adapter is None else f"{name or record.get('folder')}{ADAPTED}{adapter}"


def _may_be_hub_id(name: str) -> bool:
    """Whether `name` reads as `model` or `owner/model`, and not as a path."""
    parts = name.split("/")
    plain = all(part and part[0].isalnum() and part.isascii() for part in parts)
    return plain and len(parts) <= 2 and parts[0] != str(CONVERTED) and "\\" not in name
