"""Batches have examples of similar length, in an order set by the seed and the step."""

import numpy as np

from mlx_t5.training.batches import TrainingBatch, batch_at, collate
from mlx_t5.training.teacher_answers import LabeledExample


def example(source: int, answer: int) -> LabeledExample:
    """Returns an example of these lengths, with consecutive tokens."""
    top_ids = np.arange(answer * 2, dtype=np.int32).reshape(answer, 2)
    top_p = np.full((answer, 2), 0.4, np.float32)
    return LabeledExample(np.arange(2, source + 2), np.arange(5, answer + 5), top_ids, top_p)


def test_an_epoch_has_every_example_once_and_every_epoch_its_own_order():
    labeled = [example(4, 1 + i % 7) for i in range(100)]
    first, second = ([batch_at(labeled, 10, 1, 10 * e + i) for i in range(10)] for e in (0, 1))
    assert sorted(sum(first, [])) == list(range(100)) == sorted(sum(second, []))
    assert first != second and first[3] == batch_at(labeled, 10, 1, 3) != batch_at(
        labeled, 10, 2, 3
    )
    spans = [max(i % 7 for i in batch) - min(i % 7 for i in batch) for batch in first]
    assert np.mean(spans) <= 1  # in random order it would be 6
    # Fewer examples than the batch size form one batch.
    assert sorted(batch_at([example(2, 2)] * 3, 8, 0, 5)) == [0, 1, 2]


def test_a_batch_holds_padded_arrays():
    batch = collate([example(3, 2), example(2, 9)], start_token=7, pad_token=0, keep_states=False)
    assert batch.source.shape[0] == 2 and batch.source[0, :3].tolist() == [2, 3, 4]
    assert batch.mask.sum(axis=1).tolist() == [3, 2] and batch.states is None
    assert batch.tokens.shape == (2, 16)  # a multiple of 8
    assert batch.tokens[0, :3].tolist() == [7, 5, 0]  # the last token of an answer is not fed
    assert batch.counted.reshape(2, 16).sum(axis=1).tolist() == [2, 9]
    assert batch.top_ids.shape == batch.top_p.shape == (32, 2)
    assert batch.top_ids[16:19].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert vars(TrainingBatch(*batch.arrays)) == vars(batch)  # the same arrays
