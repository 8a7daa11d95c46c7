"""Tests the training loop: evaluations, the best draft, early stopping and interruptions."""

import itertools
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.network.sharing import shared_draft
from mlx_t5.training import run_folder
from mlx_t5.training.batches import micro_batches
from mlx_t5.training.evaluation import Acceptance
from mlx_t5.training.run_folder import RunFolder
from mlx_t5.training.teacher_answers import label
from mlx_t5.training.trainer import Schedule, Trainer
from random_models import random_t5
from test_learner import PAIRS, learner_of

SCHEDULE = Schedule(8, steps_per_eval=2, save_every=3, steps_per_report=3)


@pytest.fixture(scope="module")
def inputs():
    """Returns a target and its labeled answers."""
    target = random_t5()
    return target, label(target, PAIRS)


def a_run(inputs, path, scores=None, log=lambda line, **numbers: None, schedule=SCHEDULE):
    """Returns a trainer; without `scores`, the score is the first weight of the draft's norm."""
    target, labeled = inputs
    draft = shared_draft(target, 1)
    upcoming = iter(scores or ())

    def evaluate():
        score = next(upcoming) if scores else float(mx.abs(draft.decoder.norm.weight[0]).item())
        return Acceptance(score, 1.5)

    folder = RunFolder(path)
    folder.path.mkdir(exist_ok=True)
    learner = learner_of(draft, schedule.iters, 0.05)
    batch = partial(micro_batches, labeled, draft, 2, 2, 0)
    return Trainer(learner, batch, schedule, folder, evaluate, log)


def outcome(run):
    """Returns the final progress, step and weights of a run, without its seconds."""
    arrays = [*tree_flatten(run.learner.model.parameters()), *run.state.weights.items()]
    content = [(name, np.array(array).tobytes()) for name, array in arrays]
    return replace(run.progress, seconds=0.0), run.state.step, content


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    """Returns the outcome of a run without interruption."""
    run = a_run(inputs, tmp_path_factory.mktemp("undisturbed"))
    run.run()
    return outcome(run)


class Killed(BaseException):
    """Simulates a kill: nothing is cleaned up."""


@pytest.mark.slow
@pytest.mark.parametrize("before", (True, False))
def test_a_run_killed_at_any_file_comes_to_the_same_end(
    inputs, undisturbed, tmp_path, monkeypatch, before
):
    """The run is killed right before or right after each file is moved to its place."""
    rename = os.replace
    for kills in itertools.count(1):
        calls = itertools.count(1)

        def dying(*names, calls=calls, kills=kills):
            last = next(calls) == kills
            if not (last and before):
                rename(*names)
            if last:
                raise Killed

        path = tmp_path / str(kills)
        with monkeypatch.context() as patch:
            patch.setattr(run_folder.os, "replace", dying)
            try:
                a_run(inputs, path).run()
                break
            except Killed:
                pass
        again = a_run(inputs, path)
        again.run()
        assert outcome(again) == undisturbed
    assert kills > 4


def numbered(run):
    """Returns the number of steps after which the learner's model had its present weights."""
    name = "decoder.norm.weight"
    return [mx.array_equal(run.learner.model.decoder.norm.weight, w[name]) for w in run.seen].index(
        True
    )


@pytest.mark.parametrize(
    "scores, nan_at, written, line",
    [
        ([0.1, 0.3, 0.2, 0.3, 0.1], None, 2, "the best weights are of step 2"),
        # Weights before the training are never written, even if they are the best.
        (
            [0.9, 0.3, 0.2, 0.3, 0.1],
            None,
            8,
            "warning: no evaluation was better than before the tr",
        ),
        ([0.1, float("nan"), 0.2, 0.1, 0.1], None, 4, "the best weights are of step 4"),
        ([float("nan"), 0.1, 0.2, 0.1, 0.1], None, 4, "the best weights are of step 4"),
        ([0.1, 0.3, 0.4], 5, 4, "the best weights are of step 4"),
        ([0.9, 0.3, 0.4], 5, None, "no weights were better than before the training, so none are"),
    ],
)
def test_the_best_weights_after_the_first_step_are_written(
    inputs, tmp_path, monkeypatch, scores, nan_at, written, line
):
    log = []
    run = a_run(inputs, tmp_path, scores, lambda text, **_: log.append(text))
    step, run.seen = run.learner.step, [run.state.weights]

    def stepped(state, batch):
        if state.step + 1 == nan_at:
            return None, float("nan")
        state, loss = step(state, batch)
        run.seen.append(state.weights)
        return state, loss

    monkeypatch.setattr(run.learner, "step", stepped)
    assert run.run() == (written is not None) and run.failed == (nan_at is not None)
    assert line in log[-1] and (nan_at is None or "step 5: loss or gradient is NaN" in log[-2])
    assert written is None or numbered(run) == written


def test_patience_ends_a_run_only_if_it_is_asked_for(inputs, tmp_path):
    log, scores = [], [0.1, 0.3, 0.2, 0.3, 0.9]
    schedule = replace(SCHEDULE, patience=2)
    run = a_run(inputs, tmp_path, scores, lambda text, **_: log.append(text), schedule)
    assert run.run() and run.state.step == 6
    assert log[-2].startswith("stopped at step 6 of 8: 2 evaluations without a better one than st")
    again = a_run(inputs, tmp_path, [0.9])
    assert again.run() and again.state.step == 8 and again.progress.best_step == 8


def test_lines_have_the_mean_loss_since_the_last_one_and_the_rate(inputs, tmp_path):
    lines = []
    run = a_run(inputs, tmp_path, log=lambda text, **numbers: lines.append(numbers))
    run.run()
    reports = [numbers for numbers in lines if "learning_rate" in numbers]
    assert [numbers["step"] for numbers in reports] == [3, 6]
    for first, numbers in zip((0, 3), reports, strict=True):
        assert numbers["loss"] == pytest.approx(np.mean(run.losses[first : first + 3]))
        assert numbers["learning_rate"] == pytest.approx(0.05 * (8 - first - 2) / 7.6)
        assert numbers["tokens_per_second"] > 0 and numbers["seconds_left"] > 0
    assert [n["step"] for n in lines if "eval_acceptance" in n] == [0, 2, 4, 6, 8]
