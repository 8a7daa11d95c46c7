"""Writes and reads the files from which a run resumes: settings, answers, state, best weights.

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

from mlx_t5.backend import mx
from mlx_t5.disk import lock, replace_file
from mlx_t5.errors import UserError, reason, shown
from mlx_t5.training.learner import Arrays, State

SETTINGS, ANSWERS, STATE, BEST = "run.json", "answers", "state.safetensors", "best.safetensors"
VOCABULARY = "d2t.npy"


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a run.

    Attributes:
        best: the value of the best evaluation so far; None before the first evaluation.
        best_step: the number of steps taken before the best evaluation.
        evaluated: the number of steps taken before the last evaluation; -1 if there was none.
        behind: the number of evaluations since the best one.
        seconds: the training time in seconds, including that of earlier runs.
    """

    best: float | None = None
    best_step: int = 0
    evaluated: int = -1
    behind: int = 0
    seconds: float = 0.0


class RunFolder:
    """The work folder of one run."""

    def __init__(self, path: Path) -> None:
        """Stores the folder's path; the folder itself is made by `claimed`."""
        self.path = path

    @property
    def answers(self) -> Path:
        """The folder of the target's answers."""
        return self.path / ANSWERS

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the folder, and locks it against other runs if the file system supports locks.

        Raises:
            UserError: another run uses the folder, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            reason = f"cannot make the folder {self.path} ({error.strerror})"
            raise UserError(f"{reason}; choose another --output") from None
        try:
            if not lock(descriptor):
                raise UserError(
                    f"another run is at work in {self.path}; wait for its end, or choose another "
                    "--output"
                )
            yield
        finally:
            os.close(descriptor)

    def open(self, answers: Mapping[str, Any], training: Mapping[str, Any], resume: bool) -> bool:
        """Compares the settings with those of an earlier run, if there was one, and writes them.

        If a setting in `training` has changed, the earlier run's state is removed, so that the
        training starts over.

        Args:
            answers: the settings that a resuming run must not change, by the option's name.
            training: the further settings on which the training depends.
            resume: whether to resume an earlier run.

        Returns:
            Whether the state of an earlier run was removed.

        Raises:
            UserError: there was an earlier run although `resume` is false; the earlier settings are
                damaged or differ from `answers`; or the folder has files, but no settings.
        """
        settings = json.loads(json.dumps({"answers": dict(answers), "training": dict(training)}))
        before = self._settings()
        if before is not None and not resume:
            raise UserError(f"{self.path} has an earlier run; go on with --resume, or remove it")
        if before is not None:
            changed = [n for n, v in settings["answers"].items() if before["answers"].get(n) != v]
            if changed:
                raise UserError(
                    f"{self.path} was made with another {changed[0]}; give that again, or remove "
                    "the folder to start over"
                )
        dropped = before is not None and before["training"] != settings["training"]
        if dropped:
            self._remove_state()
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings)
        replace_file(self.path / SETTINGS, lambda path: path.write_text(text, encoding="utf-8"))
        return dropped

    def save(self, state: State, progress: TrainingProgress) -> None:
        """Writes the state and the progress to a file."""
        arrays = _by_name(state)
        facts = {"step": str(state.step), "progress": json.dumps(asdict(progress))}
        replace_file(self.path / STATE, lambda path: mx.save_safetensors(str(path), arrays, facts))

    def state(self, like: State) -> tuple[State, TrainingProgress] | None:
        """Returns the last state and progress; None if no file has them.

        Args:
            like: the state before the first step, whose arrays have the same names and shapes.

        Raises:
            UserError: the file of the state or of the best weights is damaged or belongs to a
                different model.
        """
        if not (self.path / STATE).exists():
            return None
        with self._reading(STATE):
            arrays, facts = self._load(STATE, _by_name(like))
            step, progress = int(facts["step"]), TrainingProgress(**json.loads(facts["progress"]))
        weights = {name: arrays[f"weights.{name}"] for name in like.weights}
        moments = {name: arrays[f"moments.{name}"] for name in like.moments}
        if progress.best is not None:
            self.best(weights)  # if this file is damaged, fails now and not after hours
        return State(weights, moments, step), progress

    def save_best(self, weights: Arrays) -> None:
        """Writes the best weights so far."""
        replace_file(self.path / BEST, lambda path: mx.save_safetensors(str(path), weights))

    def best(self, like: Arrays) -> Arrays:
        """Returns the best weights.

        Args:
            like: arrays with the names and shapes of the best weights.

        Raises:
            UserError: the file is damaged or belongs to a different model.
        """
        with self._reading(BEST):
            return self._load(BEST, like)[0]

    def vocabulary(self, count: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the ids of the tokens that the draft may propose.

        Args:
            count: a function that chooses the ids; called only if no earlier run has chosen them.

        Raises:
            UserError: the file of the earlier run is damaged.
        """
        file = self.path / VOCABULARY
        if not file.exists():
            ids = count()
            replace_file(file, lambda path: np.save(path, ids))
        with self._reading(VOCABULARY, f"{VOCABULARY}, {STATE} and {BEST} to train again"):
            return np.load(file)

    def finish(self) -> int:
        """Removes state, best weights and vocabulary; returns the other files' size in bytes."""
        self._remove_state()
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def _remove_state(self) -> None:
        for name in (STATE, BEST, VOCABULARY):
            (self.path / name).unlink(missing_ok=True)

    def _settings(self) -> dict[str, dict] | None:
        """Returns the settings of an earlier run; None if there was no earlier run."""
        file = self.path / SETTINGS
        if not file.exists():
            # Hidden files are ignored: macOS or a run that was killed at its beginning made them.
            if any(self.path.glob("[!.]*")):
                raise UserError(
                    f"{self.path} is no folder of an earlier run; choose another --output"
                )
            return None
        with self._reading(SETTINGS, "the folder to start over"):
            settings = json.loads(file.read_text(encoding="utf-8"))
            return {name: dict(settings[name]) for name in ("answers", "training")}

    def _load(self, name: str, like: Arrays) -> tuple[Arrays, dict[str, str]]:
        """Returns the arrays and the metadata of a file.

        Raises:
            ValueError: the names and shapes of the arrays differ from those of `like`.
        """
        arrays, facts = mx.load(str(self.path / name), return_metadata=True)
        if {n: a.shape for n, a in arrays.items()} != {n: a.shape for n, a in like.items()}:
            raise ValueError("it belongs to another model")
        mx.eval(arrays)
        return arrays, facts

    @contextlib.contextmanager
    def _reading(
        self, name: str, what: str = f"{STATE} and {BEST} to train again"
    ) -> Iterator[None]:
        """Raises a `UserError` if the file `name`, which the `with` block reads, is damaged.

        The error message ends with "remove {what}", for example "remove the folder to start over".
        """
        try:
            yield
        except (RuntimeError, ValueError, KeyError, TypeError, RecursionError, EOFError) as error:
            cause = f"{self.path / name} is damaged ({shown(reason(error))})"
            raise UserError(f"{cause}; remove {what}") from None


def _by_name(state: State) -> Arrays:
    """Returns a dictionary of the state's arrays, keyed by their names in the file."""
    return {f"weights.{name}": array for name, array in state.weights.items()} | {
        f"moments.{name}": array for name, array in state.moments.items()
    }
