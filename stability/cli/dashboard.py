"""`stability dashboard [RUNS]`: the pages of all studies in a folder, live, in a browser."""

import contextlib
import errno
import socket
import threading
import webbrowser
from pathlib import Path

from rich.console import Console

from stability.report.live.server import make_server

__all__ = ["dashboard"]

LOOPBACK = "127.0.0.1"
PORT = 8765
ATTEMPTS = 50


def dashboard(runs: Path | None = None, port: int | None = None, open: bool = False) -> int:
    """Serve the reports of all studies in a folder to this machine's browsers, until Ctrl-C.

    The pages follow the records, also of studies that are being trained.

    Args:
        runs: the folder of the studies, runs if left out; or of one study
        port: where to listen on the loopback address; 8765 or the next free one if left out, any
            free one if 0
        open: open the list of studies in the browser
    """
    folder = Path("runs") if runs is None else runs
    if not folder.is_dir():
        raise ValueError(
            f"dashboard: runs must be a folder, got {str(folder)!r}; `stability run` makes one"
        )
    with _listen(port) as listening:
        bound: int = listening.getsockname()[1]
        address = f"http://{LOOPBACK}:{bound}/"
        Console().print(
            f"{address} shows the studies in {folder}; Ctrl-C ends it",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
        if open:
            # beside the server: a browser in the terminal returns only when it is closed
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            make_server(folder, bound).run(sockets=[listening])
    return 0


def _listen(port: int | None) -> socket.socket:
    """Return a socket that listens; ValueError if the port that is asked for is taken."""
    if port is not None and not 0 <= port < 2**16:
        raise ValueError(f"dashboard: port must be 0 to 65535, got {port}; leave it out")
    wanted = range(PORT, PORT + ATTEMPTS) if port is None else [port]
    for each in wanted:
        try:
            return socket.create_server((LOOPBACK, each))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    asked = f"{PORT} to {PORT + ATTEMPTS - 1}" if port is None else str(port)
    raise ValueError(f"dashboard: port must be free, got {asked}; `--port 0` takes any free one")
