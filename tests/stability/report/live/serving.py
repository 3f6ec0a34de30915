"""A server of studies on a real port, and a client that sends targets as they stand."""

import http.client
import socket
import threading
import time
from contextlib import contextmanager

from stability.report.live.server import make_server

TOKEN = "0123456789abcdef" * 3


HOSTILE = "<script>alert(1)</script>\"'&🦊../../etc/passwd"


class Client:
    """Sends a request target as it stands: nothing is normalised."""

    def __init__(self, port, server):
        self.port = port
        self.server = server
        self.host = f"127.0.0.1:{port}"

    def ask(self, target, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        sent = {"Host": self.host, "Cookie": f"stability-{self.port}={TOKEN}"}
        sent |= {name.replace("_", "-"): v for name, v in headers.items()}
        for name, value in sent.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer, text

    def page(self, target):
        answer, text = self.ask(target)
        assert answer.status == 200, text
        return text


@contextmanager
def serving(runs, **options):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = make_server(runs, port, **({"token": TOKEN} | options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield Client(port, server)
        server.should_exit = True
        thread.join()


def eventually(ask, is_right):
    """The first right answer of something that works in the background."""
    end = time.monotonic() + 60
    while not is_right(answer := ask()):
        assert time.monotonic() < end, answer
        time.sleep(0.05)
    return answer


def settled(client):
    """The list of studies once all have been read."""
    return eventually(lambda: client.page("/"), lambda page: "being read" not in page)
