"""The live view: an HTTP server of the pages of all studies below a folder, for this machine alone.

It shows and takes nothing: no file is served but the pages' own scripts and styles, and a study is
looked up by name among those found, never by a path. Leaves out who may ask (`guard`), how long a
client may take (`deadlines`) and what a page holds (`served_pages`).
"""

import contextlib
import hashlib
import importlib
import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from plotly.offline import get_plotlyjs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from stability.report.live.deadlines import DeadlineProtocol
from stability.report.live.guard import Guard
from stability.report.live.served_pages import ServedPages, unreadable_page
from stability.report.live.study_index import StudyFolder, hash_stamps
from stability.report.page.html import ASSETS

__all__ = ["make_server"]

SERVED = ("report.js", "live.js", "index.js", "served.css")
"""Files that the pages ask for, beside plotly's script."""
MOST_COMPARED = 6
LOOKED_FOR = ("pandas", "polars", "pyarrow")
"""What plotly asks of each value whether it is one of theirs, if it finds them imported. One that
another thread is still importing (statsmodels needs pandas) has no classes yet, and plotly fails:
so they are imported before there are threads."""
UNSTORED = {"Cache-Control": "no-store"}


def make_server(
    runs: Path, port: int, *, token: str, allowed: Sequence[str] = (), store: Path | None = None
) -> uvicorn.Server:
    """Return a server of the studies below `runs`, to be run on a socket that listens at `port`.

    `token` and `allowed` are as in `Guard`, `store` as in `ServedPages`.
    """
    for name in LOOKED_FOR:
        with contextlib.suppress(ImportError):  # nobody else can import it either
            importlib.import_module(name)
    pages = ServedPages(runs, store)
    config = uvicorn.Config(
        _make_app(pages, Middleware(Guard, port=port, token=token, allowed=allowed)),
        http=DeadlineProtocol,
        lifespan="off",
        ws="none",
        access_log=False,
        log_level="error",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return _Server(config, pages)


class _Server(uvicorn.Server):
    """Ends the making of summaries with itself."""

    def __init__(self, config: uvicorn.Config, pages: ServedPages) -> None:
        super().__init__(config)
        self._pages = pages

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Hang up, then let the pages end."""
        await super().shutdown(sockets)
        self._pages.close()


def _make_app(pages: ServedPages, guard: Middleware) -> Starlette:
    # the views are plain functions, which starlette runs in worker threads
    views = _Views(pages)
    routes = [
        Route("/", views.index),
        Route("/stamp", views.index_stamp),
        Route("/study/{name:path}/stamp", views.study_stamp),
        Route("/study/{name:path}/", views.study),
        Route("/compare", views.compare),
        Route("/compare/stamp", views.compare_stamp),
        Route("/assets/{name}", _Assets().answer),
        Route("/favicon.ico", lambda request: Response(status_code=204)),
    ]
    app = Starlette(routes=routes, middleware=[guard])
    app.router.redirect_slashes = False  # an address is right or unknown
    return app


class _Views:
    """An answer for each address."""

    def __init__(self, pages: ServedPages) -> None:
        self._pages = pages

    def index(self, request: Request) -> Response:
        return HTMLResponse(self._pages.index(), headers=UNSTORED)

    def index_stamp(self, request: Request) -> Response:
        return PlainTextResponse(self._pages.index_stamp(), headers=UNSTORED)

    def study(self, request: Request) -> Response:
        return HTMLResponse(self._pages.study(self._asked_for(request)), headers=UNSTORED)

    def study_stamp(self, request: Request) -> Response:
        return PlainTextResponse(self._asked_for(request).stamp, headers=UNSTORED)

    def compare(self, request: Request) -> Response:
        chosen = self._chosen(request)
        if not 2 <= len(chosen) <= MOST_COMPARED:
            error = f"2 to {MOST_COMPARED} studies can be compared, {len(chosen)} were chosen."
            page = unreadable_page("Comparison", error, _stamp(chosen))
            return HTMLResponse(page, 400, headers=UNSTORED)
        page = self._pages.comparison(chosen, _stamp(chosen))
        return HTMLResponse(page, headers=UNSTORED)

    def compare_stamp(self, request: Request) -> Response:
        return PlainTextResponse(_stamp(self._chosen(request)), headers=UNSTORED)

    def _asked_for(self, request: Request) -> StudyFolder:
        found = self._pages.find().get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "no study of that name\n")
        return found

    def _chosen(self, request: Request) -> list[StudyFolder]:
        found = self._pages.find()
        names = dict.fromkeys(request.query_params.getlist("study"))
        if any(name not in found or found[name].kind != "study" for name in names):
            raise HTTPException(404, "no study of that name\n")
        return [found[name] for name in names]


class _Assets:
    """The scripts and styles, read once; a browser that has one is told so."""

    def __init__(self) -> None:
        texts = {name: (ASSETS / name).read_text(encoding="utf-8") for name in SERVED}
        texts["plotly.js"] = get_plotlyjs()
        self._bytes = {name: text.encode() for name, text in texts.items()}
        self._tags = {
            name: f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            for name, content in self._bytes.items()
        }

    def answer(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._bytes:
            raise HTTPException(404, "no such file\n")
        headers = {"Cache-Control": "no-cache", "ETag": self._tags[name]}
        if request.headers.get("if-none-match") == self._tags[name]:
            return Response(status_code=304, headers=headers)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(self._bytes[name], headers=headers, media_type=kind)


def _stamp(chosen: list[StudyFolder]) -> str:
    return hash_stamps(f"{folder.name} {folder.stamp}" for folder in chosen)
