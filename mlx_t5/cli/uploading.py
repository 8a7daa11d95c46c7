"""Sends a model folder, with a model card, to the Hugging Face Hub (option --upload-repo).

Only `huggingface_hub` reads the user's token (from `HF_TOKEN` or `hf auth login`).
The card copies license, language and task from the source model's card, if there is one.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData, hf_hub_download, utils

from mlx_t5.backend import device_name, mx
from mlx_t5.checkpoints.adapters import CONFIG, WEIGHTS
from mlx_t5.checkpoints.config import read_config
from mlx_t5.checkpoints.hub import ADAPTED, choose_files, source_of
from mlx_t5.checkpoints.writing import check_output_folder, require_own
from mlx_t5.cli.arguments import INTERRUPTED, log
from mlx_t5.cli.training import work_folder
from mlx_t5.disk import SAFETENSORS, absolute
from mlx_t5.errors import UserError, reason
from mlx_t5.training.run_folder import RunFolder

CARD, TEMPLATE = "README.md", Path(__file__).with_name("card.md")
TAKEN_OVER = ("license", "license_name", "license_link", "language", "pipeline_tag")


def check_output(args: Any, is_output: Callable[[str], bool]) -> None:
    """Refuses a folder --output that cannot be made, sent, or is not the resumed run's own.

    `is_output` says whether an earlier run may have written a file of this name.
    """
    if not args.output:
        raise UserError("--output: the name of a folder, not ''")
    path = absolute(args.output)
    own = RunFolder(work_folder(args.output)).written.exists()
    if os.path.lexists(path) and not (own and args.resume):
        cure = "extend its run with --resume and more --iters, or " if own else ""
        raise UserError(f"{path} exists; {cure}choose another --output")
    check_output_folder(path, own, is_output)
    check_repository(args.upload_repo)


def check_repository(name: str | None) -> None:
    """Checks, before the work begins, that a folder can be sent to this repository.

    The name None is accepted: nothing will be sent.

    Raises:
        UserError: the name is not valid, no token permits writing, or the Hub cannot be reached.
    """
    if name is None:
        return
    try:
        utils.validate_repo_id(name)
        if "/" not in name:
            raise ValueError(f"{name!r} has no owner")
        if HfApi().whoami().get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise ValueError("the token may only read")
    except Exception as error:  # its type depends on the library's version and transport
        cure = "give OWNER/NAME, and a token that may write with `hf auth login`"
        raise UserError(f"--upload-repo: {reason(error).partition('. ')[0]}; {cure}") from None


def model_files(folder: Path) -> list[str]:
    """The files of a model or an adapter, and its card, except symbolic links."""
    there = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    files = {path.relative_to(folder).as_posix() for path in there}
    adapter = {CONFIG, WEIGHTS[0]}
    return sorted(files & {*choose_files(files), *adapter, f"{SAFETENSORS}.index.json", CARD})


def upload(folder: Path, repository: str | None, card: Callable[[str], str]) -> int:
    """Writes a folder's card, logs the names of the files to send, and sends them in one commit.

    Args:
        folder: the model folder, which stays on the disk even after an error.
        repository: a name that `check_repository` has accepted; the repository is created if it
            does not exist. None: nothing is sent.
        card: makes the text of the card from the repository's name.

    Returns:
        The exit status.

    Raises:
        UserError: the files cannot be sent.
    """
    if repository is None:
        return 0
    cure = f"the folder is complete: `hf upload {repository} {folder}` sends it"
    try:
        (folder / CARD).write_text(card(repository), encoding="utf-8")
        files = model_files(folder)
        log(f"sending to {repository} on the Hugging Face Hub: {', '.join(files)}")
        HfApi().create_repo(repository, exist_ok=True)
        done = HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=files,
            commit_message="Upload a model",
        )
    except KeyboardInterrupt:
        log(f"interrupted; {cure}")
        return INTERRUPTED
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{repository}: cannot be sent ({cause}); {cure}") from error
    log(f"sent: {done.commit_url}")
    return 0


def conversion_card(name: str, folder: Path, source: str) -> str:
    config, local = read_config(folder), absolute(source)
    form, tags = config["torch_dtype"], []
    if stored := config.get("quantization"):
        form = "{bits} bits a weight ({mode}, groups of {group_size})".format_map(stored)
        tags = [f"{stored['bits']}-bit"]
    encodes = str(config.get("architectures")).endswith("EncoderModel']")
    about = f"{source_of(folder) or local.name}, converted to MLX: {form}."
    options = f"--model {name} --embed" if encodes else f"--model {name}"
    return _card(folder, local, tags, name=name, about=about, options=options, call=f'"{name}"')


def draft_card(name: str, target: Path, source: Path, dtype: Any, verdict: str) -> str:
    """The model card of a draft that `distill.py` wrote.

    Args:
        name: name of the draft's repository.
        target: folder of the draft's target.
        source: folder of the model that training started from; it may be the target.
        dtype: type that the target computes in.
        verdict: the measured speed, in Markdown.
    """
    system = f"{platform.system()} {platform.machine()}, mlx {mx.__version__}"
    machine = f"{device_name()}, {system}, {str(dtype).removeprefix('mlx.core.')}"
    whose = source_of(target) or target.resolve().name
    named, _, lora = whose.partition(ADAPTED)
    flag, argument = (f" --adapter-path {lora}", f', adapter="{lora}"') if lora else ("", "")
    verified = "It proposes tokens, which that model verifies, so the text is that model's own."
    about = f"A draft for {whose}. {verified}\n\n{verdict}\n\nMeasured on {machine}."
    options = f"--model {named}{flag} --draft-model {name}"
    call = f'"{named}"{argument}, draft="{name}"'
    tags = ["speculative-decoding"]
    return _card(source, source, tags, name=name, about=about, options=options, call=call)


def fine_tuned_card(name: str, folder: Path, source: Path, base: str, tested: Any) -> str:
    """The model card of what `finetune.py` wrote.

    Args:
        name: name of the repository.
        folder: the folder that is sent, a PEFT adapter or a model.
        source: folder of the model that was trained.
        base: the model's Hub id, or the path of a folder.
        tested: figures of held-out texts.
    """
    base = Path(base).name if Path(base).is_absolute() else base
    about, options, call = f"{base}, fine-tuned: {tested}.", f"--model {name}", f'"{name}"'
    library = "transformers"
    if (folder / CONFIG).exists():
        library, last = "peft", name.rpartition("/")[2]
        download = f"hf download {name} --local-dir {last}"
        about = f"A LoRA adapter for {base}: {tested}. First `{download}`."
        options, call = f"--model {base} --adapter-path {last}", f'"{base}", adapter="{last}"'
    return _card(source, source, [], library, name=name, about=about, options=options, call=call)


def _card(folder: Path, local: Path, tags: list[str], library: str = "mlx", **parts: str) -> str:
    """Fills card.md with `parts`.

    Args:
        folder: a folder whose config.json names the source model.
        local: a folder that may contain the source's card; otherwise the Hub is asked for it.
        tags: tags to add to the tags of the source's card.
        library: the library that reads the folder; "mlx" is a tag in any case.
        parts: the texts to insert, keyed by the names of the placeholders.
    """
    base = (source_of(folder) or "").partition(ADAPTED)[0]
    public = "/" in base  # without an owner it is the name of a folder
    try:
        path = local / CARD
        if public and not path.is_file():
            path = Path(hf_hub_download(base, CARD))
        require_own(path, path.parent)
        known = ModelCard(path.read_text("utf-8"), ignore_metadata_errors=True).data
    except Exception:  # no connection, no card, or a card that is not valid
        known = ModelCardData()
    if not known.get("license"):
        log("no license is known from the source's card, so the new one names none")
    data = ModelCardData(
        library_name=library,
        base_model=base if public else known.get("base_model"),
        tags=[*(known.get("tags") or ()), "mlx", *tags],
        **{name: known.get(name) for name in TAKEN_OVER},
    )
    return TEMPLATE.read_text("utf-8").format(metadata=data.to_yaml(), **parts)
