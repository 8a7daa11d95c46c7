"""Tests files of pairs and the options of finetune.py."""

import pytest

from mlx_t5.cli import finetuning
from mlx_t5.cli.finetuning import pair_files, read_finetune_options
from mlx_t5.cli.input import PairLines
from mlx_t5.errors import UserError


def lines(path):
    return [str(p) if isinstance(p, UserError) else p for p in PairLines(str(path))]


def test_pairs_are_read_from_objects_and_from_tab_separated_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"prompt": "a\\nb", "completion": "c", "more": 1}\r\n\n{"prompt": "a"}\n\xff\n'
        b'{"prompt": " ", "completion": "c"}\n[1]\n'
    )
    (tmp_path / "a.tsv").write_bytes(b"a\tb c\r\nalone\na\tb\tc\na\t \n")
    items = lines(tmp_path / "a.jsonl")
    assert items[0] == ("a\nb", "c")
    for reason, line in zip(
        ("2 is empty", "3 has no completion", "4 is not UTF-8", "5 has a prompt that", "6 has no"),
        items[1:],
        strict=True,
    ):
        assert f"a.jsonl line {reason}" in line
    items = lines(tmp_path / "a.tsv")
    assert items[0] == ("a", "b c") and "line 4 has a completion that is empty" in items[3]
    assert all(
        f"a.tsv line {i} is no pair; write a prompt, one tab" in items[i - 1] for i in (2, 3)
    )


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
    config = finetuning.lora_config(read_finetune_options(options))
    assert config.use_dora and config.use_rslora and config.r == 3
    assert config.target_modules == ("q", "wo")
