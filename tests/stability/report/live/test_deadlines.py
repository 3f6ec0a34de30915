"""A client that is slow, silent or does not read holds nothing for long."""

import contextlib
import socket
import time

import pytest

from stability.report.live import deadlines
from tests.stability.report.live.serving import TOKEN


def _hung_up_after(port, first, more=b""):
    """Send `first`, then `more` again and again; the seconds until the server hangs up."""
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(first)
        try:
            while time.monotonic() - start < 20:
                connection.settimeout(0.05)
                try:
                    if not connection.recv(2**16):
                        break
                except TimeoutError:
                    connection.sendall(more)
        except OSError:
            pass
        return time.monotonic() - start


HEAD = "GET /{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"


@pytest.mark.parametrize(
    ("head", "more"),
    [
        ("", ""),
        ("GET / HT", ""),
        (HEAD, "X-Slow: 1\r\n"),
        (HEAD + "Content-Length: 1000000\r\n\r\n", "x"),
        (HEAD + "\r\n", "G"),
    ],
    ids=["silence", "half-a-line", "dripping-head", "dripping-body", "dripping-second-head"],
)
def test_slow_client_is_hung_up_on(client, monkeypatch, head, more):
    monkeypatch.setattr(deadlines, "REQUEST_S", 0.3)
    first = head.format(path="", port=client.port).encode()
    assert _hung_up_after(client.port, first, more.encode()) < 5
    assert client.ask("/stamp")[0].status == 200


def test_client_that_does_not_read_is_hung_up_on(client, monkeypatch):
    monkeypatch.setattr(deadlines, "SENDING_S", 0.3)
    asked = HEAD.format(path="assets/plotly.js", port=client.port)
    asked += f"Cookie: stability-{client.port}={TOKEN}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", client.port))
        connection.sendall(asked.encode() * 3)
        time.sleep(1.5)
        got = 0
        connection.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(2**20):
                got += len(part)
    assert got < 3 * len(client.page("/assets/plotly.js"))


def test_many_silent_clients_keep_no_answer_from_others(client):
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
            silent.sendall(b"GET / HTTP/1.1\r\n")
        assert client.ask("/stamp")[0].status == 200
