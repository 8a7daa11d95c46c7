"""Reading in a thread: what is there, what is not yet there, and the end."""

import threading
import time

import pytest

from mlx_t5.cli.input import ReadAhead


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_items_are_taken_in_order():
    assert list(ReadAhead(range(1000))) == list(range(1000))


def test_what_is_not_there_yet_is_not_ready():
    more = threading.Event()

    def items():
        yield 1
        more.wait(60)
        yield 2

    reader = ReadAhead(items())
    wait_until(reader.ready)
    assert next(reader) == 1
    assert not reader.ready()
    more.set()
    assert next(reader) == 2


def test_a_bounded_number_is_read_ahead():
    drawn = []

    def endless():
        while True:
            drawn.append(len(drawn))
            yield drawn[-1]

    reader = ReadAhead(endless(), ahead=3)
    wait_until(lambda: len(drawn) == 4)  # one is in the reader's hand
    assert [next(reader) for _ in range(10)] == list(range(10))
    wait_until(lambda: len(drawn) == 14)
    time.sleep(0.01)
    assert len(drawn) == 14


def test_an_exception_stands_in_the_place_of_the_item_it_prevented():
    def failing():
        yield 1
        raise OSError("gone")

    reader = ReadAhead(failing())
    assert next(reader) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            next(reader)
