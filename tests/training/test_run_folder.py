"""Tests the files that a run leaves for resuming, and when resuming is refused."""

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.training.learner import State
from mlx_t5.training.run_folder import (
    BEST,
    OPTIONS,
    STATE,
    VOCABULARY,
    RunFolder,
    TrainingProgress,
)

NONE = State({}, {})
GIVEN = {"--model": "t5", "--temp": 0.0, "--max-seq-length": (24, 12)}


def opened(folder, options=GIVEN, resume=True):
    with folder.opened(options, resume):
        pass


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    opened(run, resume=False)
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


def test_a_run_begins_in_an_empty_folder_or_with_answers(tmp_path):
    folder = RunFolder(tmp_path)
    folder.answers.mkdir()
    (tmp_path / ".DS_Store").touch()
    opened(folder)
    (tmp_path / OPTIONS).rename(tmp_path / "mine.txt")
    with pytest.raises(UserError, match="is not the folder of an earlier run"):
        opened(folder)


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"answers": {}}'])
def test_damaged_or_older_options_are_refused(folder, text):
    (folder.path / OPTIONS).write_text(text)
    with pytest.raises(UserError, match="run.json is damaged or from an older version"):
        opened(folder)


@pytest.mark.parametrize("name", (STATE, BEST, VOCABULARY))
@pytest.mark.parametrize("content", (b"", b"\x08\0\0\0\0\0\0\0{}      "))
def test_damaged_files_are_named(folder, name, content):
    folder.save(State({}, {}, 1), TrainingProgress())
    (folder.path / name).write_bytes(content)
    like = {"a": mx.ones(1)}
    readers = {STATE: lambda: folder.state(State(like, {})), BEST: lambda: folder.best(like)}
    readers[VOCABULARY] = lambda: folder.vocabulary(None)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        readers[name]()


def test_the_vocabulary_is_counted_once(folder):
    first, second = np.array([1, 5]), np.array([1, 9])
    for count in (first, second):
        assert folder.vocabulary(lambda count=count: count).tolist() == [1, 5]


def test_a_state_of_another_draft_or_without_the_best_one_is_refused_at_once(folder):
    one, other = ({"a": mx.ones(n)} for n in (1, 2))
    folder.save(State(one, {}, 1), TrainingProgress(best=1.5, best_step=1))
    with pytest.raises(UserError, match=f"{BEST} is damaged .*remove .*{STATE} and {BEST}"):
        folder.state(State(one, {}))
    folder.save_best(one)
    assert folder.state(State(one, {}))
    for like in (State(other, {}), State(one, other)):
        with pytest.raises(UserError, match=f"{STATE} is damaged .it belongs to another model"):
            folder.state(like)


def test_two_runs_never_share_a_folder(folder):
    with folder.opened(GIVEN, True), pytest.raises(UserError, match="another run is at work in"):
        opened(RunFolder(folder.path))
    opened(RunFolder(folder.path))
