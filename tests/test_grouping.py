import pytest

from mlx_t5.network.encoding import by_length, in_halves


def test_batches_have_items_of_similar_length():
    lengths = [100, 5, 100, 6, 90, 300, 5]
    batches = [[lengths[i] for i in batch] for batch in by_length(lengths, 3, 256)]
    assert batches == [[300], [100, 100], [90, 6], [5, 5]]
    assert list(by_length([1, 3, 2], 2)) == [[1, 2], [0]]


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_work_that_does_not_fit_is_halved(error):
    tried = []

    def work(items):
        tried.append(list(items))
        if sum(items) > 5:
            raise error("too much")
        return [2 * item for item in items]

    values = in_halves(work, [1, 2, 9, 3], lambda item, reason: (item, reason))
    assert not tried
    assert list(values) == [2, 4, (9, "too much"), 6]
    assert tried == [[1, 2, 9, 3], [1, 2], [9, 3], [9], [3]]
