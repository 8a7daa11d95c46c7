"""`stopping`: whether a draft should end early when it is unsure of what it has written.

The draft's own probability of its tokens says how likely they are to be kept, so a draft could go
on until the product of these falls below a threshold, as in https://arxiv.org/abs/2404.18911 and
https://arxiv.org/abs/2405.04304. But to look at it the host has to wait for the device after every
token, which costs time; or, if the next pass is started before the last one is looked at, that pass
when it turns out not to be wanted.

Which wins is found by replay. For every place of every greedy text it is noted how many of the
draft's tokens the target would keep there and how sure the draft would be of each. Passes are timed
in each of the three manners. Then every rule decodes every text once more on paper, so the rules
differ in nothing but their choices and these costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend import mx
from benchmarks import options, report, workload
from benchmarks.costs import OFFSET, CostMeter
from benchmarks.subject import Subject, begin
from draft_length import LONGEST
from model import T5

THRESHOLDS = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
SOURCE = 32  # tokens of the source while passes are timed
CHAIN = 8  # draft passes that follow each other while they are timed
WAIT, AHEAD, FREE = "waiting for every token", "one pass ahead", "if looking cost nothing"

COLUMNS: report.Columns = {
    "rule": lambda row: row["rule"],
    "best at": lambda row: f"{row['setting']:g}",
    "tokens/call": lambda row: f"{row['tokens_per_call']:.2f}",
    "speed-up": lambda row: f"{row['speed_up']:.2f}",
}


@dataclass(frozen=True)
class Place:
    """What drafting from one place of a text would give.

    Attributes:
        kept: how many of `LONGEST` tokens the target would keep.
        sure: the draft's probability of each of them, greedy.
    """

    kept: int
    sure: list[float]

    def length(self, threshold: float) -> int:
        """Tokens that are drafted until the product of `sure` falls below the threshold."""
        product = 1.0
        for count, probability in enumerate(self.sure, 1):
            product *= probability
            if product < threshold:
                return count
        return len(self.sure)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    options.add_models(parser)
    options.add_prompts(parser, 30, ["translate", "fix"])
    options.add_measuring(parser, 20)


def run(args: argparse.Namespace, command: str) -> int:
    """Measures and prints."""
    subject, facts = begin(args, command)
    verify, passes = pass_costs(subject.target, subject.draft, args.repeats)
    shown = ", ".join(f"{name} {1e3 * s:.3f}" for name, s in passes.items())
    print(f"\nms a pass: target {1e3 * verify[0]:.3f}; draft {shown}")
    tables = []
    for task in [None] if args.prompts else list(dict.fromkeys(args.task)):
        prompts = workload.chosen(task, args.prompts, args.count, args.seed)
        texts = [noted(subject, prompt, args.max_tokens) for prompt in prompts.prompts]
        rows = compare(texts, verify, passes)
        print(f"\n{prompts.name}: {len(texts)} prompts\n\n{report.markdown(COLUMNS, rows)}")
        tables.append({"set": prompts.name, "count": len(texts), "rows": rows})
    record = {"command": command, "environment": facts, "verify": verify, "passes": passes}
    report.write_json(args.json, record | {"tables": tables})
    return 0


def noted(subject: Subject, prompt: str, max_tokens: int) -> list[Place]:
    """Every place of the target's greedy text; the end token is part of it."""
    result = subject.regular().generate(prompt, max_tokens=max_tokens)
    config = subject.draft.config
    text = result.tokens + [config.eos_token_id] * (result.finish_reason == "stop")
    ids = mx.array([subject.tokenizer.encode(prompt)])
    cache = subject.draft.cache(subject.draft.encode(ids), capacity=len(text) + LONGEST + 1)
    places, seen = [], [config.decoder_start_token_id]
    for place, token in enumerate(text):
        fed, tokens, sure = mx.array([seen]), [], []
        for i in range(LONGEST):
            logits = subject.draft.decode(fed, cache, [0 if i == 0 else place + i])[:, -1:]
            fed = mx.argmax(logits, axis=-1).astype(mx.int32)
            tokens.append(fed)
            sure.append(mx.max(mx.softmax(logits, axis=-1), axis=-1))
        drafted = mx.concatenate(tokens, axis=1)[0].tolist()
        pairs = zip(drafted, text[place:], strict=False)
        kept = next((i for i, (a, b) in enumerate(pairs) if a != b), len(text) - place)
        places.append(Place(min(kept, LONGEST), mx.concatenate(sure, axis=1)[0].tolist()))
        seen.append(token)
    return places


def pass_costs(target: T5, draft: T5, repeats: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of a target pass over 1, 2, … positions, and of a draft pass in each manner."""
    meter = CostMeter(target, draft, SOURCE, LONGEST + 1, [CHAIN])
    manners = {FREE: _together, AHEAD: _one_ahead, WAIT: _waiting}
    cache = draft.cache(draft.encode(mx.zeros((1, SOURCE), mx.int32)), capacity=OFFSET + CHAIN)
    mx.eval(cache.state)
    verify: list[list[float]] = []
    seconds: dict[str, list[float]] = {name: [] for name in manners}
    for repeat in range(repeats + 1):
        measured = [meter.measure().target[width] for width in range(1, LONGEST + 2)]
        for name, manner in manners.items():
            began = time.perf_counter()
            manner(lambda fed, i: _pass(draft, cache, fed, i))
            if repeat:
                seconds[name].append((time.perf_counter() - began) / CHAIN)
        if repeat:
            verify.append(measured)
    medians = [statistics.median(column) for column in zip(*verify, strict=True)]
    return medians, {name: statistics.median(times) for name, times in seconds.items()}


Pass = Callable[[mx.array, int], tuple[mx.array, mx.array]]


def _pass(draft: T5, cache, fed: mx.array, i: int) -> tuple[mx.array, mx.array]:
    """The next token and the draft's probability of it."""
    logits = draft.decode(fed, cache, [OFFSET + i])
    best = mx.max(logits, axis=-1)
    return mx.argmax(logits, axis=-1).astype(mx.int32), mx.exp(best - mx.logsumexp(logits, axis=-1))


def _together(step: Pass) -> None:
    """All passes in one graph, as the engine makes them; nobody looks at probabilities."""
    fed, tokens = mx.zeros((1, 1), mx.int32), []
    for i in range(CHAIN):
        fed, _ = step(fed, i)
        tokens.append(fed)
    mx.eval(tokens)


def _waiting(step: Pass) -> None:
    """Each pass is looked at before the next one is started."""
    fed = mx.zeros((1, 1), mx.int32)
    for i in range(CHAIN):
        fed, sure = step(fed, i)
        mx.eval(fed, sure)
        sure.item()


def _one_ahead(step: Pass) -> None:
    """Each pass is looked at while the next one runs."""
    fed, before = mx.zeros((1, 1), mx.int32), None
    for i in range(CHAIN):
        fed, sure = step(fed, i)
        mx.async_eval(fed, sure)
        if before is not None:
            before.item()
        before = sure
    before.item()


def compare(
    texts: Sequence[Sequence[Place]], verify: Sequence[float], passes: dict[str, float]
) -> list[dict]:
    """The best setting of every rule.

    Args:
        texts: every place of every text.
        verify: seconds of a target pass over 1, 2, … positions.
        passes: seconds of a draft pass in each manner.
    """
    fixed = {
        gamma: replay(texts, lambda _, n=gamma: n, verify, passes[FREE], wasted=0)
        for gamma in range(1, LONGEST + 1)
    }
    rules = {"a fixed number": fixed}
    for manner, wasted in ((WAIT, 0), (AHEAD, 1), (FREE, 0)):
        rules[f"stop below a threshold, {manner}"] = {
            least: replay(texts, lambda p, t=least: p.length(t), verify, passes[manner], wasted)
            for least in THRESHOLDS
        }
    rows = []
    for rule, outcomes in rules.items():
        setting = max(outcomes, key=lambda key: outcomes[key][0])
        speed_up, per_call = outcomes[setting]
        rows.append(
            {"rule": rule, "setting": setting, "tokens_per_call": per_call, "speed_up": speed_up}
        )
    return rows


def replay(
    texts: Sequence[Sequence[Place]],
    length: Callable[[Place], int],
    verify: Sequence[float],
    draft: float,
    wasted: int,
) -> tuple[float, float]:
    """Decodes all texts by a rule.

    Args:
        texts: every place of every text.
        length: how many tokens the rule drafts from a place.
        verify: seconds of a target pass over 1, 2, … positions.
        draft: seconds of a draft pass.
        wasted: passes that are made beyond those wanted, unless there are `LONGEST`.

    Returns:
        The speed-up over regular decoding, and tokens per target call.
    """
    seconds, calls, tokens = 0.0, 0, sum(map(len, texts))
    for text in texts:
        place = 0
        while place < len(text):
            wanted = length(text[place])
            seconds += verify[wanted] + draft * min(wanted + wasted, LONGEST)
            place += min(wanted, text[place].kept) + 1
            calls += 1
    return tokens * verify[0] / seconds, tokens / calls
