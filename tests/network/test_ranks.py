"""Values that ranks exchange are computed by the CPU from start to end."""

import pytest

from mlx_t5.backend import mx
from mlx_t5.network import ranks as module
from mlx_t5.network.ranks import Ranks


class Streams:
    """Stands in for `mx.stream`; `device` is the device of the current block."""

    def __init__(self):
        self.device = "default"

    def __call__(self, device):
        self._named = device
        return self

    def __enter__(self):
        self.device = self._named

    def __exit__(self, *error):
        self.device = "default"


class Gathered(list):
    """The result of `all_gather`; it records each operation on it or on a part."""

    def __init__(self, parts, note):
        super().__init__(parts)
        self._note = note

    def __getitem__(self, i):
        self._note("slice")
        return Part(super().__getitem__(i), self._note)


class Part:
    def __init__(self, array, note):
        self.array, self._note = array, note

    def __add__(self, other):
        self._note("add")
        return Part(self.array + other.array, self._note)

    def item(self):
        return self.array.item()

    def __array__(self, *args, **kwargs):
        return self.array.__array__(*args, **kwargs)


@pytest.mark.parametrize(("on_cuda", "device"), [(False, mx.cpu), (True, mx.gpu)])
def test_operations_that_wait_for_another_rank_stay_on_the_cpu(monkeypatch, on_cuda, device):
    streams, done = Streams(), []

    def note(what):
        done.append((what, streams.device))

    def all_gather(array, group):
        note("gather")
        return Gathered([array[0], array[0]], note)

    def concatenate(parts, axis, own=mx.concatenate):
        note("concatenate")
        return own([part.array for part in parts], axis)

    monkeypatch.setattr(module, "ON_CUDA", on_cuda)
    monkeypatch.setattr(mx, "stream", streams)
    monkeypatch.setattr(mx, "concatenate", concatenate)
    monkeypatch.setattr(mx.distributed, "all_gather", all_gather)
    both = Ranks()
    both.size = 2
    assert both.sum(mx.array([1, 2])).array.tolist() == [2, 4]
    assert both.columns(mx.array([[1, 2]]), 3).tolist() == [[1, 2, 1]]
    assert both.of_first(mx.array([5])).array.tolist() == [5]
    assert both.any(True) and not both.any(False)
    assert both.gathered(["ä"]) == [["ä"], ["ä"]] and both.shared(7) == 7
    assert {what for what, _ in done} == {"gather", "slice", "add", "concatenate"}
    assert {where for _, where in done} == {device}
    assert both.collectives == len([what for what, _ in done if what == "gather"])
