"""A W&B server as far as runs and saved views need one: it keeps what it is sent in memory.

Answers the queries that wandb 0.31 and wandb-workspaces 0.4 make, file_stream, in which rows are
written from a line number on, and the upload of files. Says of every artifact that its files are
here already. It can be told to fail.
"""

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any


@dataclass
class ServedRun:
    """What the server knows of a run."""

    about: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    summary: str = "{}"
    exit_code: int | None = None
    artifacts: list[tuple[str, ...]] = field(default_factory=list)
    """Name and aliases of each."""
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    """Level, title and text of each."""
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


class Served(dict[str, ServedRun]):
    """The runs by id, the saved views by name, and from when on every request fails."""

    def __init__(self) -> None:
        self.views: dict[str, dict[str, Any]] = {}
        self.address = ""
        self.status: int | None = None
        """What is answered instead, if anything: 401, 500, or 0 for nothing at all."""
        self.fails_after = ""
        """The operation after which that begins; "" for at once."""
        self.is_closed = Event()

    def refuses(self) -> bool:
        return self.status is not None and not self.fails_after


def _bucket(name: str, run: ServedRun) -> dict[str, Any]:
    project = {"id": "p", "name": run.about["project"], "entity": {"id": "e", "name": "me"}}
    return {
        "id": f"id-{name}",
        "name": name,
        "displayName": run.about.get("displayName"),
        "description": None,
        "notes": None,
        "config": run.about.get("config") or "{}",
        "wandbConfig": '{"t": {}}',  # without it the run counts as not started
        "sweepName": None,
        "project": project,
        "tags": run.about.get("tags"),
        "group": run.about.get("groupName"),
        "jobType": run.about.get("jobType"),
        "commit": None,
        "summaryMetrics": run.summary,
        "historyLineCount": len(run.lines),
        "eventsLineCount": 0,
        "logLineCount": 0,
        "historyTail": json.dumps(run.lines[-1:]),
        "eventsTail": "[]",
    }


def _answer(runs: Served, operation: str, given: dict[str, Any]) -> dict[str, Any]:
    made = _of_view(runs, operation, given) or _of_run(runs, operation, given)
    if made is not None:
        return made
    person = {"id": "u", "entity": "me", "username": "me", "email": "", "name": "me"}
    teams = {"edges": []}
    return {"viewer": {**person, "flags": "{}", "admin": False, "teams": teams}}


def _of_view(runs: Served, operation: str, given: dict[str, Any]) -> dict[str, Any] | None:
    if operation == "UpsertView2":
        view = {"id": f"id-{given['name']}", **given}
        is_new = given["name"] not in runs.views
        runs.views[given["name"]] = view
        return {"upsertView": {"view": view, "inserted": is_new}}
    if operation == "View":
        found = runs.views.get(given["viewName"])
        return {"project": {"allViews": {"edges": [{"node": found}] if found else []}}}
    return None


def _of_run(runs: Served, operation: str, given: dict[str, Any]) -> dict[str, Any] | None:
    if operation == "UpsertBucket":
        is_new = given["name"] not in runs
        run = runs.setdefault(given["name"], ServedRun())
        run.about |= {key: value for key, value in given.items() if value is not None}
        return {"upsertBucket": {"bucket": _bucket(given["name"], run), "inserted": is_new}}
    if operation == "RunResumeStatus":
        run = runs.get(given["name"])
        found = _bucket(given["name"], run) if run else None
        owner = {"id": "e", "name": "me"}
        return {"model": {"id": "p", "name": given["project"], "entity": owner, "bucket": found}}
    if operation == "NotifyScriptableRunAlert":
        alert = (given["severity"], given["title"], given["text"])
        runs[given["runName"]].alerts.append(alert)
        return {"notifyScriptableRunAlert": {"success": True}}
    if operation == "CreateRunFiles":
        place = f"{runs.address}/upload/{given['run']}"
        files = [{"name": name, "uploadUrl": f"{place}/{name}"} for name in given["files"]]
        return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}
    if operation == "CreateArtifact":
        made = given["input"]
        aliases = sorted(each["alias"] for each in made["aliases"])
        runs[made["runName"]].artifacts.append((made["artifactCollectionName"], *aliases))
        sequence = {"id": "s", "latestArtifact": None}
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}
    if "artifact" in operation.lower():  # one of that name
        return {"project": {"artifact": None}}
    return None


def _receive(run: ServedRun, sent: dict[str, Any]) -> None:
    for name, part in (sent.get("files") or {}).items():
        content, first = part["content"], part["offset"]
        if name == "wandb-history.jsonl":
            run.lines[first : first + len(content)] = content
        elif name == "wandb-summary.json":
            run.summary = content[-1]
    if sent.get("complete"):
        run.exit_code = sent["exitcode"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    runs: Served

    def do_POST(self) -> None:
        body = self._body()
        if self.runs.refuses():
            self._refuse()
            return
        sent = json.loads(body)
        if self.path == "/graphql":
            variables = sent.get("variables") or {}
            asked = re.search(r"(?:query|mutation)\s+(\w+)", sent["query"])
            operation = asked[1] if asked else ""
            self._reply({"data": _answer(self.runs, operation, variables)})
            if operation == self.runs.fails_after:
                self.runs.fails_after = ""
            return
        *_, name, _what = self.path.split("/")
        _receive(self.runs[name], sent)
        self._reply({"exitcode": None, "limits": {}})

    def do_PUT(self) -> None:
        body = self._body()
        if self.runs.refuses():
            self._refuse()
            return
        _, _upload, run, file = self.path.split("/", 3)
        self.runs[run].files[file] = body
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_packed = self.headers.get("Content-Encoding") == "gzip"
        return gzip.decompress(body) if is_packed else body

    def _refuse(self) -> None:
        if self.runs.status == 0:
            self.runs.is_closed.wait()
            return
        self.send_response(self.runs.status or 500)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def _reply(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[Served]:
    """Serve until the block ends; gives what has arrived."""
    runs = Served()
    handler = type("Handler", (_Handler,), {"runs": runs})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda request, client: None  # a client that hangs up
    runs.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield runs
    finally:
        runs.is_closed.set()
        server.shutdown()
        server.server_close()
        thread.join()
