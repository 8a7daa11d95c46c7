"""Tests the settings read from generation_config.json and task_specific_params."""

import json
import shutil

import pytest
import torch
import transformers

from mlx_t5.checkpoints.config import T5Config, read_config
from mlx_t5.checkpoints.generation_config import (
    FILE,
    Preset,
    combined,
    find_task,
    read_generation_config,
    read_tasks,
)
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.settings import SMALLEST

# From t5-small's config.json.
SUMMARIES = {
    "early_stopping": True, "length_penalty": 2.0, "max_length": 200, "min_length": 30,
    "no_repeat_ngram_size": 3, "num_beams": 4, "prefix": "summarize: ",
}  # fmt: skip
IDS = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


@pytest.fixture
def folder(tmp_path):
    def write(generation=None, **config):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1, **config}))
        if generation is not None:
            text = generation if isinstance(generation, str) else json.dumps(generation)
            (tmp_path / "generation_config.json").write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("raw", "settings"),
    [
        ({}, {}),
        ({"max_length": 20}, {"max_tokens": 19}),  # max_length includes the start token
        ({"max_length": 20, "max_new_tokens": 7}, {"max_tokens": 7}),
        ({"min_length": 5}, {"min_tokens": 4}),
        ({"min_length": 5, "min_new_tokens": 2}, {"min_tokens": 2}),
        ({"do_sample": False, "temperature": 0.7}, {"temp": 0.0}),
        ({"temperature": 0.7}, {}),  # without do_sample, transformers does not sample either
        ({"do_sample": True}, {"temp": 1.0, "top_k": 50}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0}, {"temp": 0.7, "top_k": 0}),
        ({"top_k": 20, "repetition_penalty": 1.2}, {"top_k": 20, "repetition_penalty": 1.2}),
        ({"max_length": None, "do_sample": None}, {}),
        (
            {"num_beams": 1, "length_penalty": 2.0, "early_stopping": 1},
            {},
        ),  # only the user searches
        ({"do_sample": True, "top_p": 0.0}, {"temp": 1.0, "top_k": 50, "top_p": SMALLEST}),
        (
            {"min_length": -1, "no_repeat_ngram_size": -1},
            {"min_tokens": 0, "no_repeat_ngram_size": 0},
        ),
        (
            {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
            {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
        ),
        (
            {"bad_words_ids": [[5, 6]], "forced_bos_token_id": 0},
            {"bad_words_ids": [[5, 6]], "forced_bos_token_id": 0},
        ),
        # Published files, and no file.
        ({"_from_model_config": True, "transformers_version": "4.27", **IDS}, {}),
        (None, {}),
    ],
)
def test_entries_become_settings(folder, raw, settings):
    preset = read_generation_config(folder(raw, **IDS))
    assert (preset.settings, preset.left_out, preset.note) == (settings, (), "")


# Entries that transformers may turn into a logits processor or stopping criterion, and values.
NUMBERS = {
    "encoder_no_repeat_ngram_size": (0, 1, 2),
    "encoder_repetition_penalty": (1, 1.0, 1.5),
    "epsilon_cutoff": (0, 0.0, 1, 1e-4),
    "eta_cutoff": (0, 0.0, 1.0, 1e-4),
    "guidance_scale": (0, 1, 1.0, 2),
    "max_time": (0, 1, 0.5),
    "remove_invalid_values": (False, True),
    "renormalize_logits": (False, True),
    "top_h": (0.5, 1),
    "typical_p": (1, 1.0, 0.5),
    "watermarking_config": ({}, {"bias": 1.0}),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in NUMBERS for v in NUMBERS[n]])
def test_unsupported_numbers_are_named_only_where_transformers_uses_them(
    folder, reference_of, name, value
):
    own, model = (
        transformers.GenerationConfig(do_sample=True, **{name: value}),
        reference_of("t5").model,
    )
    own._eos_token_tensor = torch.tensor([1])
    source = {"input_ids_seq_length": 1, "encoder_input_ids": torch.tensor([[5, 1]])}
    acts = [*model._get_logits_processor(own, **source), *model._get_stopping_criteria(own, [])]
    acts = [act for act in acts if not isinstance(act, transformers.EosTokenCriteria)]
    named = read_generation_config(folder({name: value})).left_out
    assert named == ((name,) if acts else ())
    assert read_tasks(folder(task_specific_params={"t": {name: value}}))["t"].left_out == named


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"diversity_penalty": 1, "begin_suppress_tokens": [5], "an_entry_of_tomorrow": 1}, True),
        ({"diversity_penalty": 0.0, "num_beam_groups": 1, "num_return_sequences": 1}, False),
        ({"use_cache": False, "suppress_tokens": [], "epsilon_cutoff": 0.0}, False),
        ({"a_flag_of_tomorrow": False, "a_list_of_tomorrow": [], "use_mtp": True}, False),
    ],
)
def test_unsupported_entries_are_named_unless_neutral(folder, entries, named):
    assert read_generation_config(folder(entries)).left_out == (tuple(entries) if named else ())


@pytest.mark.parametrize("sample", [None, False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.7), ("temperature", 1.0), ("top_k", 5), ("top_k", 50), ("top_p", 0.9),
     ("top_p", 1.0), ("min_p", 0.1), ("repetition_penalty", 1.2)],
)  # fmt: skip
def test_what_only_sampling_reads_is_named_as_in_transformers(folder, name, value, sample):
    entries = {"do_sample": sample, name: value}
    try:
        transformers.GenerationConfig(**entries).validate(strict=True)
        named = ()
    except ValueError:
        named = (name,)
    preset = read_generation_config(folder(entries))
    assert (preset.unread, preset.left_out) == (named, ())
    assert read_tasks(folder(task_specific_params={"t": entries}))["t"].unread == named
    note = f"{FILE}: without effect, as only sampling reads it: {name}"
    assert preset.unread_note == (note if named else "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "entries",
    [
        {"max_length": 12, "min_length": 8},
        {"max_length": 9, "bad_words_ids": [[21, 21], [0, 0, 0], [1]], "suppress_tokens": [1, 7]},
        {"max_length": 9, "forced_bos_token_id": 0, "forced_eos_token_id": [1, 5]},
        {"max_new_tokens": 7, "no_repeat_ngram_size": 2, "repetition_penalty": 1.5},
        {"max_length": 6, "do_sample": False, "temperature": 0.5},
    ],
)
def test_settings_in_config_json_are_those_of_transformers(reference_of, tmp_path, entries):
    """This holds if there is no generation_config.json."""
    reference = reference_of("t5")
    folder = shutil.copytree(reference.folder, tmp_path / "m")
    (folder / FILE).unlink(missing_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **entries, "max_time": None}))
    preset = read_generation_config(folder)
    decoder = SpeculativeDecoder(load(folder, "float32")[0])
    hf_model = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    for source in ([5, 9, 11, 30, 7, 1], [8, 1]):
        written = hf_model.generate(torch.tensor([source]))[0, 1:].tolist()
        result = decoder.generate(source, **preset.settings)
        assert result.tokens + [1] * (result.finish_reason == "stop") == written
    (folder / "config.json").write_text(json.dumps({**raw, "max_time": 1, "prefix": "a"}))
    preset = read_generation_config(folder)
    assert preset.note == "config.json: left out, as not supported: max_time"
    assert preset.prefix == ""
    (folder / FILE).write_text("{}")
    assert read_generation_config(folder) == Preset(FILE)


@pytest.mark.slow
@pytest.mark.parametrize("in_config", [{}, {"eos_token_id": 1, "decoder_start_token_id": 0}])
def test_ids_in_generation_config_are_used_as_in_transformers(reference_of, tmp_path, in_config):
    folder, source = (
        shutil.copytree(reference_of("t5").folder, tmp_path / "m"),
        [5, 9, 11, 30, 7, 1],
    )
    raw = json.loads((folder / "config.json").read_text())
    bare = {entry: value for entry, value in raw.items() if not entry.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(bare | in_config))

    def written(eos):
        ids = {"decoder_start_token_id": 7, "pad_token_id": 3, "eos_token_id": eos}
        (folder / FILE).write_text(json.dumps({**ids, "max_length": 21}))
        hf_model = transformers.T5ForConditionalGeneration.from_pretrained(folder)
        tokens = (
            SpeculativeDecoder(load(folder, "float32")[0]).generate(source, max_tokens=20).tokens
        )
        assert hf_model.generate(torch.tensor([source]))[0, 1 : len(tokens) + 1].tolist() == tokens
        return tokens

    endless = written([90])
    ends = written([90, endless[3], endless[6]])
    assert ends == endless[: endless.index(endless[3])] != endless


@pytest.mark.parametrize(
    ("family", "config", "generation"),
    [
        ("t5", {}, {"bos_token_id": 7}),
        ("t5", {"decoder_start_token_id": 9}, {"bos_token_id": 7}),
        ("t5", {"bos_token_id": 7}, None),
        ("t5", {"decoder_start_token_id": 9, "bos_token_id": 7}, None),
        ("t5", {}, {"decoder_start_token_id": [9], "bos_token_id": 7}),
        ("t5", {"decoder_start_token_id": [9]}, None),
        ("t5", {}, {"bos_token_id": [7]}),
        ("mt5", {"bos_token_id": 7}, None),
        ("mt5", {"bos_token_id": 7}, {"bos_token_id": 8}),
    ],
)
def test_the_start_token_is_that_of_transformers(
    reference_of, tmp_path, family, config, generation
):
    folder = shutil.copytree(reference_of(family).folder, tmp_path / "m")
    raw = json.loads((folder / "config.json").read_text())
    bare = {name: value for name, value in raw.items() if name != "decoder_start_token_id"}
    (folder / "config.json").write_text(json.dumps(bare | config))
    (folder / FILE).unlink(missing_ok=True)
    if generation is not None:
        (folder / FILE).write_text(json.dumps(IDS | {"decoder_start_token_id": None} | generation))
    hf_model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    expected = hf_model.generate(torch.tensor([[5, 1]]), max_new_tokens=1)[0, 0]
    assert T5Config.from_dict(read_config(folder)).decoder_start_token_id == expected


def test_a_task_has_a_prefix_and_settings_but_its_beams_are_only_reported(folder):
    task = read_tasks(folder(task_specific_params={"summarization": SUMMARIES}))["summarization"]
    assert (task.prefix, task.left_out) == ("summarize: ", ())
    assert task.settings == {"max_tokens": 199, "min_tokens": 29, "no_repeat_ngram_size": 3}
    searches = "--num-beams 4 searches, without a draft"
    assert task.beams_note == f"the model's files ask for 4 beams; {searches}"
    assert read_generation_config(folder({"num_beams": 1})).beams_note == ""


def test_later_settings_override_earlier_ones():
    assert combined({"top_k": 5, "temp": 1.0}, {"top_k": 7}) == {"top_k": 7, "temp": 1.0}
    earlier = {"temp": 0.5, "delta": 0.1, "repetition_detection": {}}
    assert combined(earlier, {"num_beams": 4}) == {"num_beams": 4}


def test_an_unknown_task_is_refused_with_the_known_names(folder):
    tasks = read_tasks(folder(task_specific_params={"summarization": SUMMARIES, "b\n": {}}))
    with pytest.raises(UserError, match=r"no task 'x'; it has summarization, b\\n$"):
        find_task(tasks, "x")
    with pytest.raises(UserError, match="its config.json has no task_specific_params"):
        find_task(read_tasks(folder(task_specific_params=None)), "x")


@pytest.mark.parametrize(
    ("raw", "message"), [("{", "is not valid JSON"), ("[]", "not hold an object")]
)
def test_a_damaged_file_is_refused_in_one_line(folder, raw, message):
    """`--ignore-generation-config` would not help, because the file also has ids."""
    for read in (read_generation_config, read_config):
        with pytest.raises(UserError, match=f"{FILE} .*{message}.*fetch it again$"):
            read(folder(raw))


@pytest.mark.parametrize(
    ("raw", "tasks", "message"),
    [
        (
            {"max_new_tokens": 0},
            None,
            "generation_config.json: max_new_tokens is 0; .*; --ignore-gen",
        ),
        ({"max_length": 1}, None, "max_length is 1; it must be a whole number, at least 2"),
        ({"do_sample": True, "top_k": -1}, None, "top_k is -1"),
        ({"do_sample": True, "temperature": -1}, None, "temperature is -1"),
        ({"bad_words_ids": [5]}, None, "bad_words_ids is .5.; it must be"),
        ({"repetition_detection": {"max_pattern_size": 4}}, None, "min_count is 0; it must be 2"),
        ({"forced_eos_token_id": "x"}, None, "forced_eos_token_id is"),
        ({"do_sample": "yes"}, None, "do_sample must be true or false"),
        (None, {"a": "b"}, "must be an object of objects"),
        (None, {"a": {"prefix": 5}}, "task a: its prefix is no text"),
        (None, {"a": {"min_length": -7.5}}, "task a: min_length is -7.5"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(folder, raw, tasks, message):
    path = folder(raw, task_specific_params=tasks)
    with pytest.raises(UserError, match=message):
        read_tasks(path) if tasks else read_generation_config(path)
