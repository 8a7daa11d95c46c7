"""Tests files of pairs and the options of finetune.py."""

import csv
import json

import pytest

from mlx_t5.cli import finetune_options
from mlx_t5.cli.finetune_options import pair_files, read_finetune_options
from mlx_t5.cli.training_pairs import NAMES, read_lines
from mlx_t5.errors import UserError

PAIR = ("a\tb", 'say "c"')
OBJECT = json.dumps({"en": PAIR[0], "fr": PAIR[1]})


@pytest.mark.parametrize(
    "name, content, languages, expected",
    [
        ("a.jsonl", '{"prompt": "a\\tb", "completion": "say \\"c\\"", "id": 1}', None, PAIR),
        ("a.jsonl", f'{{"translation": {OBJECT}}}', ("en", "fr"), PAIR),
        ("a.jsonl", OBJECT, ("fr", "en"), PAIR[::-1]),
        ("a.csv", 'id,target,source\n1,"say ""c""",a\tb\n', None, PAIR),
        ("a.csv", '\ufeffinput,output\r\na\tb,"two\nlines"\r\n', None, ("a\tb", "two\nlines")),
        ("a.tsv", 'say "c"\tb\n', None, ('say "c"', "b")),  # without a header
        ("a.tsv", '"c"\t"b"\n', None, ('"c"', '"b"')),
        ("a.tsv", '\ufeffinput\toutput\r\n"say ""c"""\tb\r\n', None, ('say "c"', "b")),
        ("a.tsv", '"source"\t"target"\n\n"two\nlines"\t"a\tb"\n', None, ("two\nlines", "a\tb")),
        ("a.tsv", 'source\ttarget\n"c", she said\t"b"\n', None, ('"c", she said', '"b"')),
        ("a.tsv", 'source\ttarget\n"c\t"b\n', None, ('"c', '"b')),
        ("a.jsonl", '{"instruction": "fix: ", "input": "a", "output": "b"}', None, ("fix: a", "b")),
        (
            "a.jsonl",
            '{"instruction": "Say b.", "input": " ", "output": "b"}',
            None,
            ("Say b.", "b"),
        ),
        ("a.csv", f"input,output\na,{'b' * 200_000}\n", None, ("a", "b" * 200_000)),
        ("a.tsv", "output\tinstruction\nb\tSay b.\n", None, ("Say b.", "b")),
        ("a.csv", "input,output,instruction\na,b,fix:\n", None, ("fix: a", "b")),
        ("a.tsv", 'fr\ten\nb\tsay "c"\n', ("en", "fr"), ('say "c"', "b")),
    ],
)
def test_pairs_are_read_from_files_of_many_kinds(tmp_path, name, content, languages, expected):
    names = [languages] if languages else NAMES
    (tmp_path / name).write_bytes(content.encode())
    assert list(read_lines(str(tmp_path / name), names)) == [expected]
    ((prompt, completion),) = read_lines(str(tmp_path / name), names, prompts_only=True)
    assert prompt == expected[0]
    assert completion == (expected[1] if "completion" in content else None)


@pytest.mark.parametrize(
    "name, content, languages, unread",
    [
        ("a.csv", "id,source,prefix,target\n1,a,fix,b\n", None, "id, prefix"),
        (
            "a.jsonl",
            '{"input": "a", "output": "b", "n": 5}\n{"input": "a", "output": "b", "task": "fix"}',
            None,
            "task",
        ),
        (
            "a.jsonl",
            '{"id": "1", "translation": {"en": "a", "fr": "b", "de": "c"}}',
            ("en", "fr"),
            "id, de",
        ),
        ("a.jsonl", '{"instruction": "a", "input": "b", "output": "c", "text": "d"}', None, "text"),
        ("a.tsv", "prompt\tcompletion\na\tb\n", None, ""),
    ],
)
def test_columns_that_are_not_read_are_named_once(
    tmp_path, capsys, name, content, languages, unread
):
    (tmp_path / name).write_text(content)
    for pair in read_lines(str(tmp_path / name), [languages] if languages else NAMES):
        assert isinstance(pair, tuple)
    note = f"note: {tmp_path / name} has columns that are not read: {unread}\n"
    assert capsys.readouterr().err == (note if unread else "")


def test_quotes_of_a_table_program_are_told_apart_from_quotes_of_texts(tmp_path, capsys):
    file, note = tmp_path / "a.tsv", "has texts in quotes, which are read without the quotes\n"
    rows = [NAMES[0], ('fix: say "hi"', '"Hi"'), ("fix: two\nlines", "two\tlines"), ("a", "b")]
    for quoting in csv.QUOTE_MINIMAL, csv.QUOTE_ALL:
        with open(file, "w", newline="") as out:
            csv.writer(out, delimiter="\t", quoting=quoting).writerows(rows)
        assert list(read_lines(str(file))) == rows[1:]
        assert capsys.readouterr().err == f"note: {file} {note}"
    for odd in 'say "c"\td\n', "one text\n":
        file.write_text('prompt\tcompletion\n"a"\tb\n' + odd)
        assert next(read_lines(str(file))) == ('"a"', "b")
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "name, content, languages, message",
    [
        (
            "a.jsonl",
            '{"question": "a", "answer": "b"}',
            None,
            "the fields question, answer; name the",
        ),
        ("a.csv", "question,answer\na,b\n", None, "the fields question, answer; name the"),
        ("a.tsv", "question\tid\tanswer\na\t1\tb\n", None, "the fields question, id, answer; n"),
        (
            "a.jsonl",
            '{"translation": {"en": "a", "fr": "b"}}',
            None,
            "the fields en, fr; .*--source-lang",
        ),
        (
            "a.jsonl",
            '{"translation": {"en": "a"}}',
            ("en", "fr"),
            "the fields en; name the texts en and fr",
        ),
        ("a.csv", "\xff", None, "a.csv cannot be read .*; save it as UTF-8"),
        ("a.md", "", None, "a.md is no .jsonl, .csv or .tsv file"),
    ],
)
def test_a_file_with_other_fields_is_refused_at_once(tmp_path, name, content, languages, message):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        list(read_lines(str(tmp_path / name), [languages] if languages else NAMES))


def test_single_lines_that_are_no_pairs_are_named(tmp_path):
    good = '{"prompt": "a", "completion": "b"}\n'
    bad = '\n{"prompt": "a"}\n\xff\n{"prompt": " ", "completion": "c"}\n[1]\n'
    (tmp_path / "a.jsonl").write_bytes((good + bad).encode("latin-1"))
    (tmp_path / "a.tsv").write_text("a\tb c\nalone\na\tb\tc\na\t \n")
    for name, reasons in (
        ("a.jsonl", ("3 has no completion", "4 is not JSON", "5 has no prompt", "6 is no object")),
        ("a.tsv", ("2 has 1 texts instead of 2", "3 has 3 texts", "4 has no completion that")),
    ):
        _, *items = read_lines(str(tmp_path / name))
        for reason, item in zip(reasons, items, strict=True):
            assert f"{name} line {reason}" in str(item)


@pytest.mark.parametrize("value", [["x"], {"text": "x"}, 3])
def test_a_part_of_the_prompt_that_is_no_text_is_not_dropped(tmp_path, value):
    record = {"instruction": "a", "output": "b"}
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({**record, "input": one}) for one in (value, None, "c")))
    wrong, *pairs = read_lines(str(file))
    assert "a.jsonl line 1 has an input that is no text" in str(wrong)
    assert pairs == [("a", "b"), ("a c", "b")]


def test_pair_files_are_found_in_a_folder(tmp_path):
    one = tmp_path / "one.tsv"
    assert pair_files(str(one), None) == {"train": str(one)}
    assert pair_files(str(one), "v.jsonl") == {"train": str(one), "valid": "v.jsonl"}
    for name in ("train.tsv", "validation.jsonl", "other.jsonl"):
        (tmp_path / name).touch()
    expected = {"train": str(tmp_path / "train.tsv"), "valid": str(tmp_path / "validation.jsonl")}
    assert pair_files(str(tmp_path), None) == expected
    with pytest.raises(UserError, match="validation.jsonl is there to evaluate by; leave --valid"):
        pair_files(str(tmp_path), "v.jsonl")


@pytest.mark.parametrize(
    "options, optimizer, rate",
    [
        ([], "adamw", 1e-3),
        (["--optimizer", "adafactor"], "adafactor", 0.03),
        (["--fine-tune-type", "full"], "adafactor", 1e-3),
        (["--fine-tune-type", "full", "--optimizer", "adamw"], "adamw", 1e-4),
        (["--lr-scheduler-type", "relative"], "adafactor", 0.03),
        (["--learning-rate", "0.5"], "adamw", 0.5),
    ],
)
def test_the_optimizer_sets_the_default_learning_rate(tmp_path, options, optimizer, rate):
    needed = ["--model", "m", "--data", "d", "--output", str(tmp_path / "o")]
    args = read_finetune_options([*needed, *options, "--max-seq-length", "9"])
    assert (args.optimizer, args.learning_rate) == (optimizer, rate)
    assert args.warmup_steps is None and args.max_seq_length == (9, 9)


def test_lora_options_become_a_lora_config(tmp_path):
    options = ["--model", "m", "--data", "d", "--output", str(tmp_path / "o"), "--r", "3"]
    options += ["--fine-tune-type", "dora", "--target-modules", "q", "wo", "--use-rslora"]
    config = finetune_options.lora_config(read_finetune_options(options))
    assert config.use_dora and config.use_rslora and config.r == 3
    assert config.target_modules == ("q", "wo")
