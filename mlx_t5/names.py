"""What a model's name stands for: the folder to read.

A name is a folder (converted, or as Hugging Face saved it), the name of a folder in `models/`, or
a Hub id. Command lines convert a Hub id into `models/` the first time it is asked for; `model.load`
reads its snapshot as it is, and what is in MLX's format on the Hub is never converted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_t5.errors import UserError, log, shown

CONVERTED = Path("models")  # in the working folder, where convert.py writes as well
BUNDLED = Path(__file__).parents[1] / "demo"  # the pair that comes along
Convert = Callable[[str, Path], object]
ADAPTED = " with adapter "
AUTO, NONE, LOOKUP = "auto", "none", "lookup"  # in place of a draft's name


def locate(name: str, convert: Convert | None = None, revision: str | None = None) -> Path:
    """The folder that a model's name stands for; fetches a Hub id that is new here.

    A folder in `models/` has the last part of a Hub id for its name, which others may share. So the
    id that it was converted from, which its config.json keeps, has to be the one asked for.

    Args:
        name: as the user gives it.
        convert: makes the model of a Hub id into a folder, as `convert.convert` does, unless it is
            an MLX folder; None reads every snapshot as it is.
        revision: a branch, tag or commit of a Hub id, which is then not looked for in `models/`.

    Raises:
        UserError: the name is a path to nothing, the Hub id cannot be had or converted, the folder
            was converted from another one, or a folder shall have a revision.
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
    """Whether a folder holds what `convert.py` or `distill.py` has written."""
    from mlx_t5.checkpoints.checkpoint import open_checkpoint

    with open_checkpoint(folder) as stored:
        return stored.metadata.get("format") == "mlx"


def folder_of(name: str) -> Path:
    """The folder that a model's name stands for; that of a Hub id may not be there yet.

    Raises:
        UserError: the name is a path to nothing.
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

    Of a folder without a record (converted from a local folder, or long ago) nothing is known but
    its name: it is taken, with a warning if an owner was asked for.
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
    """The Hub id, with its owner, that a folder was converted from; None if it does not say.

    With an adapter merged into it, it is another model: then that is said as well.
    """
    from mlx_t5.checkpoints.hub import full_id
    from mlx_t5.checkpoints.small_files import snapshot_id
    from mlx_t5.network.weights import read_config

    try:
        record = read_config(folder).get("converted_from")
    except UserError:
        return None  # loading it says what is wrong
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
