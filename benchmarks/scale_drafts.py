"""Whole texts by speculative decoding over several ranks: the draft on rank 0, or on every rank.

On rank 0 alone it is as main.py has it: rank 0 decodes and tells the others what to compute. With
a draft on every rank all of them draft, verify and decide alike, as a program does that makes the
same calls everywhere. The same processes do both, prompt by prompt in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import printing
from benchmarks.peer_process import Process
from benchmarks.scale_processes import SHARE, ranks_a_core, together
from benchmarks.scale_tensor import Groups, megabytes
from mlx_t5.timing import Timed, median_total, speed_up, take_turns

PROMPTS = 8  # at most; a text of ranks that share cores takes long
FIRST, EVERY = "rank 0", "every rank"
COLUMNS: printing.Columns = {
    **SHARE,
    "draft on": lambda row: row["draft_on"],
    **printing.SPEED,
    "ms a step": lambda row: f"{1e3 * row['step']:.2f}",
    "beside rank 0's (range)": lambda row: str(row["beside"] or ""),
    **printing.TEXTS,
}


def table(args: argparse.Namespace, prompts: Sequence[str], started: Groups) -> list[dict]:
    """Decodes all prompts in every way; prints the table and returns its figures."""
    for processes in started.values():
        size = together(processes, "load_draft", name=args.draft_model)[0]
    chosen = prompts[:PROMPTS]
    rows = rows_of(decoded(args, chosen, started), args.cores)
    print(f"\nTensor parallel: {len(chosen)} prompts with a draft, one at a time\n")
    print(printing.markdown(COLUMNS, rows))
    print(f"\nThe draft takes {megabytes(size)}, on rank 0 or on every rank.")
    return [row | {"draft_bytes": size} for row in rows]


def decoded(
    args: argparse.Namespace, prompts: Sequence[str], started: Groups
) -> dict[tuple[int, str], Timed]:
    """What each number of ranks has made of the prompts, by where the draft was."""
    settings = {"num_draft": args.num_draft[0], "max_tokens": args.max_tokens}
    places = [(n, where) for n in started for where in ((FIRST, EVERY) if n > 1 else (FIRST,))]
    ways = {
        f"{n} {where}": partial(decode, started[n], prompts, leads=where == FIRST, **settings)
        for n, where in places
    }
    timed = take_turns(ways, len(prompts), args.repeats, lambda outcome: len(outcome["tokens"][0]))
    pairs = zip(places, timed.values(), strict=True)
    return {place: replace(each, seconds=of(each, "seconds")) for place, each in pairs}


def decode(processes: Sequence[Process], prompts: Sequence[str], turn: int, **how: Any) -> dict:
    """One prompt: seconds and steps of rank 0, and the tokens of every rank that has decided."""
    found = together(processes, "decode", prompt=prompts[turn], **how)
    return {**found[0], "tokens": [each["tokens"] for each in found if each]}


def of(timed: Timed, name: str) -> list[list[Any]]:
    """[R][N] of one figure of the outcomes."""
    return [[outcome[name] for outcome in row] for row in timed.outcomes]


def rows_of(found: dict[tuple[int, str], Timed], cores: int) -> list[dict[str, Any]]:
    """The figures of every way.

    Args:
        found: from `decoded`.
        cores: of a rank.
    """
    base = found[1, FIRST]
    return [
        {
            "ranks": ranks,
            "ranks_a_core": ranks_a_core(ranks, cores),
            "draft_on": where,
            "tokens_per_second": 1 / timed.seconds_a_token(),
            "speed_up": speed_up(base, timed),
            "step": median_total(of(timed, "decode_seconds")) / median_total(of(timed, "steps")),
            "beside": speed_up(found[ranks, FIRST], timed) if where == EVERY else None,
            "different": different(base, timed),
            "apart": different(found[ranks, FIRST], timed),
            "seconds": timed.seconds,
        }
        for (ranks, where), timed in found.items()
    ]


def different(base: Timed, timed: Timed) -> int:
    """How many prompts got other tokens at least once, on any rank, than rank 0 of `base` has."""
    expected = [outcome["tokens"][0] for outcome in base.outcomes[0]]
    by_prompt = zip(expected, zip(*of(timed, "tokens"), strict=True), strict=True)
    return sum(any(own != wanted for run in runs for own in run) for wanted, runs in by_prompt)
