"""Finds the folder of a model by its name.

A name is the path of a folder (converted, or in Hugging Face's format), the name of a folder in
`models/`, or a Hub id. At the first use of a Hub id, command lines convert the model into
`models/`, whereas `model.load` reads the downloaded snapshot as it is. A model that is in MLX's
format on the Hub is never converted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_t5.errors import UserError, log, shown

CONVERTED = Path("models")  # folder in the working directory into which convert.py writes
BUNDLED = Path(__file__).parents[1] / "demo"  # the bundled pair
Convert = Callable[[str, Path], object]
ADAPTED = " with adapter "
AUTO, NONE, LOOKUP = "auto", "none", "lookup"  # special values of --draft-model


def locate(name: str, convert: Convert | None = None, revision: str | None = None) -> Path:
    """Returns the folder of the model with this name; a Hub id's model is downloaded at first use.

    A folder in `models/` is named after the last part of its Hub id. Several ids may share that
    part, so the folder's config.json records the full id. If another id is requested, the folder is
    refused.

    Args:
        name: the user's name for the model.
        convert: a function that converts a Hub id's model into a folder, as `convert.convert` does.
            If None, or if the model is in MLX's format, the folder of the downloaded snapshot is
            returned.
        revision: a branch, tag or commit of a Hub id; with a revision `models/` is not searched.

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
    log(f"converted {name} to {folder}, which is used from now on")
    return folder


def _is_mlx(folder: Path) -> bool:
    """Returns whether the metadata of a folder's weights declares MLX's format."""
    from mlx_t5.checkpoints.checkpoint import open_checkpoint

    with open_checkpoint(folder) as stored:
        return stored.metadata.get("format") == "mlx"


def folder_of(name: str) -> Path:
    """Returns the folder of the model with this name; for a Hub id it may not exist yet.

    Raises:
        UserError: the name is empty, names a file, or is a path that does not exist.
    """
    from mlx_t5.checkpoints.small_files import place

    place(name)  # refuses paths that cannot exist
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
    """Raises `UserError` if a folder in `models/` was converted from another Hub id than `name`.

    A folder that records no Hub id (converted from a local folder, or long ago) is accepted, with
    a warning if `name` has the form `owner/model`.
    """
    from mlx_t5.checkpoints.hub import full_id

    hub_id, source = full_id(name), source_of(folder)
    if "/" not in hub_id or source == hub_id:  # without an owner, the name is the folder's
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
            f"{name} (python convert.py --model {name} --overwrite converts it again)"
        )


def source_of(folder: Path) -> str | None:
    """Returns the Hub id, with its owner, of a converted folder or a snapshot; None if unknown.

    If an adapter was merged when the folder was converted, returns "SOURCE with adapter ADAPTER",
    where SOURCE is the Hub id or, without one, the name of the folder that was converted.
    """
    from mlx_t5.checkpoints.hub import full_id
    from mlx_t5.checkpoints.small_files import snapshot_id
    from mlx_t5.network.weights import read_config

    try:
        record = read_config(folder).get("converted_from")
    except UserError:
        return None  # loading reports a damaged folder
    if not isinstance(record, dict):
        record = {"model": snapshot_id(folder)}
    model, adapter = record.get("model"), record.get("adapter")
    name = full_id(model) if isinstance(model, str) else None
    return name if adapter is None else f"{name or record.get('folder')}{ADAPTED}{adapter}"


def _may_be_hub_id(name: str) -> bool:
    """Returns whether `name` has the form `model` or `owner/model`, and is not a path."""
    parts = name.split("/")
    plain = all(part and part[0].isalnum() and part.isascii() for part in parts)
    return plain and len(parts) <= 2 and parts[0] != str(CONVERTED) and "\\" not in name
