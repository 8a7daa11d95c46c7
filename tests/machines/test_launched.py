"""Tests ranks started by `mlx.launch`: their numbers, and that all agree or end."""

import pytest

from decoder import SpeculativeDecoder
from fake_model import FakeModel, random_table
from meeting import meet
from mlx_t5.drafting.source_copy import SourceCopy
from mlx_t5.errors import UserError
from mlx_t5.machines import launched
from mlx_t5.machines.launched import Disagreement, agreeing, to_compare
from mlx_t5.network.ranks import ALONE


def test_a_rank_is_read_from_the_launchers_variable():
    assert launched.rank_of({}) is None
    assert launched.rank_of({"MLX_RANK": "3"}) == 3
    with pytest.raises(UserError, match="MLX_RANK is 'x', which is no number"):
        launched.rank_of({"MLX_RANK": "x"})


def test_one_process_is_alone(monkeypatch, tmp_path):
    assert launched.join_ranks() is ALONE
    hosts = tmp_path / "hosts"
    hosts.write_text("\n")  # as left by `mlx.launch -n 1`
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    assert launched.join_ranks() is ALONE


def test_ranks_that_cannot_reach_each_other_say_so(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    monkeypatch.setattr(launched, "JOINING", 0.0)
    with pytest.raises(UserError, match="ranks cannot reach each other .*mlx.launch -n 2"):
        launched.join_ranks()


def test_ranks_that_agree_go_on():
    def work(ranks):
        with agreeing(ranks) as facts:
            facts["dtype"] = "float32"
        return ranks.rank

    assert meet(3, work) == [0, 1, 2]


@pytest.mark.parametrize("failing", [0, 2])
def test_one_ranks_error_ends_all_ranks_with_one_line(failing):
    def work(ranks):
        with agreeing(ranks):
            if ranks.rank == failing:
                raise FileNotFoundError("there is no such file")

    errors = meet(3, work)
    where = f"rank {failing}: " if failing else ""
    assert [str(error) for error in errors] == [f"{where}there is no such file"] * 3
    assert all(isinstance(error, Disagreement) for error in errors)


def test_a_setting_that_differs_between_ranks_is_named():
    def work(ranks):
        with agreeing(ranks) as facts:
            facts |= {"dtype": "float32", "adapter": "none" if ranks.rank < 2 else "another"}

    for error in meet(3, work):
        assert str(error).startswith("rank 2 has another adapter than rank 0; start all ranks with")


def test_a_single_process_raises_its_own_error():
    with pytest.raises(OSError, match="disk"), agreeing(ALONE):
        raise OSError("disk")


def test_a_rank_with_a_different_kind_of_draft_is_found():
    model = FakeModel(random_table(4), 1)
    model.dtype = "float32"
    decoders = [SpeculativeDecoder(model, drafter) for drafter in (None, SourceCopy())]
    facts, other_facts = (to_compare(decoder, {"seed": 0}) for decoder in decoders)
    assert {name for name in facts if facts[name] != other_facts[name]} == {"kind of draft"}
