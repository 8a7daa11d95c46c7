"""Measures once what the steps of a pair cost on this machine, and remembers it in a file.

Whole steps of the engine are timed, over made-up tokens: with nothing proposed, with 1 to 15 tokens
that no model had to be asked for, and with a few that the draft proposed. So the costs hold all
that a step does, choosing its proposals included, for one row and for a full batch. Costs of
verifying are a staircase on most devices, as kernels work on several positions at a time; the
points that matter most come first. A model so large that there is no time for all of them gets by
with the first ones, and with one row, from which the costs of several follow; for a small one all
is measured several times.

The file is in $XDG_CACHE_HOME or ~/.cache. Its name is a hash of everything that the costs depend
on: config, types and shapes of both models, rows, the way of sampling, the device and the version
of MLX. When it is read, two of its points are measured again, and all of them if they turn out
lower: then the machine was busy. Not so where steps take long: short disturbances even out in them.
A file that cannot be read or written is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from backend import device_name, mx, tree_flatten
from draft_length import AUTO, LONGEST, Costs, StepCosts
from drafters import DraftModel, Offer
from engine import Engine
from model import T5
from pacer import Pacer
from results import Row, Settings
from sampling import row_key
from source_copy import CopyOrDraft, SourceCopy

FOLDER = "t5-mlx"
FORMAT = 10  # of the file; also to be raised when steps are measured differently
# What is measured, by importance: (drafted, copied) proposals.
PLANS = [(0, 0), (0, LONGEST), (8, 0), (1, 0), (0, 3), (0, 1), (LONGEST, 0), (4, 0)]
PLANS += [(0, n) for n in (8, 4, 2)]
BUDGET = 0.7  # seconds, for all numbers of rows
AT_MOST = 0.5  # seconds that several rows may need for the points they cannot do without
ROUNDS = 30  # more add nothing
OFTEN = 6  # regular steps that a point may take to be measured more than once
BUSY = 1.5  # a stored cost this many times a new one was taken while the machine was busy
CHECKED = 0.02  # seconds of the longest step, up to which stored costs are checked
SOURCE = 16  # tokens of the prompt that steps attend to
PAST = 8  # tokens that the rows have written at least, and at most twice as many


def measure_costs(
    target: T5,
    draft: T5 | None,
    rows: Sequence[int] = (1,),
    settings: Settings | None = None,
    folder: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs | None:
    """The costs of a pair, from the file or measured, in less than a second unless steps take long.

    Numbers of rows whose steps take so long that there is no time for them, or that memory does not
    suffice for, are left out; None if it suffices for none.

    Args:
        target: the model that verifies.
        draft: the model that proposes; None if none does.
        rows: numbers of rows to measure, ascending.
        settings: how rows sample; None is greedy.
        folder: where the files are kept; None is the user's cache.
        clock: seconds.
    """
    folder = cache_folder() if folder is None else folder
    settings = replace(settings or Settings(), max_tokens=2 * PAST + LONGEST)
    measured = []
    for n in rows:
        if measured and _needed(measured[0].scaled(n)) > AT_MOST:
            break
        with contextlib.suppress(RuntimeError, MemoryError):  # fewer rows may still be decoded
            measured.append(
                _remembered(target, draft, n, settings, folder, clock, BUDGET / len(rows))
            )
    return Costs(tuple(measured)) if measured else None


def _needed(costs: StepCosts) -> float:
    """Seconds to encode, to warm up and to measure what cannot be done without, roughly."""
    return 3 * costs.regular + 2 * costs.verify[LONGEST]


def cache_folder(environment: dict[str, str] | None = None) -> Path:
    """The folder in the user's cache."""
    environment = os.environ if environment is None else environment
    base = environment.get("XDG_CACHE_HOME", "")
    # The specification says to ignore relative paths.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / FOLDER


def sample(
    seconds: Callable[[int, int], float],
    drafts: bool,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, tuple[float, ...], float]:
    """Measures costs until the budget is used up.

    Args:
        seconds: makes a step with so many drafted and so many copied proposals and says what it
            took.
        drafts: whether there is a draft model.
        budget: seconds in which to do it; what cannot be done without is measured even if that
            takes longer.
        clock: seconds.

    Returns:
        The last three fields of `StepCosts`.
    """
    plans = [plan for plan in PLANS if drafts or not plan[0]]
    began, rounds, known = clock(), [], {}
    for _ in range(ROUNDS):
        rounds.append({})
        for plan in plans:
            expected = known.get(plan, max(known.values(), default=0))
            if len(known) >= 2 + drafts and clock() - began + expected > budget:
                return _costs(rounds)
            rounds[-1][plan] = known[plan] = seconds(*plan)
        plans = [plan for plan in plans if known[plan] <= OFTEN * known[0, 0]]
    return _costs(rounds)


def _costs(
    rounds: Sequence[dict[tuple[int, int], float]],
) -> tuple[float, tuple[float, ...], float]:
    """Costs from rounds in which the same was measured.

    The speed of a machine changes, so within a round everything is taken relative to its regular
    step, and medians are taken of that. Fewer positions never cost more than more of them.
    """
    ratios = {p: [taken[p] / taken[0, 0] for taken in rounds if p in taken] for p in rounds[0]}
    share = {p: np.median(each) for p, each in ratios.items()}
    regular = float(np.median([taken[0, 0] for taken in rounds if taken]))
    points = sorted(copied for drafted, copied in share if not drafted)
    verify = np.interp(range(LONGEST + 1), points, _rising([share[0, n] for n in points]))
    lengths = sorted(drafted for drafted, _ in share if drafted)
    draft, start = _line(lengths, [share[n, 0] - verify[n] for n in lengths])
    return draft * regular, tuple((verify * regular).tolist()), start * regular


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls: neighbours that do are replaced by their mean."""
    pools: list[tuple[float, int]] = []  # means, and of how many values
    for value in values:
        pool = (value, 1)
        while pools and pools[-1][0] > pool[0]:
            (mean, count), (other, more) = pools.pop(), pool
            pool = ((mean * count + other * more) / (count + more), count + more)
        pools.append(pool)
    return [mean for mean, count in pools for _ in range(count)]


def _line(x: Sequence[int], y: Sequence[float]) -> tuple[float, float]:
    """Slope and offset, neither negative, of the line through these points; 0 if there are none."""
    if not x:
        return 0.0, 0.0
    slope, offset = np.polyfit(x, y, 1) if len(x) > 1 else (0.0, -1.0)
    if offset < 0:
        slope, offset = np.dot(x, y) / np.dot(x, x), 0.0
    return max(float(slope), 0.0), float(offset)


def read(file: Path, key: dict[str, Any]) -> StepCosts | None:
    """The costs in a file, None if there are none that could be used."""
    try:
        stored = json.loads(file.read_bytes())
        rows, draft, verify, start = stored["costs"]
        usable = stored["key"] == key and len(verify) == LONGEST + 1 and type(rows) is int
        usable &= all(type(s) is float and math.isfinite(s) for s in (draft, start, *verify))
        usable &= min(draft, start) >= 0 < verify[0] and verify == sorted(verify)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return StepCosts(rows, draft, tuple(verify), start) if usable else None


def write(file: Path, key: dict[str, Any], costs: StepCosts) -> None:
    """Keeps costs, if the folder can be written: whole or not at all."""
    text = json.dumps({"key": key, "costs": astuple(costs)}, indent=1)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
        try:
            with open(handle, "w", encoding="utf-8") as part:
                part.write(text)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise


def identity(target: T5, draft: T5 | None, rows: int, settings: Settings) -> dict[str, Any]:
    """Everything that costs depend on."""

    def model(it: T5) -> dict[str, Any]:
        parameters = [(n, str(a.dtype), list(a.shape)) for n, a in tree_flatten(it.parameters())]
        digest = hashlib.sha256(json.dumps(sorted(parameters)).encode()).hexdigest()
        return {"config": asdict(it.config), "parameters": digest}

    return {
        "format": FORMAT,
        "target": model(target),
        "draft": model(draft) if draft else None,
        "rows": rows,
        "sampling": [settings.temp > 0, settings.top_k > 0, settings.top_p < 1],
        "device": device_name(),
        "mlx": mx.__version__,
    }


def _remembered(
    target: T5,
    draft: T5 | None,
    rows: int,
    settings: Settings,
    folder: Path,
    clock: Callable[[], float],
    budget: float,
) -> StepCosts:
    """The costs for one number of rows."""
    key = identity(target, draft, rows, settings)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    file = folder / f"{digest[:32]}.json"
    stored = read(file, key)
    if stored and stored.verify[LONGEST] > CHECKED * rows:
        return stored
    seconds = timer(target, draft, rows, settings, clock)
    if stored:
        checks = {0: stored.verify[0], LONGEST: stored.verify[LONGEST]}
        if not any(s > BUSY * min(seconds(0, n), seconds(0, n)) for n, s in checks.items()):
            return stored
    costs = StepCosts(rows, *sample(seconds, draft is not None, budget, clock))
    write(file, key, costs)
    return costs


def timer(
    target: T5, draft: T5 | None, rows: int, settings: Settings, clock: Callable[[], float]
) -> Callable[[int, int], float]:
    """A function that times a step of the engine with so many drafted and copied proposals."""
    drafter = CopyOrDraft(SourceCopy(), DraftModel(draft, target)) if draft else SourceCopy()
    free = StepCosts(rows, 0.0, (1.0,) * (LONGEST + 1))
    engine = Engine(target, drafter, pacer=Pacer(Costs((free,)), rows))
    start, filler = target.config.decoder_start_token_id, target.config.pad_token_id
    settings = replace(settings, num_draft=AUTO)
    engine.insert([Row([filler] * SOURCE, settings, row_key(0, i)) for i in range(rows)])
    for i, row in enumerate(engine.rows):
        # As far apart as rows of a batch are: writing to unlike places of the cache costs more.
        row.committed = [start] + [filler] * (PAST + i % PAST)

    def seconds(drafted: int, copied: int) -> float:
        tokens = (filler,) * copied
        offer = Offer("draft", drafted) if drafted else Offer("copy", copied, tokens)
        began = clock()
        if drafted or copied:
            engine.choose()  # takes its time, whatever comes of it
        engine.draft_and_verify([offer] * rows)[1].tolist()
        return clock() - began

    # Reads the weights from disk, if they have not been used yet. The draft reads all that was
    # written, so that it lacks one token in the steps that are timed, as it does while decoding.
    seconds(1 if draft else 0, 0)
    return seconds
