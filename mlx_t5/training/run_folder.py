"""Writes and reads the files from which a run resumes: options, answers, state, best weights.

An interruption leaves each file either in its old version or in its new version. The best weights
are written before the state that refers to them. If only the best weights are new, the run resumes
from the old state and reaches the new state again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.disk import lock, replace_file
from mlx_t5.errors import UserError, brief, readable, reason
from mlx_t5.training.learner import Arrays, State

OPTIONS, ANSWERS, STATE, BEST = "run.json", "answers", "state.safetensors", "best.safetensors"
VOCABULARY, WRITTEN = "d2t.npy", "written"


@dataclass(frozen=True)
class TrainingProgress:
    """Counted in steps taken; `behind` is the number of evaluations since the best one."""

    best: float | None = None
    best_step: int = 0
    evaluated: int = -1
    behind: int = 0
    seconds: float = 0.0


class RunFolder:
    """The work folder of one run; `written` exists once the run has written its output."""

    def __init__(self, path: Path) -> None:
        self.path, self.answers, self.written = path, path / ANSWERS, path / WRITTEN

    @contextlib.contextmanager
    def opened(self, options: Mapping[str, Any], resume: bool) -> Iterator[None]:
        """Makes and locks the folder; refuses one whose run had other options."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            cause = f"cannot make the folder {self.path} ({error.strerror})"
            raise UserError(f"{cause}; choose another --output") from None
        try:
            if not lock(descriptor):
                cure = "wait until it ends, or choose another --output"
                raise UserError(f"another run is at work in {self.path}; {cure}")
            file = self.path / OPTIONS
            if not file.exists():
                # Hidden files are ignored: macOS or a run killed at its beginning made them.
                if any(f.name != ANSWERS for f in self.path.glob("[!.]*")):
                    cause = f"{self.path} is not the folder of an earlier run"
                    raise UserError(f"{cause}; choose another --output")
                text = json.dumps(options, indent=1)
                replace_file(file, lambda path: path.write_text(text, encoding="utf-8"))
            elif not resume:
                cure = "resume it with --resume, remove it, or choose another --output"
                raise UserError(f"{self.path} has an earlier run; {cure}")
            else:
                self._compare(file, json.loads(json.dumps(options)))
            yield
        finally:
            os.close(descriptor)

    def _compare(self, file: Path, options: dict[str, Any]) -> None:
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
            changed = [name for name, value in options.items() if before[name] != value]
        except (ValueError, KeyError, TypeError, RecursionError):
            cause = f"{file} is damaged or from an older version, so its run cannot be resumed"
            raise UserError(f"{cause}; choose another --output, or remove {self.path}") from None
        if changed:
            cause = f"{self.path} was made with another {changed[0]} (see {OPTIONS} there)"
            raise UserError(f"{cause}; give that again, or choose another --output")

    def save(self, state: State, progress: TrainingProgress) -> None:
        arrays = _by_name(state)
        facts = {"step": str(state.step), "progress": json.dumps(asdict(progress))}
        replace_file(self.path / STATE, lambda path: mx.save_safetensors(str(path), arrays, facts))

    def state(self, like: State) -> tuple[State, TrainingProgress] | None:
        if not (self.path / STATE).exists():
            return None
        with self._reading(STATE):
            arrays, facts = self._load(STATE, _by_name(like))
            step, progress = int(facts["step"]), TrainingProgress(**json.loads(facts["progress"]))
        weights = {name: arrays[f"weights.{name}"] for name in like.weights}
        moments = {name: arrays[f"moments.{name}"] for name in like.moments}
        if progress.best_step:
            self.best(weights)  # if this file is damaged, fails now and not after hours
        return State(weights, moments, step), progress

    def save_best(self, weights: Arrays) -> None:
        replace_file(self.path / BEST, lambda path: mx.save_safetensors(str(path), weights))

    def best(self, like: Arrays) -> Arrays:
        with self._reading(BEST):
            return self._load(BEST, like)[0]

    def vocabulary(self, count: Callable[[], np.ndarray]) -> np.ndarray:
        file = self.path / VOCABULARY
        if not file.exists():
            ids = count()
            replace_file(file, lambda path: np.save(path, ids))
        with self._reading(VOCABULARY):
            return np.load(file)

    def kept(self) -> str:
        size = readable(sum(f.stat().st_size for f in self.path.rglob("*") if f.is_file()))
        return f"{self.path} ({size}) is kept for --resume; remove it when you no longer need it"

    def _load(self, name: str, like: Arrays) -> tuple[Arrays, dict[str, str]]:
        arrays, facts = mx.load(str(self.path / name), return_metadata=True)
        if {n: a.shape for n, a in arrays.items()} != {n: a.shape for n, a in like.items()}:
            raise ValueError("it belongs to another model")
        mx.eval(arrays)
        return arrays, facts

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, KeyError, TypeError, RecursionError, EOFError) as error:
            cause = f"{self.path / name} is damaged ({brief(reason(error))})"
            files = f"{VOCABULARY} (if there), {STATE} and {BEST}"
            raise UserError(f"{cause}; to train again, remove {files}") from None


def _by_name(state: State) -> Arrays:
    return dict(tree_flatten({"weights": state.weights, "moments": state.moments}))
