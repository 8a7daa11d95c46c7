"""Which rank this process is, as `mlx.launch` says."""

import pytest

from mlx_t5.errors import UserError
from mlx_t5.machines import launched
from mlx_t5.network.ranks import ALONE


def test_the_launcher_names_a_rank():
    assert launched.rank_of({}) is None
    assert launched.rank_of({"MLX_RANK": "3"}) == 3
    with pytest.raises(UserError, match="MLX_RANK is 'x', which is no number"):
        launched.rank_of({"MLX_RANK": "x"})


def test_one_process_is_alone(monkeypatch, tmp_path):
    assert launched.join() is ALONE
    hosts = tmp_path / "hosts"
    hosts.write_text("\n")  # what `mlx.launch -n 1` leaves there
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    assert launched.join() is ALONE


def test_ranks_that_cannot_reach_each_other_say_so(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    monkeypatch.setattr(launched, "JOINING", 0.0)
    with pytest.raises(UserError, match="ranks cannot reach each other .*mlx.launch -n 2"):
        launched.join()
