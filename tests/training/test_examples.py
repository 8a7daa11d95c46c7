"""Tests prompts of a file: which are left out, and which are held out."""

import pytest

from mlx_t5.cli.input import LineReader
from mlx_t5.cli.training_pairs import read_lines
from mlx_t5.errors import UserError
from mlx_t5.training import examples
from mlx_t5.training.examples import Example, TrainingPair, hold_out, read_examples, read_pairs


def letters(prompt: str) -> list[int]:
    """Returns a token for each letter, and 1 for the end."""
    return [*map(ord, prompt), 1]


class Tokenizer:
    """A tokenizer of letters with the interface of transformers, which cannot write braces."""

    def __call__(self, text, **_):
        return type("Encoding", (), {"input_ids": letters(text)})

    encode = staticmethod(lambda text, **_: letters(text))
    decode = staticmethod(lambda ids, **_: "".join(chr(i) for i in ids if i > 1).replace("{", ""))


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Returns a function that reads a file with this name and content: (examples, log)."""
    monkeypatch.setattr(examples, "LEAST", 1)

    def reader(name: str, content: bytes):
        (tmp_path / name).write_bytes(content)
        log = []
        path = str(tmp_path / name)
        as_json = name.endswith(".jsonl")
        if as_json:
            lines = read_lines(path, prompts_only=True)
        else:
            lines = (line.pair for line in LineReader(path).read())
        return read_examples(lines, Tokenizer(), 1 << 21, 5, log.append), log

    return reader


def test_empty_lines_are_left_out_and_equal_prompts_used_once(read):
    examples, log = read("a.txt", b"one\ntwo\r\n\none\n")
    assert examples == [Example(tuple(letters("one"))), Example(tuple(letters("two")))]
    assert "a.txt line 3 is empty" in log[0] and log[1:] == ["1 repeated prompts are used once"]


def test_objects_have_completions_or_not_and_many_bad_lines_are_counted(read):
    lines = [b'{"prompt": "a"}', b'{"prompt": "b", "completion": "c"}', b'{"prompt": 1}', b"{"]
    lines += [b'{"prompt": "d", "completion": 2}', *[b"\xff"] * 10]
    read_in, log = read("a.jsonl", b"\n".join(lines))
    assert [e.answer for e in read_in] == [None, tuple(letters("c"))]
    reasons = ["line 3 has no prompt", "line 4 is not JSON", "line 5 has no completion", "line 6 "]
    assert all(reason in line for reason, line in zip(reasons, log[:4], strict=True))
    assert len(log) == examples.LINES_NAMED + 1 and log[-1] == "left out: 3 more lines"


def test_long_completions_are_cut_and_long_prompts_left_out(read, monkeypatch):
    monkeypatch.setattr(examples, "LONGEST", 20)
    lines = [b'{"prompt": "a", "completion": "more than five"}', b'{"prompt": "%s"}' % (b"y" * 20)]
    read_in, log = read("a.jsonl", b"\n".join(lines))
    assert read_in == [Example((97, 1), tuple(b"more "))]  # the rest is never generated
    assert log == [
        f"left out: the prompt '{'y' * 20}': it has 21 tokens, and 20 are the most",
        "1 completions are cut to --max-tokens",
    ]


def test_hardly_any_prompts_are_refused():
    with pytest.raises(UserError, match="has 1 different prompts that can be used; give 32"):
        read_examples([("same", None)] * 100, Tokenizer(), 1 << 21, 5, print)


def test_the_held_out_part_follows_from_the_seed_and_shares_no_prompt():
    pairs = [TrainingPair((i % 20,), (i,), str(i % 20), str(i)) for i in range(60)]
    train, held_out = hold_out(pairs, 3)
    assert len(held_out) == 6 and sorted(train + held_out, key=pairs.index) == pairs
    assert not {pair.source for pair in train} & {pair.source for pair in held_out}
    assert hold_out(pairs, 3) == (train, held_out) and hold_out(pairs, 4)[1] != held_out
    assert len(hold_out([Example((i,)) for i in range(5000)], 0)[1]) == examples.MOST_HELD_OUT


def test_pairs_are_cut_counted_and_kept_as_the_tokenizer_writes_them():
    log = []
    lines = [
        ("a", "b"),
        UserError("bad line"),
        ("abc", "d"),
        ("a", "b"),
        ("a", "cdef"),
        ("a", "{c"),
    ]
    pairs = read_pairs(lines, Tokenizer(), 1 << 21, (3, 4), log.append)
    texts = [(pair.prompt, pair.completion) for pair in pairs]
    assert texts == [("a", "b"), ("abc", "d"), ("a", "b"), ("a", "c")]
    assert pairs[0] == TrainingPair(tuple(letters("a")), tuple(letters("b")), "a", "b")
    assert pairs[1].source == (ord("a"), ord("b"), 1) and pairs[3].answer[0] == ord("{")
    assert log[:4] == [
        "left out: bad line",
        "left out: the prompt 'a': its completion has 5 tokens, and --max-seq-length is 4",
        "1 prompts are cut to 3 tokens (--max-seq-length)",
        "1 pairs occur more than once and are kept",
    ]
    assert log[4].startswith("warning: 1 of 4 completions") and "'{c' becomes 'c'" in log[4]
