"""Tests sizes.py: every unit, and the sizes at which units change."""

import pytest

from mlx_t5.sizes import readable


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.0 MB"),
        (12_600_000, "12.6 MB"),
        (99_900_000, "99.9 MB"),
        (100_000_000, "0.10 GB"),
        (22_614_642_688, "22.61 GB"),
    ],
)
def test_bytes_are_written_with_units(size, text):
    assert readable(size) == text
