"""generation_config.json and task_specific_params: the settings they mean, and what is left out."""

import json
from dataclasses import fields

import pytest

from mlx_t5.checkpoints.generation_config import (
    combined,
    find_task,
    read_generation_config,
    read_tasks,
)
from mlx_t5.errors import UserError
from mlx_t5.requests import Settings

SUPPORTED = {field.name for field in fields(Settings)}
# As t5-small's config.json has it.
SUMMARIES = {
    "early_stopping": True, "length_penalty": 2.0, "max_length": 200, "min_length": 30,
    "no_repeat_ngram_size": 3, "num_beams": 4, "prefix": "summarize: ",
}  # fmt: skip


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
        ({"max_length": 20}, {"max_tokens": 19}),  # it counts the start token
        ({"max_length": 20, "max_new_tokens": 7}, {"max_tokens": 7}),
        ({"max_new_tokens": 7, "max_length": 20}, {"max_tokens": 7}),
        ({"min_length": 5}, {"min_tokens": 4}),
        ({"min_length": 0}, {"min_tokens": 0}),
        ({"min_length": 5, "min_new_tokens": 2}, {"min_tokens": 2}),
        ({"do_sample": False, "temperature": 0.7}, {"temp": 0.0}),
        ({"temperature": 0.7}, {}),  # transformers does not sample either
        ({"do_sample": True}, {"temp": 1.0, "top_k": 50}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0}, {"temp": 0.7, "top_k": 0}),
        ({"top_k": 20, "top_p": 0.9}, {"top_k": 20, "top_p": 0.9}),
        (
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
            {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        ),
        ({"max_length": None, "do_sample": None}, {}),
    ],
)
def test_settings(folder, raw, settings):
    preset = read_generation_config(folder(raw))
    assert (preset.settings, preset.left_out, preset.note) == (settings, (), "")


def test_a_published_file_changes_nothing(folder):
    published = {
        "_from_model_config": True,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "transformers_version": "4.27.0.dev0",
    }
    preset = read_generation_config(folder(published, decoder_start_token_id=0, pad_token_id=0))
    assert (preset.settings, preset.left_out) == ({}, ())
    absent = read_generation_config(folder())
    assert (absent.settings, absent.note) == ({}, "")


def test_what_would_change_the_text_is_named(folder):
    raw = {
        "typical_p": 0.9,
        "renormalize_logits": True,
        "bad_words_ids": [[5]],
        "eos_token_id": [1, 5],
        "num_return_sequences": 2,
        "epsilon_cutoff": 0.0,
        "num_beam_groups": 1,
        "remove_invalid_values": False,
        "use_cache": False,
        "suppress_tokens": [],
    }
    preset = read_generation_config(folder(raw))
    named = ("typical_p", "renormalize_logits", "bad_words_ids", "num_return_sequences")
    assert preset.left_out == (*named, "eos_token_id")
    assert preset.note.startswith("generation_config.json: left out, as not supported: typical_p, ")


def test_beams_count_as_soon_as_there_are_settings_for_them(folder):
    beams = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}
    task = read_tasks(folder(task_specific_params={"summarization": SUMMARIES}))["summarization"]
    others = {"max_tokens": 199, "min_tokens": 29, "no_repeat_ngram_size": 3}
    assert task.prefix == "summarize: "
    assert task.settings == others | {n: v for n, v in beams.items() if n in SUPPORTED}
    assert set(task.left_out) == set(beams) - SUPPORTED


def test_beams_that_sample_are_left_out(folder):
    preset = read_generation_config(folder({"do_sample": True, "num_beams": 2}))
    assert preset.settings == {"temp": 1.0, "top_k": 50}
    assert preset.left_out == ("num_beams",)


def test_a_later_wish_overrides_an_earlier_one():
    assert combined({"top_k": 5, "temp": 1.0}, {"top_k": 7}) == {"top_k": 7, "temp": 1.0}
    beams = {"num_beams": 4, "length_penalty": 2.0}
    assert combined(beams, {"temp": 0.5}) == {"length_penalty": 2.0, "temp": 0.5}
    assert combined({"temp": 0.5, "delta": 0.1}, beams) == beams
    assert combined(beams, {"temp": 0.0}) == {**beams, "temp": 0.0}


def test_unknown_tasks_are_told_which_there_are(folder):
    tasks = read_tasks(folder(task_specific_params={"summarization": SUMMARIES, "b\n": {}}))
    with pytest.raises(UserError, match=r"no task 'x'; it has summarization, b\\n$"):
        find_task(tasks, "x")
    with pytest.raises(UserError, match="its config.json has no task_specific_params"):
        find_task(read_tasks(folder(task_specific_params=None)), "x")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ('{"max_length": 5', "is no valid JSON"),
        ("[]", "holds no object"),
        ({"max_length": "long"}, "generation_config.json: max_tokens is 'long'"),
        ({"max_length": 1}, "max_tokens is 0; it must be"),
        ({"top_p": 2}, "top_p is 2"),
        ({"do_sample": "yes"}, "do_sample must be true or false"),
        ({"do_sample": True, "temperature": -1}, "temp is -1"),
    ],
)
def test_a_damaged_file_is_one_line(folder, raw, message):
    with pytest.raises(UserError, match=message) as refused:
        read_generation_config(folder(raw))
    assert str(refused.value).endswith("; --ignore-generation-config does without it")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([1], "must be an object of objects"),
        ({"a": "b"}, "must be an object of objects"),
        ({"a": {"prefix": 5}}, "task a: its prefix is no text"),
        ({"a": {"min_length": -7.5}}, "task a: min_tokens is -7.5"),
    ],
)
def test_damaged_tasks_are_one_line(folder, tasks, message):
    with pytest.raises(UserError, match=message):
        read_tasks(folder(task_specific_params=tasks))
