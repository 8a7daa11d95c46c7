"""Measures the bundled pair on held-out sentences, through the project's own engine.

    python -m demo.recipe.evaluate --count 500 --json figures.json

Exact match: the share of prompts answered with exactly the one right sentence, for the target and,
decoding alone, for the draft. Acceptance: accepted / drafted tokens of greedy speculative decoding.
Held-out sentences come from the same grammar as the training text, but no sentence is in both.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

from decoder import SpeculativeDecoder
from demo.recipe import corpus
from model import load

DEMO = Path(__file__).resolve().parents[1]


def held_out(task: str, count: int, seed: str) -> list[corpus.Example]:
    """The first `count` held-out examples of a task."""
    return list(itertools.islice(corpus.held_out(task, seed), count))


def run(decoder: SpeculativeDecoder, examples: list[corpus.Example], batch_size: int) -> dict:
    """Decodes the examples greedily.

    Returns:
        exact_match, acceptance_rate (None when nothing was drafted), seconds, and the misses as
        (prompt, wanted, got).
    """
    start = time.perf_counter()
    results = decoder.generate([e.source for e in examples], max_tokens=200, batch_size=batch_size)
    seconds = time.perf_counter() - start
    misses = [
        (e.source, e.target, r.text)
        for e, r in zip(examples, results, strict=True)
        if r.text != e.target
    ]
    drafted = sum(r.stats.drafted for r in results)
    accepted = sum(r.stats.accepted for r in results)
    return {
        "exact_match": 1 - len(misses) / len(examples),
        "acceptance_rate": accepted / drafted if drafted else None,
        "drafted": drafted,
        "accepted": accepted,
        "generated_tokens": sum(r.stats.generated_tokens for r in results),
        "seconds": seconds,
        "misses": misses,
    }


def evaluate(args: argparse.Namespace) -> dict:
    """All figures: {task: {"pair": ..., "draft_alone": ...}}."""
    target, tokenizer = load(args.target)
    draft, draft_tokenizer = load(args.draft, shared_with=target)
    pair = SpeculativeDecoder(
        target, draft, tokenizer, num_draft=args.num_draft, draft_tokenizer=draft_tokenizer
    )
    alone = SpeculativeDecoder(draft, None, tokenizer)
    figures = {}
    for task in corpus.SHARES:
        examples = held_out(task, args.count, args.seed)
        figures[task] = {
            "pair": run(pair, examples, args.batch_size),
            "draft_alone": run(alone, examples, args.batch_size),
        }
        report(task, figures[task], args)
    return figures


def report(task: str, figures: dict, args: argparse.Namespace) -> None:
    """Prints one task's figures, and its misses when asked."""
    pair, draft = figures["pair"], figures["draft_alone"]
    print(f"{task}: {args.count} held-out prompts")
    print(f"  target exact match      {pair['exact_match']:.1%}")
    print(f"  draft alone exact match {draft['exact_match']:.1%}")
    print(
        f"  acceptance, num_draft {args.num_draft}: {pair['acceptance_rate']:.1%} "
        f"({pair['accepted']} of {pair['drafted']} drafted tokens)"
    )
    for source, wanted, got in pair["misses"][: args.show_misses]:
        print(f"  prompt {source}\n  wanted {wanted}\n  got    {got}")


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default=str(DEMO / "target"))
    parser.add_argument("--draft", default=str(DEMO / "draft"))
    parser.add_argument("--count", type=int, default=500, help="prompts of each task")
    parser.add_argument("--num-draft", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", default="evaluation", help="of the held-out sample")
    parser.add_argument("--show-misses", type=int, default=0, help="wrong answers to print")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    figures = evaluate(args)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
