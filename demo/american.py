"""Writes British-to-American English data, for a task that the bundled target does not know.

    python -m demo.american --path models/american
    python finetune.py --model demo/target --data models/american --output models/american-lora

A completion is a random date and a sentence of heldout.jsonl, which is in American English. Its
prompt has the same date and sentence in British English. No sentence is in both train.jsonl and
test.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

HELD_OUT = Path(__file__).parent / "heldout.jsonl"
PREFIX, TESTS = "make American: ", 200
MONTHS = "January February March April May June July August September October November December"
BRITISH = {
    "neighbor": "neighbour", "neighbors": "neighbours", "gray": "grey", "theater": "theatre",
    "harbor": "harbour", "store": "shop", "stores": "shops", "bookstore": "bookshop",
    "truck": "lorry", "trucks": "lorries", "apartment": "flat", "apartments": "flats",
    "vacation": "holiday", "soccer": "football", "movie": "film", "movies": "films",
    "candy": "sweets", "zucchinis": "courgettes", "sweaters": "jumpers", "erasers": "rubbers",
    "flashlights": "torches", "refrigerators": "fridges", "fall": "autumn",
}  # fmt: skip


def pair(sentence: str, rng: random.Random) -> dict[str, str]:
    day, month, year = rng.randint(1, 28), rng.choice(MONTHS.split()), rng.randint(1950, 2029)
    british = re.sub(r"[a-z]+", lambda word: BRITISH.get(word[0], word[0]), sentence)
    return {
        "prompt": f"{PREFIX}{day} {month} {year}: {british}",
        "completion": f"{month} {day}, {year}: {sentence}",
    }


def sentences() -> list[str]:
    rows = map(json.loads, HELD_OUT.read_text(encoding="utf-8").splitlines())
    texts = (r["target"] if r["task"] == "fix" else r["prompt"].partition(": ")[2] for r in rows)
    return list(dict.fromkeys(texts))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write pairs of British and American English.")
    parser.add_argument("--path", type=Path, required=True, help="the folder to write into")
    what = "seed of the dates and the order (default: 0)"
    parser.add_argument("--seed", type=int, default=0, help=what)
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    pairs = [pair(sentence, rng) for sentence in sentences()]
    rng.shuffle(pairs)
    args.path.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", pairs[:TESTS]), ("train", pairs[TESTS:])):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (args.path / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
