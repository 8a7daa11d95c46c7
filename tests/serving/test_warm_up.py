"""What was decoded before the first client comes."""

import pytest

from decoder import SpeculativeDecoder
from fake_model import FakeModel, drafter, good
from fake_serving import ENDLESS, FLAT, V
from mlx_t5.drafting.costs import longest
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.serving.warm_up import warm_up
from mlx_t5.settings import AUTO


def widths(model):
    """Positions of all passes so far."""
    return {len(tokens[0]) for _, tokens in model.calls}


@pytest.mark.parametrize("num_draft", [1, 5, AUTO])
@pytest.mark.parametrize("copies", [False, True])
def test_passes_of_every_width_that_there_will_be(num_draft, copies):
    model = FakeModel(ENDLESS, V)
    draft = SourceCopy() if copies else drafter(good(model.table), model)
    warm_up(SpeculativeDecoder(model, draft, num_draft=num_draft, costs=FLAT), 2)
    most = longest() if num_draft == AUTO else num_draft
    assert widths(model) == set(range(1, most + 2))


def test_without_proposals_there_is_one_width():
    model = FakeModel(ENDLESS, V)
    warm_up(SpeculativeDecoder(model, costs=FLAT), 2)
    assert widths(model) == {1}
