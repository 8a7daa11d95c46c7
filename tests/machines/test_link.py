"""Messages between ranks: whole, in order, and an end where a peer is gone or silent."""

import queue
import socket
import threading
import time

import pytest

from mlx_t5.machines import link, team

SECONDS = 10  # for what takes a moment


@pytest.fixture
def pair():
    """Two sockets that are connected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    yield left, right
    left.close()
    right.close()


def watched(peer: socket.socket, silence: float = link.SILENCE):
    """A connection, what it is told, and whether its peer is lost."""
    messages, lost = queue.Queue(), threading.Event()
    return link.Connection(peer, messages.put, lost.set, silence), messages, lost


def test_messages_come_whole_and_in_order(pair):
    left, _, _ = watched(pair[0])
    _, messages, lost = watched(pair[1])
    sent = [["decode", 0, [1, 5], list(range(40_000))], ["drop", []]] * 3
    for message in sent:
        left.send(message)
    assert [messages.get(timeout=SECONDS) for _ in sent] == sent
    assert not lost.is_set()


def test_a_peer_that_goes_is_lost_at_once(pair):
    _, _, lost = watched(pair[0])
    pair[1].close()
    assert lost.wait(SECONDS)


def test_a_peer_that_says_nothing_is_lost_and_one_that_beats_is_not(pair, monkeypatch):
    monkeypatch.setattr(link, "BEAT", 0.05)
    _, _, lost = watched(pair[0], silence=0.4)
    beating = time.monotonic() + 0.8
    while time.monotonic() < beating:
        pair[1].sendall(bytes(4))
        time.sleep(0.02)
    assert not lost.is_set()
    assert lost.wait(SECONDS)


def test_whoever_does_not_know_the_token_is_turned_away():
    token = bytes(range(link.TOKEN))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = link.connect(listener.getsockname(), token[::-1], 1)
        liar = link.connect(listener.getsockname(), token, 3)
        friends = [link.connect(listener.getsockname(), token, rank) for rank in (2, 1)]
        peers = link.accept(listener, token, 3)
        names = {rank: peer.getpeername() for rank, peer in peers.items()}
        assert names == {2: friends[0].getsockname(), 1: friends[1].getsockname()}
        assert stranger.recv(1) == liar.recv(1) == b""
    for each in (stranger, liar, *friends, *peers.values()):
        each.close()


def test_plain_runs_and_a_launch_of_one_have_no_team(tmp_path):
    (tmp_path / "hosts").write_text("\n")  # as mlx.launch -n 1 writes it
    assert team.join({}) is None
    assert team.join({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts")}) is None
