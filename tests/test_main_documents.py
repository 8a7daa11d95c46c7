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
        if "dog" in str(prompt.source):
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


def test_subtitles_need_a_task_where_the_model_does(run, file, tmp_path):
    cue = "1\n00:00:01,000 --> 00:00:02,000\nI have two cats.\n"
    source = file(cue, "talk.srt")
    status, out, err = run(*MODEL, *source, "--output-file", str(tmp_path / "out.srt"))
    assert (status, out) == (2, "") and "give --target-language, --task or --prefix (--pref" in err
    assert os.listdir(tmp_path) == ["talk.srt"]
    assert run(*MODEL, *source, "--prefix", "")[0] == 0, "without one, because the user says so"
    for task in (["--task", "translation_en_to_fr"], ["--target-language", "fr"]):
        assert "J'ai deux chats." in run(*MODEL, *source, *task)[1]


def test_a_prefix_that_runs_into_the_text_is_noted_once(run):
    prompts = ["--prompt", "She have two cat.", "--prompt", "I has a dog."]
    note = "note: --prefix 'fix grammar:' has no space at its end"
    assert run(*MODEL, *prompts, "--prefix", "fix grammar:")[2].count(note) == 1
    for prefix in ("fix grammar: ", "<2fr>", "", "翻译："):
        assert "has no space" not in run(*MODEL, *prompts, "-m", "2", "--prefix", prefix)[2]


@pytest.mark.parametrize("name", ["talk.srt", "two.txt"])
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_the_closing_line_counts_the_texts_that_were_cut_off(run, file, name, as_json):
    cue = (
        "1\n00:00:01,000 --> 00:00:02,000\nWe have two dogs. "
        if name == "talk.srt"
        else "We have two dogs.\n"
    )
    source = file(f"{cue}I have two cats and two very good new tools.\n", name)
    options = [*MODEL, "--prefix", TASK, *source, *as_json]
    assert "cut off" not in run(*options)[2]
    assert " · cut off by --max-tokens: 1 · " in run(*options, "-m", "9")[2]


def test_the_closing_line_of_a_prompt_says_that_it_was_cut_off(run):
    prompt = ["--prompt", f"{TASK}I have two cats."]
    assert " tokens/s · cut off by --max-tokens: 1 · " in run(*MODEL, *prompt, "-m", "3")[2]
    assert "cut off" not in run(*MODEL, *prompt)[2]


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


@pytest.mark.parametrize(
    "options", [[], ["--split", "none"], ["--temp", "1", "--num-samples", "2"]]
)
def test_an_empty_line_has_an_empty_translation(run, file, tmp_path, options):
    letter = file("I have two cats.\n\n \nWe have two dogs.\n\n", "letter.txt")
    fr = [*MODEL, "--target-language", "fr", *letter, *options]
    texts = 2 if "2" in options else 1
    status, out, err = run(*fr)
    lines = out.splitlines()[::texts]
    assert (status, len(lines), lines[1:3], lines[4]) == (0, 5, ["", ""], "") and "error" not in err
    assert lines[::3] == ["J'ai deux chats.", "Nous avons deux chiens."] or texts == 2
    out = tmp_path / "out.jsonl"
    assert run(*fr, "--output-file", str(out))[0] == 0
    records = [json.loads(line) for line in out.read_text().splitlines()][::texts]
    assert [record["text"] == "" for record in records] == [False, True, True, False, True]
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[: 3 * texts]))
    assert "3 of 5 prompts are done" in run(*fr, "--output-file", str(out), "--resume")[2]
    again = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert again == [json.loads(line)["text"] for line in whole]


def test_an_empty_line_of_a_task_names_the_way_out(run, file):
    letter = file("She have two cat.\n\nI has a dog.\n", "letter.txt")
    status, out, err = run(*MODEL, "--task", "grammar", *letter)
    assert (status, len(out.splitlines())) == (2, 3)
    assert "line 2 is empty; fill it, or give --split sentences or --split lines" in err
    status, out, _ = run(*MODEL, "--task", "grammar", "--split", "lines", *letter)
    assert (status, out.splitlines()[:2]) == (0, ["She has two cats.", ""])


# ---- several files -------------------------------------------------------------------------------


@pytest.fixture
def letters(tmp_path):
    """A folder of files to translate, and the arguments that name it and a folder for results."""
    cue = "1\n00:00:01,000 --> 00:00:02,000\n{}\n"
    files = {
        "a.txt": "I have two cats.\n\nWe have two dogs.\n",
        "b.jsonl": '{"prompt": "I have two cats."}\n',
        "c.srt": cue.format("I have two cats."),
        "sub/a.txt": "We have two dogs.\n",
        "picture.png": "x",
        ".hidden.txt": "x",
        ".git/x.txt": "x",
    }
    for name, text in files.items():
        path = tmp_path / "letters" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder = tmp_path / "letters"
    return ["--input-file", str(folder), "--output-file", str(folder / "french")]


def results_in(folder) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_is_decoded_with_one_load_and_resumed_by_file(run, letters, tmp_path, monkeypatch):
    load, loads = SpeculativeDecoder.load, []

    def counted(*args, **options):
        loads.append(args)
        return load(*args, **options)

    monkeypatch.setattr(SpeculativeDecoder, "load", counted)
    fr, out = [*MODEL, "--target-language", "fr", *letters], tmp_path / "letters" / "french"
    status, shown, err = run(*fr)
    results = results_in(out)
    assert (status, shown, len(loads)) == (0, "", 1)
    assert json.loads(results.pop("b.jsonl"))["text"] == "J'ai deux chats."
    assert results == {
        "a.txt": "J'ai deux chats.\n\nNous avons deux chiens.\n",
        "c.srt": "1\n00:00:01,000 --> 00:00:02,000\nJ'ai deux chats.\n",
        "sub/a.txt": "Nous avons deux chiens.\n",
    }
    progress = [line.partition(": ")[0] for line in err.splitlines()[1:]]
    assert progress == [f"{i} of 4" for i in (1, 2, 3, 4)], "a line for each file"
    assert run(*fr)[0] == 0 and len(loads) == 2, "a complete folder is replaced"
    assert run(*fr, "--resume")[0] == 0 and len(loads) == 2, "nothing to do, nothing to load"
    whole = results_in(out)
    (out / "c.srt").unlink()
    (out / "a.txt").write_text("J'ai deux chats.\n")
    status, _, err = run(*fr)
    assert status == 2 and "a.txt has 1 of 3 lines, from an interrupted run: --resume" in err
    status, _, err = run(*fr, "--resume")
    assert status == 0 and results_in(out) == whole and "1 lines are kept, 1 of 3 prompts" in err
    (out / "c.srt").unlink()
    assert "is one of 3 results for 4 files, from an interrupted run" in run(*fr)[2]
    assert run(*fr, "--overwrite")[0] == 0 and (out / "c.srt").exists()


def test_a_failed_file_is_named_at_the_end_and_the_others_are_done(run, file, tmp_path, failing):
    names = ["bad.srt", "dogs.txt", "cats.txt"]
    texts = "no subtitles\n", "We have two dogs.\n", "I have two cats.\n"
    sources = [file(text, name)[1] for text, name in zip(texts, names, strict=True)]
    options = ["--task", "translation_en_to_fr", "--input-file", *sources[:2]]
    options += ["--input-file", sources[2], "--output-file", str(tmp_path / "out")]
    status, _, err = run(*MODEL, *options)
    assert status == 2 and (tmp_path / "out" / "cats.txt").read_text() == "J'ai deux chats.\n"
    assert not (tmp_path / "out" / "bad.srt").exists() and "1 of 3: " in err
    assert err.splitlines()[-1] == f"error: 2 of 3 files have errors: {', '.join(sources[:2])}"
    assert err.count("target demo/target") == err.count("an .srt file has times") == 1
    file("é", "bad.srt", "latin-1")
    status, _, err = run(*MODEL, *options, "--overwrite")
    assert status == 2 and f"error: 1 of 3: {sources[0]} is not UTF-8" in err, "its name once"
    status, _, err = run(*MODEL, *options[2:], "--target-language", "ko", "--overwrite")
    assert status == 2 and err.count("error: ") == err.count("does not translate to ko") == 1


def test_json_results_of_several_files_have_names_of_their_own(run, file, tmp_path):
    sources = [file("I have two cats.\n", name)[1] for name in ("a.txt", "a.tsv")]
    options = ["--input-file", *sources, "--output-file", str(tmp_path / "out"), "--embed"]
    assert run(*MODEL[:2], *options)[0] == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["a.tsv.jsonl", "a.txt.jsonl"]


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
