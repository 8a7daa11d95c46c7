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
    """A connection, what it is told, and why its peer is lost."""
    messages, lost = queue.Queue(), queue.Queue()
    connection = link.Connection(peer, silence)
    connection.listen(messages.put, lost.put)
    return connection, messages, lost


def test_messages_come_whole_and_in_order(pair):
    left, _, _ = watched(pair[0])
    _, messages, lost = watched(pair[1])
    sent = [["decode", 0, [1, 5], list(range(40_000))], ["drop", []]] * 3
    for message in sent:
        left.send(message)
    assert [messages.get(timeout=SECONDS) for _ in sent] == sent
    assert lost.empty()


def test_both_ends_may_send_more_than_the_buffers_hold(pair):
    ends = [watched(peer, silence=3) for peer in pair]
    large = "x" * (1 << 24)  # sent while heartbeats are due
    senders = [threading.Thread(target=end.send, args=[large]) for end, _, _ in ends for _ in "123"]
    for sender in senders:
        sender.start()
    for _, messages, lost in ends:
        assert [messages.get(timeout=SECONDS) == large for _ in "123"] == [True] * 3
        assert lost.empty()
    for sender in senders:
        sender.join(SECONDS)


def test_a_peer_that_goes_is_lost_at_once(pair):
    _, _, lost = watched(pair[0])
    pair[1].close()
    assert lost.get(timeout=SECONDS) == "it closed the connection"


def test_a_peer_that_says_nothing_is_lost_and_one_that_beats_is_not(pair):
    _, _, lost = watched(pair[0], silence=0.4)
    beating = time.monotonic() + 0.8
    while time.monotonic() < beating:
        pair[1].sendall(bytes(4))
        time.sleep(0.02)
    assert lost.empty()
    assert lost.get(timeout=SECONDS).startswith("silent for ")


def test_a_peer_that_takes_nothing_is_lost_and_gets_no_second_half(pair):
    connection = link.Connection(pair[0], silence=0.2)
    connection.send("x" * (1 << 24))
    with pytest.raises(OSError):
        connection.send_bytes(b"more")
    with pytest.raises(ConnectionError):
        connection.receive()


@pytest.mark.parametrize(
    "sent, reason",
    [
        (b"\xff" * 4, "a message of 4294967295 bytes"),
        (b"\0\0\0\1{", "Expecting"),
        (b"\0\1\x86\xa0" + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_message_ends_the_connection(pair, sent, reason):
    _, messages, lost = watched(pair[0])
    pair[1].sendall(sent)
    assert lost.get(timeout=SECONDS).startswith(reason)
    assert pair[1].recv(1) == b"" and messages.empty()


def test_strangers_are_turned_away_and_nobody_waits_for_them(monkeypatch):
    monkeypatch.setattr(link, "PROVING", 0.3)
    monkeypatch.setattr(link, "STRANGERS", 8)
    key = bytes(range(16))
    sock = link.listening(("127.0.0.1", 0))
    mute = [socket.create_connection(sock.getsockname()) for _ in range(20)]
    mute[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    mute[1].sendall(b"\xff" * 4)
    joined = []

    def join(name) -> None:
        try:
            joined.append(link.join(sock.getsockname(), key, name))
        except link.BROKEN:  # it is none of the ranks
            pass

    names = [2, 3, 0, "1", None, 1]
    threads = [threading.Thread(target=join, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    peers = link.gather(sock, key, 3)
    assert sorted(peers) == [1, 2]
    for rank, peer in peers.items():
        peer.send(rank)
    for thread in threads:
        thread.join(SECONDS)
    heard = []
    for each in joined:
        try:
            heard.append(each.receive(SECONDS))
        except OSError:
            pass
    assert sorted(heard) == [1, 2]
    for each in (*mute, *joined, *peers.values()):
        each.close()


def test_both_ends_prove_the_key(pair):
    ends = [link.Connection(peer) for peer in pair]
    failed = []

    def prove() -> None:
        try:
            ends[0].prove(b"key", True, SECONDS)
        except link.BROKEN as error:
            failed.append(error)

    thread = threading.Thread(target=prove)
    thread.start()
    with pytest.raises(link.AuthenticationError):
        ends[1].prove(b"another", False, SECONDS)
    thread.join(SECONDS)
    assert isinstance(failed[0], link.AuthenticationError)


def test_plain_runs_and_a_launch_of_one_have_no_team(tmp_path):
    (tmp_path / "hosts").write_text("\n")  # as mlx.launch -n 1 writes it
    assert team.join({}) is None
    assert team.join({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts")}) is None
