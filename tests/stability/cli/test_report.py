"""`stability report` writes a page once or again and again; `dashboard` serves all pages."""

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path

import pytest

from stability.cli import report as module
from stability.cli.main import main
from stability.cli.report import report
from stability.records.manifest import read_manifest
from stability.records.run_lock import hold
from stability.report.live import server
from stability.report.live.summary_store import default_folder
from tests.stability.report.synthetic import (
    ARMS,
    STEPS,
    write_run,
    write_study_json,
    write_synthetic,
)
from tests.stability.report.synthetic_probe import write_probe

ROOT = Path(__file__).parents[3]


def test_report_is_opened_from_disk(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    folder = write_synthetic(tmp_path / "study", seeds=[0])
    assert report(folder, open=True) == 0
    assert opened == [(folder / "report.html").as_uri()]


def test_watched_page_follows_the_records_and_rests_once_the_study_has_ended(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    write_study_json(folder, seeds=[0])
    write_run(folder, ARMS[0], 0, state="running", until=40)
    pages, waiting = [], list(ARMS)

    def train_on(_seconds):
        pages.append((folder / "report.html").read_text())
        paths = write_run(folder, waiting.pop(0), 0)
        assert read_manifest(paths.manifest).step == STEPS

    # the first run's log is written from the start again, not on
    (folder / "baseline" / "seed-0" / "metrics.jsonl").unlink()
    monkeypatch.setattr(module.time, "sleep", train_on)
    assert report(folder, watch=True) == 0
    assert waiting == []
    assert all('data-reload="5"' in page for page in pages)
    assert pages[1] != pages[2]
    assert "data-reload=" not in (folder / "report.html").read_text().split("<script")[0]


def _watched(folder, monkeypatch, capsys, looks, quiet_s=0):
    """Watch a study, call `looks` one after another instead of sleeping; return what is said."""

    def look(_seconds):
        if not waiting:
            raise KeyboardInterrupt
        waiting.pop(0)()

    waiting = list(looks)
    monkeypatch.setattr(module, "QUIET_S", quiet_s)
    monkeypatch.setattr(module.time, "sleep", look)
    assert report(folder, watch=True) == 0
    return capsys.readouterr().out.splitlines()[1:], waiting


def test_a_watched_study_whose_process_was_killed_is_said_to_have_none(
    tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "study"
    write_study_json(folder, seeds=[0])
    paths = write_run(folder, ARMS[0], 0, state="running", until=40)
    with hold(paths):
        said, _ = _watched(folder, monkeypatch, capsys, [lambda: None] * 3)
    assert said == [], "it is held"
    said, _ = _watched(folder, monkeypatch, capsys, [lambda: None] * 3)
    assert said == [
        f"no process trains this study: {len(ARMS)} runs are left, which `stability run` goes on "
        "with; still watching, Ctrl-C ends it"
    ], "once, however often it looks"
    said, _ = _watched(folder, monkeypatch, capsys, [lambda: None] * 3, quiet_s=60)
    assert said == [], "another run may start in a moment"


def test_watching_ends_with_the_process_where_no_run_waits_for_another(
    tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "study"
    write_study_json(folder, seeds=[0])
    for arm in ARMS[1:]:
        write_run(folder, arm, 0)
    lock = hold(write_run(folder, ARMS[0], 0, state="running", until=40))
    lock.__enter__()
    looks = [lambda: None, lambda: lock.__exit__(None, None, None), *[lambda: None] * 5]
    said, unused = _watched(folder, monkeypatch, capsys, looks, quiet_s=60)
    assert len(unused) == 5, "it ends when the lock is free"
    assert said == [
        "no process trains this study: 1 run is left, which `stability run` goes on with; so the "
        "page follows it no more"
    ]


def test_interrupted_watch_leaves_a_page_that_does_not_reload(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    write_study_json(folder, seeds=[0])

    def interrupt(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.time, "sleep", interrupt)
    assert report(folder, watch=True) == 0
    assert "data-reload=" not in (folder / "report.html").read_text().split("<script")[0]


def test_watching_a_probe_is_refused(tmp_path):
    with pytest.raises(ValueError, match="watch is for a study, got the probe"):
        report(write_probe(tmp_path), watch=True)


@pytest.fixture
def served(monkeypatch):
    """The addresses of the sockets that a server would have been run on, and its options."""

    class Ran(list):
        options = None

    ran = Ran()

    class Server:
        def run(self, sockets):
            ran.extend(each.getsockname() for each in sockets)
            raise KeyboardInterrupt

    def make_server(folder, port, **options):
        ran.options = options
        return Server()

    monkeypatch.setattr(server, "make_server", make_server)
    return ran


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.slow
def test_ctrl_c_ends_it_with_exit_code_0_and_no_word(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "stability.cli.main", "dashboard", str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", "HOME": str(tmp_path)},
    )
    try:
        line = process.stdout.readline()
        address = line.split()[0]
        assert line == f"{address} shows the studies in {tmp_path}; Ctrl-C ends it\n"
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        clean = address.partition("?")[0]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            browser.open(clean, timeout=60)
        with browser.open(address, timeout=60) as answer:
            assert b'url=/"' in answer.read()
        with browser.open(clean, timeout=60) as answer:
            assert b"There is no study here yet" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_it_listens_on_the_loopback_address_alone(served, tmp_path, capsys):
    assert main(["dashboard", str(tmp_path), "--port", "0"]) == 0
    ((host, port),) = served
    assert host == "127.0.0.1"
    (address, token) = re.fullmatch(
        r"(http://127.0.0.1:\d+/\?token=([0-9a-f]{48})) shows .*\n", capsys.readouterr().out
    ).groups()
    assert address.startswith(f"http://127.0.0.1:{port}/?")
    assert served.options == {"token": token, "allowed": [], "store": default_folder()}


def test_token_is_another_one_each_time_and_left_out_only_if_asked(served, tmp_path, capsys):
    tokens = set()
    for _ in range(2):
        main(["dashboard", str(tmp_path), "--port", "0"])
        tokens.add(served.options["token"])
    assert len(tokens - {""}) == 2
    capsys.readouterr()
    main(["dashboard", str(tmp_path), "--port", "0", "--no-token"])
    assert served.options["token"] == ""
    assert f"http://127.0.0.1:{served[-1][1]}/ shows" in capsys.readouterr().out


def test_hosts_are_allowed_by_name(served, tmp_path):
    main(["dashboard", str(tmp_path), "--port", "0", "--allow-host", "Dash.example,localhost:9000"])
    assert served.options["allowed"] == ["dash.example", "localhost:9000"]


def test_port_that_nobody_asked_for_gives_way(served, taken, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PORT", taken)
    assert main(["dashboard", str(tmp_path)]) == 0
    assert taken < served[0][1] < taken + module.ATTEMPTS


def test_port_that_was_asked_for_does_not(served, taken, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["dashboard", str(tmp_path), "--port", str(taken)])
    assert stop.value.code == 2
    assert f"port must be free, got {taken}; `--port 0`" in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "runs must be a folder, got 'nowhere'; `stability run` makes one"),
        ([], "runs must be a folder, got 'runs'"),
        ([".", "--port", "70000"], "port must be 0 to 65535, got 70000"),
        ([".", "--port", "-1"], "port must be 0 to 65535, got -1"),
        ([".", "--port", "many"], "port"),
        ([".", "--port", "0", "--allow-host", "*"], "allow_host must be a name or name:port"),
    ],
)
def test_bad_input_is_one_line(served, tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["dashboard", *words])
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert expected in line
    assert line.count("\n") == 1
    assert served == []


def test_open_shows_the_address_in_a_browser(served, tmp_path, monkeypatch):
    opened = []

    def open_in_browser(address):
        if address.startswith("http"):
            return opened.append((address, "", 0))
        page = Path(address.removeprefix("file://"))
        return opened.append((address, page.read_text(), page.parent.stat().st_mode & 0o777))

    monkeypatch.setattr(module.webbrowser, "open", open_in_browser)
    monkeypatch.setattr(module.threading.Thread, "start", lambda thread: thread.run())
    assert main(["dashboard", str(tmp_path), "--port", "0", "--open"]) == 0
    ((address, page, mode),) = opened
    token = served.options["token"]
    assert token not in address, "other accounts read the command line of the browser"
    assert f"url=http://127.0.0.1:{served[0][1]}/?token={token}" in page
    assert mode == 0o700
    assert not Path(address.removeprefix("file://")).exists(), "gone with the server"
    assert main(["dashboard", str(tmp_path), "--port", "0"]) == 0
    assert len(opened) == 1
    assert main(["dashboard", str(tmp_path), "--port", "0", "--open", "--no-token"]) == 0
    assert opened[1][0] == f"http://127.0.0.1:{served[-1][1]}/"
