"""--upload-repo: a model card, and the files of a model folder to the Hugging Face Hub.

Through `huggingface_hub`, which alone knows the token (`HF_TOKEN` or `hf auth login`). Of licence,
language and task the card says what the source's own card does, and nothing where that has none.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_t5.cli.arguments import INTERRUPTED, Parser
from mlx_t5.errors import UserError
from mlx_t5.names import ADAPTED, source_of
from mlx_t5.sizes import readable

CARD, TEMPLATE = "README.md", Path(__file__).with_name("card.md")
TAKEN_OVER = ("license", "license_name", "license_link", "language", "pipeline_tag")


def add_upload_option(parser: Parser) -> None:
    """Adds --upload-repo to a command line."""
    help = "send the folder, with a model card, to this repository on the Hugging Face Hub"
    parser.add_argument("--upload-repo", metavar="OWNER/NAME", help=help)


def check_repository(name: str | None) -> None:
    """Refuses what could not be sent in the end, before the work begins; None is not to be sent.

    Raises:
        UserError: the name is none, or there is no token, or one that may not write.
    """
    if name is None:
        return
    from huggingface_hub import HfApi, errors, utils

    trouble = ""
    try:
        utils.validate_repo_id(name)
        if "/" not in name:
            raise ValueError(f"{name!r} has no owner; give OWNER/NAME")
        if HfApi().whoami().get("auth", {}).get("accessToken", {}).get("role") == "read":
            trouble = "may only read"
    except ValueError as error:
        raise UserError(f"--upload-repo: {error}") from None
    except errors.LocalTokenNotFoundError:
        trouble = "is missing"
    except Exception as error:  # without a connection, there may be one when the work is done
        if getattr(getattr(error, "response", None), "status_code", None) == 401:
            trouble = "is refused"
    if trouble:
        raise UserError(f"--upload-repo: the token for the Hub {trouble}; `hf auth login`")


def model_files(folder: Path) -> list[str]:
    """The names of a model folder's files that our writers made: no links, and nobody else's."""
    from mlx_t5.checkpoints.checkpoint import SAFETENSORS
    from mlx_t5.checkpoints.hub import choose_files

    inside = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    there = [path for place in (folder, *inside) for path in place.iterdir()]
    files = {p.relative_to(folder).as_posix() for p in there if stat.S_ISREG(os.lstat(p).st_mode)}
    return sorted(files & {*choose_files(files), f"{SAFETENSORS}.index.json", CARD})


def upload(folder: Path, repository: str | None, card: Callable[[str], str]) -> int:
    """Writes a folder's card, shows what is sent, and sends it in one commit.

    Args:
        folder: that has just been written; it stays whatever happens.
        repository: that `check_repository` has accepted; it is made if it is not there. None sends
            nothing.
        card: makes the model card for this name.

    Returns:
        The exit status.

    Raises:
        UserError: it cannot be sent.
    """
    if repository is None:
        return 0
    from huggingface_hub import CommitOperationAdd, HfApi

    cure = f"the folder is complete: `hf upload {repository} {folder}` sends it"
    try:
        (folder / CARD).write_text(card(repository), encoding="utf-8")
        sizes = {name: (folder / name).stat().st_size for name in model_files(folder)}
        what = f"sending {readable(sum(sizes.values()))} to {repository} on the Hugging Face Hub:"
        _log("\n  ".join([what, *(f"{name} ({size:,} bytes)" for name, size in sizes.items())]))
        added = [CommitOperationAdd(name, folder / name) for name in sizes]
        HfApi().create_repo(repository, exist_ok=True)
        done = HfApi().create_commit(repository, added, commit_message="Upload an MLX model")
    except KeyboardInterrupt:
        _log(f"interrupted; {cure}")
        return INTERRUPTED
    except Exception as error:  # which type it is depends on the library's version and transport
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{repository}: cannot be sent ({reason}); {cure}") from error
    _log(f"sent: {done.commit_url}")
    return 0


def conversion_card(name: str, folder: Path, source: str) -> str:
    """The card of a folder that `convert.py` has written, from a source of this name."""
    from mlx_t5.checkpoints.small_files import place
    from mlx_t5.network.weights import read_config

    config, local = read_config(folder), place(source)
    form, tags = config["torch_dtype"], []
    if stored := config.get("quantization"):
        form = "{bits} bits a weight ({mode}, groups of {group_size})".format_map(stored)
        tags = [f"{stored['bits']}-bit"]
    encodes = str(config.get("architectures")).endswith("EncoderModel']")
    parts = {
        "about": f"{source_of(folder) or local.name}, converted to MLX: {form}.",
        "options": f"--model {name}" + " --embed" * encodes,
        "arguments": f'"{name}"',
    }
    return _card(name, folder, local, tags, parts)


def draft_card(name: str, target: Path, source: Path, dtype: Any, verdict: str) -> str:
    """The card of a draft that `distill.py` has written.

    Args:
        name: of its repository.
        target: folder of the model that it is a draft for.
        source: folder of the model that its weights began as, which may be the target.
        dtype: that the target computes in.
        verdict: what was measured on this machine, in Markdown.
    """
    from mlx_t5.backend import device_name, mx

    system = f"{platform.system()} {platform.machine()}, mlx {mx.__version__}"
    machine = f"{device_name()}, {system}, {str(dtype).removeprefix('mlx.core.')}"
    whose = source_of(target) or target.resolve().name
    named, _, lora = whose.partition(ADAPTED)
    flag, argument = (f" --adapter-path {lora}", f', adapter="{lora}"') if lora else ("", "")
    verified = "It proposes tokens, which that model verifies, so the text is that model's own."
    parts = {
        "about": f"A draft for {whose}. {verified}\n\n{verdict}\n\nMeasured on {machine}.",
        "options": f"--model {named}{flag} --draft-model {name}",
        "arguments": f'"{named}"{argument}, draft="{name}"',
    }
    return _card(name, source, source, ["speculative-decoding"], parts)


def _card(name: str, folder: Path, local: Path, tags: list[str], parts: dict[str, str]) -> str:
    """A card.

    Args:
        name: of the repository.
        folder: whose config.json says where it comes from.
        local: folder in which the source's card may be; otherwise it is looked for on the Hub.
        tags: besides those of the source.
        parts: of the text.
    """
    from huggingface_hub import ModelCard, ModelCardData, hf_hub_download

    from mlx_t5.checkpoints.small_files import read_small

    base = (source_of(folder) or "").partition(ADAPTED)[0]
    public = "/" in base  # otherwise it is the name of a folder
    try:
        path = local / CARD
        if public and not path.is_file():
            path = Path(hf_hub_download(base, CARD))
        source = ModelCard(read_small(path).decode(), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no connection, no card, or one that somebody wrote by hand
        source = {}
    if "license" not in source:
        _log("no licence is known from the source's card, so the new one names none")
    data = ModelCardData(
        library_name="mlx",
        base_model=base if public else source.get("base_model"),
        tags=[*source.get("tags", []), "mlx", *tags],
        **{key: source[key] for key in TAKEN_OVER if key in source},
    )
    return TEMPLATE.read_text("utf-8").format(metadata=data.to_yaml(), name=name, **parts)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
