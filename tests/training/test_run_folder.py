"""What a run leaves for another, and when that is refused."""

import json

import pytest

from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.training.learner import State
from mlx_t5.training.run_folder import BEST, SETTINGS, STATE, Progress, RunFolder

ANSWERS, TRAINING = {"--data": "abc", "--temp": 0.0}, {"iters": 10}


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    assert not run.open(ANSWERS, TRAINING, resume=False)
    return run


def test_a_state_comes_back_to_the_bit(folder):
    assert folder.state() is None
    arrays = {"a.b.0": mx.array([1 / 3, 2e-30]), "step": mx.array(3, mx.uint64)}
    folder.save(State(arrays, {"m": mx.ones(2)}, 7), Progress(best=2.5, judged=5, behind=1))
    state, progress = folder.state()
    assert progress == Progress(best=2.5, judged=5, behind=1) and state.step == 7
    assert state.weights.keys() == arrays.keys() and state.moments["m"].tolist() == [1, 1]
    assert all(mx.array_equal(state.weights[n], a) for n, a in arrays.items())


def test_an_earlier_run_goes_on_only_when_asked_for_and_with_the_same_answers(folder):
    again = RunFolder(folder.path)
    with pytest.raises(UserError, match="earlier run; go on with --resume, or remove it"):
        again.open(ANSWERS, TRAINING, resume=False)
    with pytest.raises(UserError, match="made with another --temp; give that again"):
        again.open(ANSWERS | {"--temp": 1.0}, TRAINING, resume=True)
    folder.save(State({}, {}, 1), Progress())
    folder.save_best({"a": mx.ones(1)})
    assert not again.open(ANSWERS, TRAINING, resume=True) and again.state()
    assert again.open(ANSWERS, {"iters": 20}, resume=True) and again.state() is None
    assert not again.open(ANSWERS, {"iters": 20}, resume=True)


def test_a_strangers_folder_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UserError, match="is no folder of an earlier run"):
        RunFolder(tmp_path).open(ANSWERS, TRAINING, resume=True)


@pytest.mark.parametrize("name", (SETTINGS, STATE, BEST))
@pytest.mark.parametrize("content", (b"", b"{}", b"\x08\0\0\0\0\0\0\0{}      "))
def test_damaged_files_are_named(folder, name, content):
    folder.save(State({}, {}, 1), Progress())
    (folder.path / name).write_bytes(content)
    again = lambda: folder.open(ANSWERS, TRAINING, resume=True)  # noqa: E731
    read = {SETTINGS: again, STATE: folder.state, BEST: folder.best}
    if name == BEST and content.endswith(b" "):
        assert read[name]() == {}  # whole, and empty
        return
    with pytest.raises(UserError, match=f"{name} is damaged"):
        read[name]()


def test_a_full_disk_leaves_the_old_file(folder, monkeypatch):
    folder.save_best({"a": mx.ones(1)})

    def full(path, arrays, facts=None):
        open(path, "wb").write(b"half")
        raise RuntimeError("[save_safetensors] Failed to write")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match="cannot write .*best.safetensors"):
        folder.save_best({"a": mx.zeros(1)})
    assert folder.best()["a"].tolist() == [1] and not list(folder.path.glob(".partial*"))


def test_what_is_left_at_the_end(folder):
    folder.answers.mkdir()
    (folder.answers / "answers-00000.npz").write_bytes(b"12345")
    folder.save(State({}, {}, 1), Progress())
    settings = json.dumps({"answers": ANSWERS, "training": TRAINING})
    assert folder.finish() == 5 + len(settings) and folder.state() is None
