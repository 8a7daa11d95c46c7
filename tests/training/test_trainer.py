"""Tests the training loop: evaluations, the best draft, early stopping and interruptions."""

import itertools
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from mlx_t5.backend import mx, tree_flatten
from mlx_t5.network.sharing import shared_draft
from mlx_t5.training import run_folder, trainer
from mlx_t5.training.batches import micro_batches
from mlx_t5.training.evaluation import Acceptance
from mlx_t5.training.run_folder import RunFolder, TrainingProgress
from mlx_t5.training.teacher_answers import label
from mlx_t5.training.trainer import Schedule, Trainer
from random_models import random_t5
from test_learner import PAIRS, learner_of

SCHEDULE = Schedule(8, steps_per_eval=2, save_every=3)


@pytest.fixture(scope="module")
def inputs():
    """Returns a target and its labeled answers."""
    target = random_t5()
    return target, label(target, PAIRS)


def a_run(inputs, path, scores=None, log=lambda line: None, schedule=SCHEDULE):
    """Returns a trainer; without `scores`, the score is the first weight of the draft's norm."""
    target, labeled = inputs
    draft = shared_draft(target, 1)
    upcoming = iter(scores or ())

    def evaluate():
        score = next(upcoming) if scores else float(mx.abs(draft.decoder.norm.weight[0]).item())
        return Acceptance(0.5, score)

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


def test_the_best_draft_is_kept_and_too_many_worse_ones_end_the_run(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "PATIENCE", 2)
    log = []
    run = a_run(inputs, tmp_path, [1.0, 3.0, 2.0, 3.0, 9.0], log.append)
    first = run.learner.begin().weights
    run.run()
    assert run.state.step == 6 and run.over
    progress = run.progress
    assert (progress.best, progress.best_step, progress.behind) == (3.0, 2, 2)
    assert "(the best so far)" in log[1] and log[3].endswith("(2 behind)")
    assert log[4] == "stopped early at step 6: no improvement in the last 2 evaluations"
    best, last = run.folder.best(run.state.weights), run.state.weights
    name = "decoder.norm.weight"
    assert mx.array_equal(run.learner.model.decoder.norm.weight, best[name])
    assert not mx.array_equal(best[name], last[name])
    assert not mx.array_equal(best[name], first[name])


def test_a_loss_that_is_no_number_ends_the_run_with_the_best_draft(inputs, tmp_path, monkeypatch):
    log = []
    run = a_run(inputs, tmp_path, [1.0, 2.0, 3.0], log.append)
    step = run.learner.step
    monkeypatch.setattr(
        run.learner, "step", lambda s, b: (None, float("nan")) if s.step == 3 else step(s, b)
    )
    run.run()
    assert "step 4: loss or gradient is NaN" in log[-2]
    best = run.folder.best(run.state.weights)["decoder.norm.weight"]
    assert run.progress == TrainingProgress(2.0, 2, 2, 0, run.progress.seconds)
    assert mx.array_equal(run.learner.model.decoder.norm.weight, best)
