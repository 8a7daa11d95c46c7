"""Ranks that talk over the loopback, without a model: who comes, who is lost, who is refused."""

import socket
import threading
import time
from argparse import Namespace
from contextlib import contextmanager, suppress

import pytest

from mlx_t5.cli.resume import Kept
from mlx_t5.cli.work import Leading
from mlx_t5.errors import UserError
from mlx_t5.machines.block_links import BlockClient, BlockServer, Lost
from mlx_t5.machines.blocks import HELD, Blocks, Share, lead
from mlx_t5.machines.launched import Rank
from mlx_t5.machines.link import Connection
from mlx_t5.machines.messages import Codec

PATIENCE = 1.0
WORDS = Codec(lambda text: text, lambda text: str(text))
JOB = {"target model": "one", "set of options": "two"}


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return "127.0.0.1", port


def upper(prompts, indexes, ready):
    for prompt in prompts:
        time.sleep(0.005)
        yield prompt.upper()


class Job:
    """Rank 0 with a file of so many lines; what it tells is kept."""

    def __init__(self, address, lines: int = 40, size: int = 1) -> None:
        self.told: list[str] = []
        self.rank = Rank(0, size, (address,), b"secret")
        self.server = BlockServer(self.rank, self.told.append, True, PATIENCE)
        self.blocks = Blocks((f"line {i}" for i in range(lines)), 2)
        self.wanted = [f"LINE {i}" for i in range(lines)]

    def share(self) -> None:
        self.server.share(self.blocks, JOB, WORDS)

    def done(self) -> list[str]:
        """Everything, rank 0 doing its part."""
        return [text for block in lead(self.blocks, upper, 1, "0") for text in block.outcomes]


@pytest.fixture
def job(address):
    made = Job(address)
    with made.server:
        yield made


def follow(rank: Rank) -> None:
    with BlockClient(rank, JOB, PATIENCE) as rank_0:
        for block, outcomes in Share(rank_0.take).outcomes(upper):
            rank_0.deliver(block, outcomes)


@contextmanager
def started(job: Job, number: int = 1):
    rank = Rank(number, 2, job.rank.addresses, job.rank.key)
    thread = threading.Thread(target=follow, args=[rank], daemon=True)
    thread.start()
    yield thread
    job.server.__exit__(None)
    thread.join(5)
    assert not thread.is_alive(), "it does not end with the job"


def wait_for(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def a_stranger(job: Job, key: bytes = b"secret"):
    """A connection that has proved to know a key."""
    with Connection(socket.create_connection(job.rank.addresses[0])) as connection:
        connection.prove(key, False, 5)
        yield connection


def test_several_ranks_do_the_lines_of_one_in_order(job):
    job.share()
    with started(job), started(job, 2):
        wait_for(lambda: len(job.told) == 2)
        assert job.done() == job.wanted
    assert sorted(job.told) == ["rank 1 joins", "rank 2 joins"]
    assert sum(job.blocks.prompts.values()) == 40 and len(job.blocks.prompts) == 3


def test_a_rank_that_says_nothing_any_more_is_lost(job):
    job.share()
    with a_stranger(job) as silent:
        silent.send({"rank": 1, "job": JOB})
        assert silent.receive() == {"welcome": True}
        assert silent.receive()["items"] == ["line 0", "line 1"]
        began = time.monotonic()
        assert job.done() == job.wanted
        assert PATIENCE / 2 < time.monotonic() - began < 5 * PATIENCE
    assert job.told[1].startswith("rank 1 is lost (silent for 1 s); the others do")


@pytest.mark.parametrize(
    "sent",
    [
        b"no JSON",
        b"[]",
        b'{"done": 0, "outcomes": ["one of two"]}',
        b'{"done": 0}',
        b'{"done": [], "outcomes": []}',
        b'{"done": 0, "outcomes": 1}',
        b'{"more": 1}',
        b"[" * 100_000,
        None,
    ],
)
def test_what_is_no_answer_loses_the_rank_and_not_the_lines(job, sent):
    job.share()
    with a_stranger(job) as stranger:
        stranger.send({"rank": 1, "job": JOB})
        stranger.receive(), stranger.receive()
        if sent is None:
            stranger.close()
        else:
            stranger.send_bytes(sent)
        wait_for(lambda: len(job.told) == 2)
        assert job.told[1].startswith("rank 1 is lost (")
        assert job.done() == job.wanted


def test_blocks_that_a_rank_never_took_and_second_deliveries_are_ignored(job):
    job.share()
    with a_stranger(job) as stranger:
        stranger.send({"rank": 1, "job": JOB})
        for _ in range(1 + HELD):
            stranger.receive()
        for number, outcomes in ((9, ["?"]), (-1, []), (0, ["A", "B"]), (0, ["C", "D"]), (0, [])):
            stranger.send({"done": number, "outcomes": outcomes})
        stranger.send({"leaves": True})
        with pytest.raises(OSError):
            while True:
                stranger.receive()
    assert job.done() == ["A", "B", *job.wanted[2:]]
    assert job.told == ["rank 1 joins"]


def test_who_does_not_know_the_key_or_has_another_job_is_refused(job):
    job.share()
    addresses = job.rank.addresses
    with pytest.raises(UserError, match="another T5_PARALLEL_KEY"):
        BlockClient(Rank(1, 2, addresses, b"guess"), JOB, PATIENCE)
    with pytest.raises(UserError, match="rank 1 has another target model than rank 0"):
        BlockClient(Rank(1, 2, addresses, b"secret"), {**JOB, "target model": "3"}, PATIENCE)
    with socket.create_connection(addresses[0]), a_stranger(job) as mute, started(job):
        mute.send({"rank": "1", "job": JOB})
        wait_for(lambda: job.told == ["rank 1 joins"])
        assert job.done() == job.wanted


def test_a_rank_may_come_before_rank_0_has_loaded_its_model(job):
    with started(job):
        time.sleep(0.2)
        job.share()
        assert job.done() == job.wanted


def test_without_rank_0_a_rank_ends_within_bounded_time(address):
    listening = socket.create_server(address)
    failed: list[Exception] = []

    def run() -> None:
        try:
            follow(Rank(1, 2, (address,), b""))
        except UserError as error:
            failed.append(error)

    for silent in (False, True):
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        with Connection(listening.accept()[0]) as rank_0:
            rank_0.prove(b"", True, 5)
            rank_0.receive()
            rank_0.send({"welcome": True})
            rank_0.send({"block": 0, "first": 0, "items": ["a"]})
            assert rank_0.receive()["outcomes"] == ["A"]
            if silent:
                thread.join(5 * PATIENCE)
        thread.join(5)
        assert not thread.is_alive()
    listening.close()
    assert [type(error) for error in failed] == [Lost, Lost]
    assert "silent for 1 s" in str(failed[1]) and "--resume" in str(failed[0])


def test_a_rank_that_is_let_go_at_work_ends(job):
    """As where rank 0 cannot write on."""
    job.share()
    with BlockClient(Rank(1, 2, job.rank.addresses, b"secret"), JOB, PATIENCE) as rank_0:
        block = rank_0.take(True)
        job.server.__exit__(OSError)
        while rank_0.take(False):
            pass
        wait_for(lambda: rank_0._ended)
        rank_0.deliver(block, ["A", "B"])
        waiting = threading.Thread(target=rank_0.take, args=[True], daemon=True)
        waiting.start()
        waiting.join(5)
        assert not waiting.is_alive()


def test_ranks_that_come_to_a_job_that_is_done_end_with_it(address):
    rank, told, ended = Rank(0, 2, (address,), b"secret"), [], threading.Event()
    args = Namespace(verbose=True, score=False, embed=False)

    def come() -> None:
        follow(Rank(1, 2, (address,), b"secret"))
        ended.set()  # unlike where it fails

    with Leading(["a", "b"], Kept(2, 4), args, rank, told.append) as leading:
        assert leading.done
        threading.Thread(target=come, daemon=True).start()
    assert ended.wait(5) and told == ["rank 1 joins"]


def test_an_address_that_is_taken_is_told(job):
    with pytest.raises(UserError, match="rank 0 cannot listen at 127.0.0.1:.*--starting-port"):
        BlockServer(job.rank, print)
    with suppress(OSError), pytest.raises(UserError, match="cannot listen"):
        BlockServer(Rank(0, 2, (("192.0.2.1", 1),)), print)
