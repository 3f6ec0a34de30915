"""A W&B server as far as runs need one: it keeps each run's rows and summary in memory.

Answers the queries that wandb 0.31 makes, and file_stream, in which rows are written from a line
number on. Says of every artifact that its files are here already.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
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

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


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


def _answer(runs: dict[str, ServedRun], operation: str, given: dict[str, Any]) -> dict[str, Any]:
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
    if operation == "CreateRunFiles":
        files = [{"name": name, "uploadUrl": ""} for name in given["files"]]
        return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}
    if operation == "CreateArtifact":
        made = given["input"]
        aliases = sorted(each["alias"] for each in made["aliases"])
        runs[made["runName"]].artifacts.append((made["artifactCollectionName"], *aliases))
        sequence = {"id": "s", "latestArtifact": None}
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}
    if not operation:  # an artifact of that name
        return {"project": {"artifact": None}}
    person = {"id": "u", "entity": "me", "username": "me", "email": "", "name": "me"}
    return {"viewer": {**person, "flags": "{}", "admin": False, "teams": {"edges": []}}}


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
    runs: dict[str, ServedRun]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        sent = json.loads(body)
        if self.path == "/graphql":
            variables = sent.get("variables") or {}
            self._reply({"data": _answer(self.runs, sent.get("operationName", ""), variables)})
            return
        *_, name, _what = self.path.split("/")
        _receive(self.runs[name], sent)
        self._reply({"exitcode": None, "limits": {}})

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
def running() -> Iterator[tuple[str, dict[str, ServedRun]]]:
    """Serve until the block ends; gives the address and the runs by id."""
    runs: dict[str, ServedRun] = {}
    handler = type("Handler", (_Handler,), {"runs": runs})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda request, client: None  # a client that hangs up
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", runs
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
