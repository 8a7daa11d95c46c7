"""Tests documents on the command line, from end to end with the bundled pair."""

import json
import os
import shutil

import pytest

from command_line import ROOT
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.engine import generation_request
from mlx_t5.errors import UserError
from mlx_t5.text.prompts import token_ids

TARGET = ROOT / "demo" / "target"
MODEL = ["--model", str(TARGET), "--draft-model", str(ROOT / "demo" / "draft")]
MODEL += ["--dtype", "float32", "--num-draft", "5"]
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

    monkeypatch.setattr(generation_request, "token_ids", refusing)


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "in.txt", encoding: str = "utf-8") -> list[str]:
        (tmp_path / name).write_bytes(text.encode(encoding))
        return ["--input-file", str(tmp_path / name)]

    return write


# ---- a file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark, encoding", [("", "utf-8"), ("\ufeff", "utf-16-be")])
def test_a_file_is_one_document_and_kept_to_the_byte(run, file, tmp_path, mark, encoding):
    out = tmp_path / "out.txt"
    source = [*SPLIT, *file(mark + SOURCE, encoding=encoding), "--prefix", TASK]
    status, shown, err = run(*source, "--output-file", str(out))
    assert (status, shown, out.read_bytes().decode()) == (0, "", mark + FRENCH)
    assert "\n3 pieces · " in err and os.listdir(tmp_path) == ["in.txt", "out.txt"]
    assert run(*source)[1] == mark + FRENCH, "no line break is added where no terminal is"


@pytest.mark.parametrize("by", ["--input-file", "--prompt"])
def test_an_interrupted_document_keeps_its_finished_pieces(run, file, tmp_path, monkeypatch, by):
    def interrupted(*args, **call):
        yield next(chunks(*args, **call))
        raise KeyboardInterrupt

    chunks, out = SpeculativeDecoder.chunks, tmp_path / "out.txt"
    source = [*SPLIT, "--prefix", TASK, *(file(SOURCE) if by == "--input-file" else [by, SOURCE])]
    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeDecoder, "chunks", interrupted)
        status, _, err = run(*source, "--output-file", str(out))
    assert status == 130 and not out.exists() and "interrupted: " in err
    partial = tmp_path / ".partial-out.txt"
    assert partial.read_text() == "J'ai deux chats." and f"finished is in {partial}\n" in err
    assert run(*source, "--output-file", str(out))[0] == 0
    assert out.read_bytes().decode() == FRENCH and not partial.exists()
    assert run(*source, "--output-file", str(out), "--max-source-tokens", "3")[0] == 2
    assert out.read_bytes().decode() == FRENCH, "a document that cannot be cut"


def test_a_failed_piece_keeps_its_source(run, file, tmp_path, failing):
    out = tmp_path / "out.txt"
    source = [*SPLIT, *file(SOURCE), "--prefix", TASK]
    status, _, err = run(*source, "--output-file", str(out))
    expected = FRENCH.replace("Nous avons deux chiens.", "We have two dogs.")
    assert (status, out.read_bytes().decode()) == (2, expected)
    assert "the first, at character 18: no dogs\n" in err and "3 pieces (1 failed) · " in err
    status, shown, err = run(*source, "--json")
    record = json.loads(shown)
    assert (status, record["text"], record["stats"]["failed"]) == (2, expected, 1)
    assert [piece.get("error") for piece in record["pieces"]] == [None, "no dogs", None]
    first, last = record["pieces"][0], record["pieces"][2]
    assert list(first) == ["start", "end", "text", "finish_reason"]
    assert record["prompt"][last["start"] : last["end"]].startswith("It is going")
    assert "error" not in record and record["finish_reason"] == "stop"
    status, shown, err = run(*SPLIT, *file("A dog. Two dogs.\n"))
    assert (status, shown) == (2, "A dog. Two dogs.\n") and "error: 2 of 2 pieces" in err


def test_subtitles_are_documents_by_their_name(run, file, tmp_path):
    text, out = "\ufeff1\r\n00:00:01,000 --> 00:00:02,500\r\n<i>{}</i>\r\n", tmp_path / "out.srt"
    text += "\r\n2\r\n00:00:03,000 --> 00:00:04,500\r\nANNA: See www.example.org/a_b.\r\n"
    source = file(text.format("I have two cats. We have\r\ntwo dogs."), "talk.SRT")
    status, _, err = run(*MODEL, *source, "--prefix", TASK, "--output-file", str(out))
    french = text.format("J'ai deux chats. Nous\r\navons deux chiens.")
    assert (status, out.read_bytes().decode()) == (0, french) and "3 pieces (1 kept) · " in err


def test_an_old_file_is_read_in_its_encoding(run, file):
    cue = "1\n00:00:01,000 --> 00:00:02,000\n– {}\n"
    source = file(cue.format("I have two cats."), "talk.srt", "cp1252")
    french = run(*MODEL, *source, "--prefix", TASK, "--encoding", "cp1252")[1]
    assert french == cue.format("J'ai deux chats.")
    status, out, err = run(*MODEL, *source, "--prefix", TASK, "--encoding", "gb18030")
    assert (status, out) == (2, "") and "talk.srt is not GB18030; save the text as UTF-8, or" in err


def test_subtitles_are_lines_if_asked_for_and_lines_may_be_utf_16(run, file, tmp_path):
    source = file("1\nI have two cats.\n", "talk.srt", "utf-16")
    lines = run(*MODEL, *source, "--prefix", TASK, "--split", "none")[1].splitlines()
    assert len(lines) == 2 and lines[1] == "J'ai deux chats."
    (tmp_path / "in.txt").write_bytes(b"\xff\xfea")
    status, out, err = run(*MODEL, "--input-file", str(tmp_path / "in.txt"))
    assert (status, out) == (2, "") and "in.txt is not UTF-16; save the text as UTF-8" in err


@pytest.mark.parametrize(
    "name, data, message",
    [
        (
            "in.txt",
            b"a\xff",
            "in.txt is not UTF-8; save the text as UTF-8, or name its encoding (m",
        ),
        ("in.txt", b"a\0", "in.txt is not UTF-8"),
        ("in.vtt", b"no subtitles", "a .vtt file begins with"),
    ],
)
def test_unusable_files_are_refused_in_one_line(run, tmp_path, name, data, message):
    path = tmp_path / name
    path.write_bytes(data)
    status, out, err = run(*SPLIT, "--input-file", str(path))
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


@pytest.mark.parametrize("text", ["\n \r\n", "42: … 7,5\n***\n"])
def test_a_document_without_a_word_is_written_as_it_is(run, file, text):
    assert run(*SPLIT, *file(text))[:2] == (0, text)


def test_an_unknown_language_is_refused(run):
    status, _, err = run(*SPLIT, "--prompt", "One.", "--source-language", "german")
    assert (status, err.count("\n")) == (2, 1) and "source_language is 'german'" in err


# ---- prompts and lines ---------------------------------------------------------------------------


def test_several_prompts_are_a_line_each(run, tmp_path):
    out = tmp_path / "out.txt"
    prompts = ["--prompt", TASK + "I have two cats.\nWe have two dogs.", "--prompt", TASK + "..."]
    status, shown, _ = run(*SPLIT, *prompts, "--output-file", str(out))
    assert (status, out.read_text()) == (0, "J'ai deux chats.\\nNous avons deux chiens.\n...\n")


def test_each_line_of_json_is_a_document_and_resumed_as_one(run, file, tmp_path):
    cats = {"prompt": TASK + "I have two cats."}
    lines = [{"prompt": TASK + SOURCE}, {"prompt": 5}, cats, {**cats, "prediction": "x"}]
    source = file("".join(json.dumps(line) + "\n" for line in lines), "in.jsonl")
    out = tmp_path / "out.jsonl"
    options = [*SPLIT, *source, "--output-file", str(out)]
    status, _, err = run(*options)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    texts = [record["text"] for record in records[:3]]
    assert (status, texts) == (2, [FRENCH, None, "J'ai deux chats."])
    assert [len(record["pieces"]) for record in records] == [3, 0, 1, 0]
    assert "prompt 4: prediction cannot be combined with split" in err and "4 pieces" in err
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
    assert run(*options, "--task", "french", "--split", "sentences")[1] == both + "\n"


# ---- languages -----------------------------------------------------------------------------------


def test_a_language_needs_no_prefix_and_cuts_texts_into_sentences(run, file, tmp_path):
    prompts = "I have two cats. We have two dogs.\nThe train is late.\n"
    french = "J'ai deux chats. Nous avons deux chiens.\nLe train est en retard.\n"
    fr = [*MODEL, "--target-language", "fr"]
    assert run(*fr, *file(prompts))[:2] == (0, french), "one text a line"
    assert run(*fr, *file(SOURCE, "all.txt"), "--split", "sentences")[1] == FRENCH, "one document"
    cue = "1\n00:00:01,000 --> 00:00:02,000\n"
    subtitles = file(f"{cue}<i>I have two cats.</i>\n", "talk.srt")
    assert run(*fr, *subtitles)[1] == f"{cue}<i>J'ai deux chats.</i>\n"
    lines = [{"prompt": text} for text in prompts.splitlines()]
    lines[0]["prediction"] = french.splitlines()[0]  # a text with a prediction is not cut
    source = file("".join(json.dumps(line) + "\n" for line in lines), "in.jsonl")
    status, out, _ = run(*fr, *source, "--json", "--source-language", "en-GB")
    results = [json.loads(line) for line in out.splitlines()]
    assert (status, [result["stats"]["pieces"] for result in results]) == (0, [1, 1])
    sampled = run(*fr, *file(prompts), "--temp", "1", "--num-samples", "2")
    assert sampled[0] == 0 and len(sampled[1].splitlines()) == 4


def test_a_template_names_the_languages_that_the_model_does_not(run):
    template = ["--translation-prefix", "translate {source} to {target}: "]
    pair = ["--source-language", "en", "--target-language", "fr"]
    prompt = ["--prompt", "I have two cats."]
    expected = run(*MODEL, *prompt, *pair)[1]
    assert expected == "J'ai deux chats.\n"
    german = ["--source-language", "en", "--target-language", "de", *template]
    named = run(*MODEL, *prompt, "--prefix", "translate English to German: ", "-m", "9")[1]
    assert run(*MODEL, *prompt, *german, "-m", "9")[1] == named
    status, out, err = run(*MODEL, *prompt, "--target-language", "de")
    assert (status, out) == (2, "") and err.endswith("not translate to de; it knows en to fr\n")
