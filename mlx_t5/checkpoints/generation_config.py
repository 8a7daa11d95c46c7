"""Reads a model's generation settings from generation_config.json and its tasks from config.json.

Both files have the entries of transformers' `GenerationConfig`. If there is no
generation_config.json, the settings are read from config.json, as in transformers 5. Supported
entries become `settings.Settings` with the same meaning as in transformers:

| entry | setting |
| --- | --- |
| `max_new_tokens`, `min_new_tokens` | `max_tokens`, `min_tokens` |
| `max_length`, `min_length` | `max_tokens`, `min_tokens`, less 1 for the start token |
| `do_sample: true` | `temp` is `temperature`, or 1 without it; `top_k` is 50 unless given |
| `do_sample: false` | `temp` is 0, whatever `temperature` is |
| `top_k`, `bad_words_ids`, … (see settings.py and `TOKEN_RULES`) | the setting of the same name |

Unsupported entries that would change the text are reported, because without them the text differs
from the text of transformers. So is `num_beams`, because only the user starts a beam search, and
what only sampling reads, if the file does not ask for samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_t5.disk import read_object
from mlx_t5.errors import UserError, brief
from mlx_t5.settings import SETTINGS, SMALLEST, TOKEN_RULES, Settings, refusal

FILE, CONFIG = "generation_config.json", "config.json"
_DAMAGED = "give a model folder, MLX or Hugging Face"


# The setting of each entry. If two entries have the same setting, the later entry in this order
# counts, as in transformers.
_ENTRIES = {entry: name for name, setting in SETTINGS.items() for entry in setting.config}
# The entries of these settings have the same names, and values that `Settings` checks.
AS_THEY_ARE = (*TOKEN_RULES, "repetition_detection")
BEAMS = ("num_beams", "length_penalty", "early_stopping")
# Ids are no settings: `config.read_config` reads them.
TOKEN_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id", "bos_token_id")
# Entries that do not affect the text: caches, output formats, and entries about drafting and
# computing in transformers.
_WITHOUT_EFFECT = frozenset(
    "prefix transformers_version use_cache cache_implementation cache_config "
    "max_cache_len output_attentions output_hidden_states output_scores output_logits "
    "return_dict_in_generate return_legacy_cache disable_compile compile_config low_memory "
    "prefill_chunk_size continuous_batching_config num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit "
    "assistant_lookbehind target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size "
    "speculation_type use_mtp".split()
)
# The entries that only sampling reads, each with the values that change nothing even then.
_SAMPLED = {"temperature": (1,), "top_k": (50, 0), "top_p": (1,), "min_p": (0,)}
# Unsupported entries, each with the values (besides null) that have no effect in transformers. An
# entry with an id has no such value.
_NOTHING: tuple[Any, ...] = (False, "", [], {})
_OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("is_assistant", "remove_invalid_values", "renormalize_logits"), (False,)),
    **dict.fromkeys(("token_healing", "force_bos_token_to_be_generated"), (False,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0, 1)),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "penalty_alpha"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p"), (1,)),
    **dict.fromkeys(("num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("constraints", "force_words_ids", "sequence_bias"), _NOTHING),
    **dict.fromkeys(("exponential_decay_length_penalty", "stop_strings"), _NOTHING),
    **dict.fromkeys(("begin_suppress_tokens", *AS_THEY_ARE), _NOTHING),
    **dict.fromkeys(("assistant_ensemble_weight", "dola_layers", "max_time", "top_h"), ()),
    "watermarking_config": (),  # even an empty object adds a watermark
}


@dataclass(frozen=True)
class Preset:
    """The generation settings of a file or a task.

    Attributes:
        source: the name of the file or task, for messages.
        prefix: text to put before every prompt.
        settings: values for `Settings` by name.
        left_out: the entries that are not supported, or have a value that is not.
        unread: the entries that only sampling reads, where the file does not ask for samples.
        num_beams: the number of beams that the file asks for; nothing is searched because of it.
    """

    source: str
    prefix: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    num_beams: int = 1

    @property
    def note(self) -> str:
        if not self.left_out:
            return ""
        return f"{self.source}: left out, as not supported: {', '.join(self.left_out)}"

    @property
    def unread_note(self) -> str:
        if not self.unread:
            return ""
        return f"{self.source}: without effect, as only sampling reads it: {', '.join(self.unread)}"

    @property
    def beams_note(self) -> str:
        if self.num_beams == 1:
            return ""
        asked = f"the model's files ask for {self.num_beams} beams"
        return f"{asked}; --num-beams {self.num_beams} searches, without a draft"


def read_generation_config(folder: Path) -> Preset:
    name = FILE if (folder / FILE).exists() else CONFIG
    raw = read_object(folder / name, _DAMAGED)
    if name == CONFIG:
        known = {*_ENTRIES, *_OFF, "do_sample", *_SAMPLED, *BEAMS}
        raw = {entry: value for entry, value in raw.items() if entry in known}
    try:
        return _preset(name, raw)
    except UserError as error:
        cure = "--ignore-generation-config ignores the file's settings"
        raise UserError(f"{error}; {cure}") from None


def read_tasks(folder: Path) -> dict[str, Preset]:
    """Each task's settings by name, from `task_specific_params` in config.json."""
    tasks = read_object(folder / CONFIG, _DAMAGED).get("task_specific_params") or {}
    if not isinstance(tasks, dict) or not all(isinstance(raw, dict) for raw in tasks.values()):
        raise UserError("config.json: task_specific_params must be an object of objects")
    return {name: _preset(f"task {brief(name)}", raw) for name, raw in tasks.items()}


def find_task(tasks: Mapping[str, Preset], name: str) -> Preset:
    if name not in tasks:
        known = ", ".join(map(brief, tasks)) or "none: its config.json has no task_specific_params"
        raise UserError(f"this model has no task {brief(name)!r}; it has {known}")
    return tasks[name]


def combined(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Merges settings; later sources win, and their beams exclude what beams do not have."""
    result: dict[str, Any] = {}
    for source in sources:
        if (source.get("num_beams") or 1) > 1:
            for name in ("temp", "delta", "repetition_detection"):
                result.pop(name, None)
        result |= source
    return result


def _preset(source: str, raw: Mapping[str, Any]) -> Preset:
    raw = {name: value for name, value in raw.items() if value is not None}
    prefix, beams = raw.get("prefix", ""), raw.get("num_beams")
    try:
        if not isinstance(prefix, str):
            raise UserError("its prefix is no text")
        settings, left_out = _settings(raw)
        Settings(**settings)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    sampling = {} if raw.get("do_sample") else _SAMPLED
    unread = [name for name, off in sampling.items() if raw.get(name, off[0]) not in off]
    count = beams if type(beams) is int else 1
    return Preset(source, prefix, settings, tuple(left_out), tuple(unread), count)


def _settings(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values for `Settings`, and the names of entries that are left out; errors name the entry."""
    sample, entries, settings, left_out = raw.get("do_sample"), dict(_ENTRIES), dict[str, Any](), []
    if not isinstance(sample, bool | None):
        raise UserError("do_sample must be true or false")
    if sample is not None:
        settings["temp"] = 1.0 if sample else 0.0
    if sample:
        settings["top_k"] = 50  # transformers' default for sampling
        entries["temperature"] = "temp"
    for entry, name in entries.items():
        if entry not in raw:
            continue
        value, setting = raw[entry], SETTINGS[name]
        if entry == "top_p" and value == 0:  # keeps the likeliest token, as the smallest number
            value = SMALLEST
        elif type(value) is int:
            if entry in ("max_length", "min_length"):  # which count the start token
                value -= 1
            if not setting.range.least and not setting.only_with:  # below 0 is off, too
                value = max(value, 0)
        settings[name] = setting.range.fit(value)
        if settings[name] is None:
            if sample or setting.only_with != "sampling":
                least = "a whole number, at least 2"
                expected = least if entry == "max_length" else setting.range.expected
                raise refusal(entry, raw[entry], expected)
            del settings[name]  # transformers does not read it either
    silent = {*_ENTRIES, *_WITHOUT_EFFECT, "do_sample", *_SAMPLED, *TOKEN_IDS, *BEAMS}
    for entry, value in raw.items():
        flag = isinstance(value, bool)  # False would equal 0, and True 1
        off = [v for v in _OFF.get(entry, _NOTHING) if isinstance(v, bool) == flag]
        if entry in silent or entry.startswith("_") or value in off:
            continue
        if entry in AS_THEY_ARE:
            settings[entry] = value
        else:
            left_out.append(brief(entry))
    return settings, left_out
