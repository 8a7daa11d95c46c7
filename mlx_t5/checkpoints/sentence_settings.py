"""What the settings of a folder of sentence-transformers do to texts and vectors.

sentence_bert_config.json is about the Transformer module, config_sentence_transformers.json about
the whole. They mean what they mean to `SentenceTransformer.encode` of version 6. What they want
and is not supported is refused by its name, and so is what is not known.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlx_t5.checkpoints.small_files import SENTENCE_SETTINGS, read_object
from mlx_t5.errors import UserError, shown
from mlx_t5.pooling import TOKENS
from mlx_t5.ranges import FLAG, POSITIVE, Range, checked

READING, GENERAL = SENTENCE_SETTINGS
TOKENIZER = "tokenizer_config.json"
_UNLIMITED = 1e20  # what transformers takes for no limit; it writes 1e30
_PROMPTS = {"query": "", "document": ""}  # that there are if a file has none of these names
# Values that say what is done here anyway.
_FEATURE_EXTRACTION = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": (TOKENS,),
    "modality_config": tuple(
        {"text": {"method": "forward", "method_output_name": output}}
        for output in ("last_hidden_state", ["last_hidden_state"])
    ),
}
_CUTS, _CUTS_NOTHING = (True, "longest_first", "only_first"), (False, "do_not_truncate")
# What the tokenizer may be given beside its text. How texts are padded makes no difference.
_PROCESSING = ("max_length", "truncation", "padding", "pad_to_multiple_of")


def read_settings(folder: Path) -> dict[str, Any]:
    """What is done to texts before the encoder reads them, and to vectors in the end.

    Args:
        folder: of the model.

    Returns:
        Attributes of `pooling.Pooling`, by name.

    Raises:
        UserError: a file is damaged, or has an entry that is not supported or makes no sense.
    """
    files = folder / GENERAL, folder / READING, folder / TOKENIZER
    general, reading, tokenizer = (read_if_there(file, folder) for file in files)
    known = ("max_seq_length", "do_lower_case", "processing_kwargs", "unpad_inputs")
    require_known(files[1], reading, (*known, *_FEATURE_EXTRACTION))
    for name, values in _FEATURE_EXTRACTION.items():
        if reading.get(name) is not None and reading[name] not in values:
            raise refused(files[1], name, reading[name])
    side = tokenizer.get("truncation_side") or "right"
    if side not in ("left", "right"):
        raise refused(files[2], "truncation_side", side)
    return {
        **_general(files[0], general),
        "max_tokens": _max_tokens(folder, reading, tokenizer),
        "keeps_end": side == "left",
        "lower_case": read_entry(files[1], reading, "do_lower_case", FLAG, False),
    }


def read_if_there(file: Path, root: Path) -> dict[str, Any]:
    """The object in a JSON file of the model folder `root`; {} if there is none."""
    return read_object(file, "fetch it again", root) if os.path.lexists(file) else {}


def require_known(file: Path, raw: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuses entries of other names, unless they are null."""
    for name, value in raw.items():
        if name not in known and value is not None:
            raise refused(file, name, value)


def read_entry(
    file: Path, raw: Mapping[str, Any], name: str, allowed: Range, default: Any = None
) -> Any:
    """An entry of a file's object, checked; `default` where it is absent or null."""
    value = raw.get(name)
    return default if value is None else checked(f"{file}: {name}", value, allowed)


def refused(file: Path, name: str, value: Any) -> UserError:
    """The error about an entry that cannot be honoured."""
    return UserError(f"{file}: {shown(name)} {shown(value)} is not supported here")


def _general(file: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The entries about the whole model."""
    without_effect = ("__version__", "requirements", "similarity_fn_name")
    honoured = ("model_type", "prompts", "default_prompt_name", "truncate_dim")
    require_known(file, raw, (*honoured, *without_effect))
    if raw.get("model_type") not in (None, "SentenceTransformer"):
        raise refused(file, "model_type", raw["model_type"])
    name, prompts = raw.get("default_prompt_name"), raw.get("prompts") or {}
    width = read_entry(file, raw, "truncate_dim", POSITIVE)
    if not isinstance(prompts, dict):
        raise refused(file, "prompts", prompts)
    prompts = _PROMPTS | {n: "" if text is None else text for n, text in prompts.items()}
    prompt = "" if name is None else prompts.get(name) if isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise UserError(f"{file}: its prompts have no text for default_prompt_name {shown(name)}")
    return {"prompt": prompt, "truncate_dim": width}


def _max_tokens(folder: Path, reading: Mapping[str, Any], own: Mapping[str, Any]) -> int | None:
    """How many tokens of a text are read, the end token included; None for all."""
    file = folder / READING
    processing = _processing(file, reading.get("processing_kwargs"))
    cuts = processing.get("truncation", True)
    if cuts not in (*_CUTS, *_CUTS_NOTHING):
        raise refused(file, "truncation", cuts)
    if cuts in _CUTS_NOTHING:
        return None
    for raw, name in ((processing, "max_length"), (reading, "max_seq_length")):
        if raw.get(name) is not None:
            return _limit(file, raw, name)
    config = read_if_there(folder / "config.json", folder)
    if config.get("max_position_embeddings") == -1:  # none
        del config["max_position_embeddings"]
    limits = (
        _limit(folder / TOKENIZER, own, "model_max_length"),
        _limit(folder / "config.json", config, "max_position_embeddings"),
    )
    return min((limit for limit in limits if limit is not None), default=None)


def _processing(file: Path, raw: Any) -> dict[str, Any]:
    """What `processing_kwargs` gives the tokenizer."""
    buckets = raw if isinstance(raw, dict) else {"processing_kwargs": raw}
    for name, entries in buckets.items():
        if entries and (name not in ("text", "common") or not isinstance(entries, dict)):
            raise refused(file, name, entries)
    own = {**(buckets.get("text") or {}), **(buckets.get("common") or {})}
    for name, value in own.items():
        if name not in _PROCESSING:
            raise refused(file, name, value)
    return own


def _limit(file: Path, raw: Mapping[str, Any], name: str) -> int | None:
    """A number of tokens; None if there is none, or it is too large to be a limit."""
    value = raw.get(name)
    if isinstance(value, (int, float)) and value > _UNLIMITED:
        return None
    return read_entry(file, raw, name, POSITIVE)
