"""How many kernels a step launches around the passes of its models: drafting, verifying, accepting.

Metal and CUDA launch one for each operation that computes, and a concatenation one for each array
that it joins. Views, slices and the like only look at memory in another way, and what is made from
Python's numbers is there already. A CPU runs the same operations.
"""

import re
from collections import Counter

import pytest

from decoder import SpeculativeDecoder
from mlx_t5.backend import mx
from mlx_t5.engine.rows import Row
from mlx_t5.sampling.draws import row_key
from mlx_t5.settings import Settings
from random_models import V, random_t5

FREE = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "View"}
PASS = "Gather"  # stands for a pass of a model, and computes nothing else here


def kernels(graph: str) -> Counter:
    """Kernels by operation, of a graph as MLX writes it down."""
    inputs = Counter(re.findall(r"-> (\d+)", graph))
    counts = Counter()
    for node, name in re.findall(r'(\d+) \[label ="(\w+)', graph):
        if name not in FREE:
            counts[name] += inputs[node] if name == "Concatenate" else 1
    return counts


@pytest.fixture
def step(monkeypatch, tmp_path, unchecked_indices):
    """Kernels of a step of rows with these settings, without those within the passes."""
    target, draft = random_t5(), random_t5(noise=0.1)
    table = mx.random.normal((V, V), key=mx.random.key(0))
    for model in (target, draft):
        monkeypatch.setattr(model, "decode", lambda tokens, *_, **__: table[tokens])

    def count(drafts: int, rows: int = 1, ragged: bool = False, **settings) -> Counter:
        decoder = SpeculativeDecoder(target, draft if drafts else None)
        engine = decoder.engine(Settings())
        engine.early = None  # that is a pass of its own
        own = Settings(40, num_draft=drafts, **settings)
        engine.insert([Row([5, 6, 1], own, row_key(0, i)) for i in range(rows)])
        engine.step()
        if ragged:
            engine.rows[0].committed.append(7)
        accept, graph = engine._accept, tmp_path / "step"

        def watched(*args):
            outcome = accept(*args)
            mx.export_to_dot(str(graph), outcome)
            return outcome

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_accept", watched)
            patch.setattr(mx, "async_eval", lambda *_: None)  # what has begun is no longer there
            engine.step()
        counts = kernels(graph.read_text())
        assert counts.pop(PASS) == drafts + 1
        return counts

    return count


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafts", [0, 2, 4])
def test_a_step(step, drafts, rows):
    counts = step(drafts, rows)
    assert counts["ArgReduce"] == drafts + 1, "the draft's choices, and the target's"
    joined = drafts + 2 if drafts else 0  # x, and what is verified
    assert counts["Concatenate"] == joined + 2, "and the outcome"
    others = counts.total() - counts["ArgReduce"] - counts["Concatenate"]
    # Three for finite logits and a choice by them, and four for what is kept.
    assert others == (8 if drafts else 4), counts


def test_rows_that_lack_different_numbers_of_tokens_take_one_kernel_more(step):
    """A draft's logits after them stand at different places."""
    equal, ragged = step(2, 2), step(2, 2, ragged=True)
    assert ragged - equal == Counter(GatherAxis=1) and not equal - ragged


def test_more_is_worked_out_only_where_some_row_asks_for_it(step):
    assert step(4, delta=0.3).total() > 2 * step(4).total()
