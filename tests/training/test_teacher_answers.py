"""Tests the labels of answers by the target, and the files that keep them."""

import numpy as np
import pytest

from mlx_t5.backend import mx
from mlx_t5.errors import UserError
from mlx_t5.training import teacher_answers
from mlx_t5.training.examples import Example
from mlx_t5.training.teacher_answers import Answers, label
from random_models import random_t5

PAIRS = [((5, 9, 1), (7, 8, 1)), ((6, 1), (3,)), ((4, 4, 9, 20, 1), (30, 2, 2, 50, 1))]


@pytest.fixture(scope="module")
def target():
    return random_t5()


@pytest.mark.parametrize("temp", (0.0, 0.5))
def test_labels_are_the_targets_probabilities_and_states(target, temp, monkeypatch):
    """The labels equal the logits' probabilities, in passes of one answer or of all."""
    together = label(target, PAIRS, temp)
    monkeypatch.setattr(teacher_answers, "LOGITS_AT_ONCE", 1)
    for (source, answer), one, other in zip(
        PAIRS, label(target, PAIRS, temp), together, strict=True
    ):
        logits = target(mx.array([source]), mx.array([[0, *answer[:-1]]]))[0]
        p = np.array(mx.softmax(logits / (temp or 1.0), axis=-1))
        for labeled in (one, other):
            assert (tuple(labeled.source), tuple(labeled.answer)) == (source, answer)
            assert labeled.top_ids.shape == (len(answer), teacher_answers.TOP_K)
            likeliest = np.sort(p, axis=-1)[:, -teacher_answers.TOP_K :]
            np.testing.assert_allclose(np.sort(labeled.top_p, axis=-1), likeliest, atol=1e-5)
            np.testing.assert_allclose(
                labeled.top_p, np.take_along_axis(p, labeled.top_ids, -1), atol=1e-5
            )
            states = np.array(target.encode(mx.array([source]))[0])
            np.testing.assert_allclose(labeled.states(), states, atol=1e-4)


class Teacher:
    """Answers with the reversed source, except source 13; raises Ctrl-C after some answers."""

    def __init__(self, stopped_after: int = 1000):
        self.remaining, self.indices = stopped_after, []

    def __call__(self, examples, indices):
        for source, i in zip([e.source for e in examples], indices, strict=True):
            if not self.remaining:
                raise KeyboardInterrupt
            self.remaining -= 1
            self.indices.append(i)
            yield None if 13 in source else source[::-1]


def test_a_stopped_run_is_resumed_after_its_last_file(target, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_answers, "SHARD", 4)
    examples = [Example((3 + i, 1)) for i in range(12)] + [Example((50, 1), (42, 1))]
    first, answered = Answers(tmp_path, examples), []
    count = lambda: answered.append(1)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        first.complete(target, Teacher(stopped_after=6), 0.0, True, count)
    assert len(answered) == 6 and first.done == 4
    again, teacher = Answers(tmp_path, examples), Teacher()
    again.complete(target, teacher, 0.0, True, count)
    assert teacher.indices == [4, 5, 6, 7, 8, 9, 10, 11] and again.done == 13
    assert len(answered) == 6 + 9
    labeled = again.labeled()
    assert [example.source.tolist()[0] for example in labeled] == [*range(3, 13), 14, 50]
    assert labeled[0].answer.tolist() == [1, 3] and labeled[-1].answer.tolist() == [42, 1]
    for example in labeled:
        states = np.array(target.encode(mx.array(example.source[None]))[0])
        np.testing.assert_allclose(example.states(), states, rtol=2e-3, atol=1e-3)  # in 16 bits
    assert not [file for file in tmp_path.iterdir() if "partial" in file.name]


def test_damaged_answers_are_named(target, tmp_path):
    answers = Answers(tmp_path, [Example((5, 1)), Example((6, 7, 1))])
    answers.complete(target, Teacher(), 0.0, True, lambda: None)
    with pytest.raises(UserError, match="belongs to other prompts"):
        Answers(tmp_path, [Example((5, 1)), Example((6, 8, 1))]).labeled()
    assert len(answers.labeled()) == 2
    for name in ("states-00000.npy", "answers-00000.npz"):
        content = (tmp_path / name).read_bytes()
        for damaged in (content[: len(content) // 2], bytes(len(content))):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(UserError, match="answers-00000.npz is damaged .*; remove it, and"):
                answers.labeled()
