"""Tests the files that a run leaves for resuming, and when resuming is refused."""

import json

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.training.learner import State
from mlx_t5.training.run_folder import (
    BEST,
    SETTINGS,
    STATE,
    VOCABULARY,
    RunFolder,
    TrainingProgress,
)

NONE = State({}, {})
ANSWERS, TRAINING = {"--data": "abc", "--temp": 0.0}, {"iters": 10}


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    assert not run.open(ANSWERS, TRAINING, resume=False)
    return run


def test_a_saved_state_is_read_back_exactly(folder):
    assert folder.state(NONE) is None
    arrays = {"a.b.0": mx.array([1 / 3, 2e-30]), "step": mx.array(3, mx.uint64)}
    saved = State(arrays, {"m": mx.ones(2)}, 7)
    folder.save_best(arrays)
    folder.save(saved, TrainingProgress(best=2.5, evaluated=5, behind=1))
    state, progress = folder.state(saved)
    assert progress == TrainingProgress(best=2.5, evaluated=5, behind=1) and state.step == 7
    assert state.weights.keys() == arrays.keys() and state.moments["m"].tolist() == [1, 1]
    assert all(mx.array_equal(state.weights[n], a) for n, a in arrays.items())


def test_an_earlier_run_is_resumed_only_when_asked_for_and_with_the_same_answers(folder):
    again = RunFolder(folder.path)
    with pytest.raises(UserError, match="earlier run; go on with --resume, or remove it"):
        again.open(ANSWERS, TRAINING, resume=False)
    with pytest.raises(UserError, match="made with another --temp; give that again"):
        again.open(ANSWERS | {"--temp": 1.0}, TRAINING, resume=True)
    folder.save(State({}, {}, 1), TrainingProgress())
    folder.save_best({"a": mx.ones(1)})
    assert not again.open(ANSWERS, TRAINING, resume=True) and again.state(NONE)
    assert again.open(ANSWERS, {"iters": 20}, resume=True) and again.state(NONE) is None
    assert not again.open(ANSWERS, {"iters": 20}, resume=True)
    (folder.path / SETTINGS).unlink()
    for file in folder.path.iterdir():
        file.unlink()
    (folder.path / ".DS_Store").touch()
    assert not again.open(ANSWERS, TRAINING, resume=True)  # begins again
    (folder.path / SETTINGS).unlink()
    (folder.path / "mine.txt").touch()
    with pytest.raises(UserError, match="is no folder of an earlier run"):  # no run's folder
        again.open(ANSWERS, TRAINING, resume=True)


@pytest.mark.parametrize("name", (SETTINGS, STATE, BEST))
@pytest.mark.parametrize("content", (b"", b"{}", b"\x08\0\0\0\0\0\0\0{}      "))
def test_damaged_files_are_named(folder, name, content):
    folder.save(State({}, {}, 1), TrainingProgress())
    (folder.path / name).write_bytes(content)
    again = lambda: folder.open(ANSWERS, TRAINING, resume=True)  # noqa: E731
    like = {"a": mx.ones(1)}
    readers = {
        SETTINGS: again,
        STATE: lambda: folder.state(State(like, {})),
        BEST: lambda: folder.best(like),
    }
    with pytest.raises(UserError, match=f"{name} is damaged"):
        readers[name]()


def test_the_vocabulary_is_counted_again_for_another_training(folder):
    first, second = np.array([1, 5]), np.array([1, 9])
    assert folder.vocabulary(lambda: first).tolist() == [1, 5]
    again = RunFolder(folder.path)
    again.open(ANSWERS, TRAINING, resume=True)
    assert again.vocabulary(lambda: second).tolist() == [1, 5]
    (folder.path / VOCABULARY).write_text("no array")
    with pytest.raises(UserError, match=f"{VOCABULARY} is damaged .*; remove {VOCABULARY}"):
        again.vocabulary(lambda: second)
    again.open(ANSWERS, {"iters": 20}, resume=True)
    assert again.vocabulary(lambda: second).tolist() == [1, 9]


def test_a_state_of_another_draft_or_without_the_best_one_is_refused_at_once(folder):
    one, other = ({"a": mx.ones(n)} for n in (1, 2))
    folder.save(State(one, {}, 1), TrainingProgress(best=1.5))
    with pytest.raises(UserError, match=f"{BEST} is damaged .*remove {STATE} and {BEST}"):
        folder.state(State(one, {}))
    folder.save_best(one)
    assert folder.state(State(one, {}))
    for like in (State(other, {}), State(one, other)):
        with pytest.raises(UserError, match=f"{STATE} is damaged .it belongs to another model"):
            folder.state(like)


def test_two_runs_never_share_a_folder(folder):
    other = RunFolder(folder.path)
    with folder.claimed(), pytest.raises(UserError, match="another run is at work in"):
        other.claimed().__enter__()
    with other.claimed():
        pass


def test_a_full_disk_leaves_the_old_file(folder, monkeypatch):
    folder.save_best({"a": mx.ones(1)})

    def full(path, arrays, facts=None):
        open(path, "wb").write(b"half")
        raise RuntimeError("[save_safetensors] Failed to write")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(UserError, match="cannot write .*best.safetensors .*go on with --resume"):
        folder.save_best({"a": mx.zeros(1)})
    assert folder.best({"a": mx.ones(1)})["a"].tolist() == [1] and not list(
        folder.path.glob(".partial*")
    )


def test_finishing_removes_the_state_and_keeps_the_answers(folder):
    folder.answers.mkdir()
    (folder.answers / "answers-00000.npz").write_bytes(b"12345")
    folder.save(State({}, {}, 1), TrainingProgress())
    settings = json.dumps({"answers": ANSWERS, "training": TRAINING})
    assert folder.finish() == 5 + len(settings) and folder.state(NONE) is None
