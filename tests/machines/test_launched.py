"""Which rank a process is, by the environment that `mlx.launch` makes."""

import json

import pytest

from mlx_t5.errors import UserError
from mlx_t5.machines.launched import rank_of


def written(tmp_path, value) -> str:
    path = tmp_path / "hosts"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_a_rank_of_a_ring(tmp_path):
    hosts = [["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5000"], ["[::1]:5000"]]
    ring = {"MLX_RANK": "1", "MLX_HOSTFILE": written(tmp_path, hosts), "T5_PARALLEL_KEY": "é"}
    rank = rank_of(ring)
    assert (rank.number, rank.size, rank.leads) == (1, 3, False)
    assert rank.addresses == (("10.0.0.1", 5000), ("10.0.1.1", 5001))
    assert rank.key == "é".encode()


def test_a_single_rank(tmp_path):
    for text in ("", "\n"):
        rank = rank_of({"MLX_RANK": "0", "MLX_HOSTFILE": written(tmp_path, text)})
        assert (rank.number, rank.size, rank.addresses, rank.leads) == (0, 1, (), True)


def test_ranks_of_other_backends(tmp_path):
    devices = written(tmp_path, [[None, "rdma_en5"], ["rdma_en5", None]])
    jaccl = {"MLX_JACCL_COORDINATOR": "10.0.0.1:32323", "MLX_IBV_DEVICES": devices}
    rank = rank_of({"MLX_RANK": "1", **jaccl})
    assert (rank.number, rank.size, rank.addresses) == (1, 2, (("10.0.0.1", 32323),))
    nccl = {"NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "12345", "MLX_WORLD_SIZE": "4"}
    rank = rank_of({"MLX_RANK": "3", **nccl})
    assert (rank.size, rank.addresses) == (4, (("10.0.0.1", 12345),))


@pytest.mark.parametrize(
    "environment, told",
    [
        ({}, "start it with: mlx.launch"),
        ({"MLX_RANK": "0"}, "lists no ranks"),
        ({"MLX_RANK": "-1"}, "MLX_RANK is '-1'"),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "{}"}, "lists no ranks"),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "[[1]]"}, "'1' is no address"),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": '[["a:b"]]'}, "port of rank 0 is 'b'"),
        ({"MLX_RANK": "0", "NCCL_HOST_IP": "a", "NCCL_PORT": "1"}, "MLX_WORLD_SIZE"),
    ],
)
def test_an_environment_that_says_nothing_is_refused(tmp_path, environment, told):
    if "MLX_HOSTFILE" in environment:
        environment["MLX_HOSTFILE"] = written(tmp_path, environment["MLX_HOSTFILE"])
    with pytest.raises(UserError, match=told):
        rank_of(environment)
