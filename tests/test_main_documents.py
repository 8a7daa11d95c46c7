"""Tests documents on the command line, from end to end with the bundled pair."""

import json
import os
import shutil
import sys

import pytest

from command_line import ROOT
from mlx_t5.engine import codec, document_batch
from mlx_t5.errors import UserError
from mlx_t5.text.prompts import token_ids

TARGET = ROOT / "demo" / "target"
MODEL = [
    "--model",
    str(TARGET),
    "--draft-model",
    str(ROOT / "demo" / "draft"),
    "--dtype",
    "float32",
    "--num-draft",
    "5",
]
TASK = "translate English to French: "
SOURCE = (
    "I have two cats. We have two dogs.\r\n\r\n***\r\n\t- It is going to rain next Thursday. \r\n\n"
)
FRENCH = (
    "J'ai deux chats. Nous avons deux chiens.\r\n\r\n***\r\n\t"
    "- Il va pleuvoir jeudi prochain. \r\n\n"
)
SPLIT = [*MODEL, "--split", "sentences"]


@pytest.fixture
def failing(monkeypatch):
    """Makes pieces that contain "dog" fail."""

    def refusing(prompt, *args):
        if "dog" in prompt:
            raise UserError("no dogs")
        return token_ids(prompt, *args)

    monkeypatch.setattr(codec, "token_ids", refusing)


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "in.txt") -> list[str]:
        (tmp_path / name).write_bytes(text.encode())
        return ["--input-file", str(tmp_path / name)]

    return write


# ---- a file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_file_is_one_document_and_kept_to_the_byte(run, file, tmp_path, mark):
    out = tmp_path / "out.txt"
    source = [*SPLIT, *file(mark + SOURCE), "--prefix", TASK]
    status, shown, err = run(*source, "--output-file", str(out))
    assert (status, shown, out.read_bytes().decode()) == (0, "", mark + FRENCH)
    assert "\n3 pieces · " in err and os.listdir(tmp_path) == ["in.txt", "out.txt"]
    status, shown, _ = run(*source)
    assert (status, shown) == (0, mark + FRENCH), "no line break is added where no terminal is"


@pytest.mark.parametrize("by", ["--input-file", "--prompt"])
def test_an_interrupted_document_keeps_its_finished_pieces(run, file, tmp_path, monkeypatch, by):
    def interrupted(*args, **call):
        yield next(chunks(*args, **call))
        raise KeyboardInterrupt

    chunks, out = document_batch.chunks, tmp_path / "out.txt"
    source = [*SPLIT, "--prefix", TASK, *(file(SOURCE) if by == "--input-file" else [by, SOURCE])]
    with monkeypatch.context() as patch:
        patch.setattr(document_batch, "chunks", interrupted)
        status, _, err = run(*source, "--output-file", str(out))
    assert (status, out.read_text()) == (130, "J'ai deux chats.") and "interrupted: " in err
    assert run(*source, "--output-file", str(out))[0] == 0
    assert out.read_bytes().decode() == FRENCH


def test_a_terminal_gets_a_line_break(run, file, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(*SPLIT, *file("I have two cats."), "--prefix", TASK)[1] == "J'ai deux chats.\n"


def test_the_prefix_may_be_in_the_file(run, file):
    text = f"{TASK}I have two cats.\nWe have two dogs.\n"
    assert run(*MODEL, *file(text), "--split", "lines")[:2] == (
        0,
        "J'ai deux chats.\nNous avons deux chiens.\n",
    )


def test_the_bundled_models_tasks_decode_documents(run):
    for name, source, answer in (
        ("translation_en_to_fr", "I have two cats. We have two dogs.", FRENCH.split("\r")[0]),
        ("grammar", "She have two cat. I has a dog.", "She has two cats. I have a dog."),
    ):
        assert run(*SPLIT, "--task", name, "--prompt", source)[1] == answer


def test_a_possible_prefix_is_decoded_and_noted_once(run, file):
    note = 'note: "title:" is decoded as text'
    for options in (
        ["--prompt", "title: My page.", "--json"],
        file("title: My page.\n"),
        file('{"prompt": "title: My page."}\n{"prompt": "fix: this"}\n', "in.jsonl"),
    ):
        status, _, err = run(*SPLIT, *options)
        assert status == 0 and err.count("note: ") == 1 and note in err
        assert "note: " not in run(*SPLIT, *options, "--prefix", "")[2]
        assert "note: " not in run(*SPLIT, *options, "--task", "grammar")[2]
    status, shown, _ = run(*SPLIT, "--prompt", "title: My page.", "--json")
    assert json.loads(shown)["pieces"][0]["start"] == 0


def test_json_has_the_pieces(run, file):
    status, shown, _ = run(*SPLIT, *file(TASK + SOURCE), "--json")
    record = json.loads(shown)
    assert list(record) == ["prompt", "text", "tokens", "finish_reason", "stats", "pieces"]
    assert record["prompt"] == TASK + SOURCE and record["text"] == FRENCH
    counts = [record["stats"][name] for name in ("pieces", "cut", "failed")]
    assert (status, counts, record["finish_reason"]) == (0, [3, 0, 0], "stop")
    first, second, third = record["pieces"]
    assert list(first) == ["start", "end", "text", "finish_reason"]
    assert record["prompt"][third["start"] : third["end"]].startswith("It is going")
    assert (second["text"], second["finish_reason"]) == ("Nous avons deux chiens.", "stop")


def test_a_failed_piece_keeps_its_source(run, file, tmp_path, failing):
    out = tmp_path / "out.txt"
    source = [*SPLIT, *file(SOURCE), "--prefix", TASK]
    status, _, err = run(*source, "--output-file", str(out))
    expected = FRENCH.replace("Nous avons deux chiens.", "We have two dogs.")
    assert (status, out.read_bytes().decode()) == (2, expected)
    assert "error: 1 of 3 pieces stand as they were; the first, at character 18: no dogs\n" in err
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out.txt"], "it is complete"
    assert "3 pieces (1 failed) · " in err
    status, shown, err = run(*source, "--json")
    record = json.loads(shown)
    assert (status, record["text"], record["stats"]["failed"]) == (2, expected, 1)
    assert [piece.get("error") for piece in record["pieces"]] == [None, "no dogs", None]
    assert "error" not in record and "error: prompt 1: 1 of 3 pieces" in err


def test_a_document_whose_pieces_all_fail_is_printed_unchanged(run, file, failing):
    status, shown, err = run(*SPLIT, *file("A dog. Two dogs.\n"))
    assert (status, shown) == (2, "A dog. Two dogs.\n") and "error: 2 of 2 pieces" in err


def test_long_sentences_are_cut_and_counted(run, file):
    source = file("I have two cats and two dogs, and it is going to rain next Thursday. Yes.")
    status, shown, err = run(*SPLIT, *source, "--prefix", TASK, "--max-source-tokens", "21")
    assert status == 0 and "3 pieces (2 cut) · " in err
    refused = run(*SPLIT, *source, "--prefix", TASK, "--max-source-tokens", "5", "--json")
    assert refused[0] == 2 and "max_source_tokens is 5, but the prefix and one letter" in refused[2]


@pytest.mark.parametrize(
    "data, cause", [(b"\xff\xfe", "is not UTF-8"), (b"a\0", "is not UTF-8"), (b"\n \n", "is empty")]
)
def test_files_that_are_no_text_are_refused(run, tmp_path, data, cause):
    path = tmp_path / "in.txt"
    path.write_bytes(data)
    status, _, err = run(*SPLIT, "--input-file", str(path))
    assert (status, err.count("\n")) == (2, 1) and f"{path} {cause}" in err


def test_misnamed_files_and_too_long_prefixes_are_refused(run, tmp_path):
    path = tmp_path / "in.vtt"
    path.write_text("no subtitles\n")
    status, out, err = run(*SPLIT, "--input-file", str(path))
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("error: a .vtt file")
    status, out, err = run(*SPLIT, "--prompt", f"{TASK}I have", "--max-source-tokens", "3")
    assert (status, out) == (2, "") and "error: max_source_tokens is 3" in err
    assert "tokens/s" not in err


# ---- prompts and lines ---------------------------------------------------------------------------


def test_one_prompt_is_written_piece_by_piece(run):
    status, shown, err = run(*SPLIT, "--prompt", TASK + SOURCE, "-v")
    plain = "".join(part.partition("m")[2] for part in ("\033[m" + shown).split("\033[")[1:])
    assert (status, plain) == (0, FRENCH) and "\033[32m" in shown and "by the draft" in err


def test_several_prompts_are_a_line_each(run, tmp_path):
    out = tmp_path / "out.txt"
    prompts = ["--prompt", TASK + "I have two cats.\nWe have two dogs.", "--prompt", TASK + "..."]
    status, shown, _ = run(*SPLIT, *prompts, "--output-file", str(out))
    assert (status, out.read_text()) == (0, "J'ai deux chats.\\nNous avons deux chiens.\n...\n")


def lines_file(file) -> list[str]:
    records = [{"prompt": TASK + SOURCE}, {"prompt": 5}, {"prompt": TASK + "I have two cats."}]
    records.append({"prompt": TASK + "I have two cats.", "prediction": "x"})
    return file("".join(json.dumps(record) + "\n" for record in records), "in.jsonl")


def test_each_line_of_json_is_a_document_and_resumed_as_one(run, file, tmp_path):
    out = tmp_path / "out.jsonl"
    options = [*SPLIT, *lines_file(file), "--output-file", str(out)]
    status, _, err = run(*options)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert status == 2 and [record["text"] for record in records[:3]] == [
        FRENCH,
        None,
        "J'ai deux chats.",
    ]
    assert [len(record["pieces"]) for record in records] == [3, 0, 1, 0]
    assert "prompt 4: a prediction is of a whole text" in err and "4 pieces" in err
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:2]) + whole[2][:40])
    status, _, err = run(*options, "--resume")
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert status == 2 and "2 of 4 prompts are done" in err, "the last prompt fails again"
    assert [record["text"] for record in again] == [record["text"] for record in records]


def test_a_given_prefix_replaces_that_of_the_task(run, tmp_path):
    copy = shutil.copytree(TARGET, tmp_path / "copy")
    config = json.loads((TARGET / "config.json").read_text())
    config["task_specific_params"] = {"french": {"prefix": TASK}, "none": {}}
    (copy / "config.json").write_text(json.dumps(config))
    options = ["--model", str(copy), "--draft-model", "none", "--dtype", "float32"]
    options += ["--prompt", "I have two cats. We have two dogs."]
    both = "J'ai deux chats. Nous avons deux chiens."
    expected = run(*options, "--prefix", TASK)[1]
    assert run(*options, "--task", "french")[1] == expected
    assert run(*options, "--task", "none", "--prefix", TASK)[1] == expected
    fixed = run(*options, "--task", "french", "--prefix", "fix grammar: ")[1]
    assert fixed == run(*options, "--prefix", "fix grammar: ")[1] != expected
    assert run(*options, "--task", "french", "--split", "sentences")[1] == both
    assert run(*options, "--prefix", TASK, "--split", "sentences")[1] == both
