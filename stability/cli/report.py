"""`stability report` and `stability dashboard`: the HTML pages of studies and probes.

`report` writes one page, once or for as long as the study runs, and publishes a study to W&B where
that is asked for; `dashboard` serves the pages of all studies in a folder to a browser.
"""

import contextlib
import errno
import secrets
import socket
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.output import FAILS, HOLDS, print_line
from stability.cli.show import holds_probe
from stability.records.manifest import ENDED
from stability.records.run_lock import is_held
from stability.tracking.environment import WandbMode, check_wandb

if TYPE_CHECKING:
    from stability.analysis.study_records import RecordedRun, RecordedStudy

__all__ = ["dashboard", "report"]

RELOAD_S = 5
"""How often a page that is watched reloads itself."""
QUIET_S = 30
"""For so long no process may train a study: between two runs it measures distances."""
SHARE = 10
"""Reading and writing may take one part in so many of the time: training needs the cores."""

LOOPBACK = "127.0.0.1"
PORT = 8765
ATTEMPTS = 50
"""How many ports from PORT on are tried."""


def report(
    folder: Path, open: bool = False, watch: bool = False, wandb: WandbMode | None = None
) -> int:
    """Write a study's report.html, or a probe's probe.html, anew from its records.

    Args:
        folder: the folder of a study, e.g. runs/quickstart, or of a probe
        open: open the page in the browser
        watch: write it whenever the records have grown, until the study has ended or Ctrl-C; while
            no process trains it, that is said
        wandb: publish to W&B what has ended of the study, offline or online, as `stability run`
            does: for runs that scripts have recorded themselves
    """
    is_probe = holds_probe(folder)
    if wandb and is_probe:
        raise ValueError(f"report: wandb is for a study, got the probe {str(folder)!r}")
    if watch and is_probe:
        raise ValueError(
            f"report: watch is for a study, got the probe {str(folder)!r}; "
            "`stability dashboard` follows a probe"
        )
    from stability.analysis.study_records import read_study  # heavy: numpy
    from stability.cli.workspace import publish_study
    from stability.report.page.html import write_page, write_probe_page  # heavy: plotly

    if wandb:
        check_wandb(wandb)
    study = None if is_probe else read_study(folder)
    reload_s = RELOAD_S if watch and study and _goes_on(study) else 0
    written = write_page(study, folder, reload_s=reload_s) if study else write_probe_page(folder)
    print_line(written)
    if open:
        webbrowser.open(written.resolve().as_uri())
    if study and reload_s:
        _follow(folder, study)
    if wandb:
        trouble = publish_study(read_study(folder), folder, wandb)
        print_line(trouble or f"{folder / 'wandb'} and each run's: W&B, {wandb}")
        return FAILS if trouble else HOLDS
    return HOLDS


def dashboard(
    runs: Path | None = None,
    port: int | None = None,
    open: bool = False,
    allow_host: str = "",
    no_token: bool = False,
) -> int:
    """Serve the reports of all studies in a folder to this machine's browsers, until Ctrl-C.

    The pages follow the records, also of studies that are being trained. The printed address holds
    a token, without which nothing is shown: it is new each time.

    Args:
        runs: the folder of the studies, runs if left out; or of one study
        port: where to listen on the loopback address; 8765 or the next free one if left out, any
            free one if 0
        open: open the list of studies in the browser
        allow_host: further names that a browser may call this server by, as at the far end of a
            tunnel, divided by commas; each a name, for any port, or name:port
        no_token: show the studies to everybody who can reach this machine's loopback address
    """
    folder = Path("runs") if runs is None else runs
    if not folder.is_dir():
        raise ValueError(
            f"dashboard: runs must be a folder, got {'the file ' if folder.exists() else ''}"
            f"{str(folder)!r}; `stability run` makes one, and `stability demo` a first study in it"
        )
    # as light as its arguments until they are known to be right
    names = [name for name in allow_host.split(",") if name]
    with _listen(port) as listening, ExitStack() as stack:
        from stability.report.live.guard import check_host  # heavy: starlette
        from stability.report.live.server import make_server  # heavy: uvicorn, plotly
        from stability.report.live.summary_store import default_folder

        allowed = [check_host(name) for name in names]
        bound: int = listening.getsockname()[1]
        token = "" if no_token else secrets.token_hex(24)
        address = f"http://{LOOPBACK}:{bound}/" + (f"?token={token}" if token else "")
        print_line(f"{address} shows the studies in {folder}; Ctrl-C ends it")
        if open:
            page = stack.enter_context(_page_that_opens(address)) if token else address
            # beside the server: a browser in the terminal returns only when it is closed
            threading.Thread(target=webbrowser.open, args=[page], daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server = make_server(
                folder, bound, token=token, allowed=allowed, store=default_folder()
            )
            server.run(sockets=[listening])
    return HOLDS


@contextlib.contextmanager
def _page_that_opens(address: str) -> Iterator[str]:
    """Give the address of a file, for this account alone, that leads a browser to `address`.

    Every account may read the command lines of the others, a browser's too.
    """
    with tempfile.TemporaryDirectory(prefix="stability-") as folder:
        page = Path(folder) / "dashboard.html"
        page.write_text(f'<meta http-equiv="refresh" content="0; url={address}">', "utf-8")
        yield page.as_uri()


def _follow(folder: Path, study: "RecordedStudy") -> None:
    """Write the page whenever the records have changed, and at last one that does not reload.

    Says once that no process trains the study, if so it is for QUIET_S; between two runs none does.
    """
    from stability.analysis.study_records import read_study  # heavy: numpy
    from stability.report.live.study_index import find_studies
    from stability.report.page.html import write_page  # heavy: plotly

    stamp, seconds = "", 0.0
    trained_at, is_said = time.monotonic(), False
    try:
        while _goes_on(study):
            time.sleep(max(RELOAD_S / 2, SHARE * seconds))
            start = time.monotonic()
            # a process that was killed changes no record
            newer = f"{next(iter(find_studies(folder).values())).stamp} {_is_trained(study)}"
            if newer != stamp:
                stamp, study = newer, read_study(folder, study)
                write_page(study, folder, reload_s=RELOAD_S)
            if _is_trained(study):
                trained_at, is_said = start, False
            elif start - trained_at >= QUIET_S and not is_said and _goes_on(study):
                _say_untrained(study, "still watching, Ctrl-C ends it")
                is_said = True
            seconds = time.monotonic() - start
        if _left(study) and not is_said:
            _say_untrained(study, "so the page follows it no more")
    except KeyboardInterrupt:
        pass
    finally:
        write_page(read_study(folder, study), folder)


def _left(study: "RecordedStudy") -> "list[RecordedRun]":
    """Return the runs that have not ended."""
    runs = [run for arm in study.arms for run in arm.runs.values()]
    return [run for run in runs if run.state not in ENDED]


def _is_trained(study: "RecordedStudy") -> bool:
    """Whether a process trains one of the runs now, whatever was so when they were read."""
    running = (run for run in _left(study) if run.manifest and run.manifest.state == "running")
    return any(is_held(run.paths) for run in running)


def _say_untrained(study: "RecordedStudy", then: str) -> None:
    count = len(_left(study))
    runs = "run is" if count == 1 else "runs are"
    print_line(
        f"no process trains this study: {count} {runs} left, which `stability run` goes on with; "
        f"{then}"
    )


def _goes_on(study: "RecordedStudy") -> bool:
    states = {run.state for arm in study.arms for run in arm.runs.values()}
    return bool(states & {"running", "missing"})


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
