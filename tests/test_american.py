"""Tests the task that demo/american.py makes."""

import json
import random

from demo import american


def test_prompts_are_british_and_completions_american(tmp_path):
    american.main(["--path", str(tmp_path)])
    train, test = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert len(train) == 1795 and len(test) == 200
    assert not {row["completion"] for row in train} & {row["completion"] for row in test}
    assert all(row["prompt"].startswith("make American: ") for row in train)
    row = american.pair("My neighbor bought a gray truck.", random.Random(0))
    assert row["prompt"].endswith(": My neighbour bought a grey lorry.")
    day, month, year = row["prompt"].removeprefix(american.PREFIX).split(": ")[0].split()
    assert row["completion"] == f"{month} {day}, {year}: My neighbor bought a gray truck."
