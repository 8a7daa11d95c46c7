"""Rows for batches of fake models, and an engine that records attempts to join."""

from decoder import Engine
from mlx_t5.engine.rows import Row
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings


def rows(lengths, **settings):
    return [
        Row([2 + i % 5] * n, Settings(**settings), row_key(0, i)) for i, n in enumerate(lengths)
    ]


def different(lengths, **settings):
    """Returns rows that all differ, so that each has to be encoded."""
    many = rows(lengths, **settings)
    for i, row in enumerate(many):
        row.ids[0] = 2 + i
    return many


class Tried(Engine):
    """An engine that records which rows tried to join at which step."""

    steps = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.attempts = []

    def insert(self, rows, ahead=()):
        self.attempts.append((self.steps, [len(row.ids) for row in rows]))
        super().insert(rows, ahead)

    def step(self):
        self.steps += 1
        super().step()
