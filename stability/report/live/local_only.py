"""Lets only pages of this server, and whoever sits at this machine, ask it anything.

A server on the loopback address is open to every page that a browser shows: another site may point
a name of its own at 127.0.0.1 (DNS rebinding), or place requests to it in its pages. So the host
that a request names must be this server, and a request from another site is refused. Every answer
forbids the browser to run or fetch anything that this server did not serve as a file.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LocalOnly"]

HEADERS = {
    # plotly sets style attributes, and draws heat maps as data: images
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
METHODS = ("GET", "HEAD")


class LocalOnly:
    """Wraps an application that listens on the loopback address at `port`."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        names = ("127.0.0.1", "localhost", "[::1]")
        self._hosts = {f"{name}:{port}" for name in names}
        if port == 80:  # which a browser leaves out
            self._hosts |= set(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] != "http":
            raise ValueError(f"LocalOnly: scope must be http, got {scope['type']}; ask over http")
        app = self._refusal(scope["method"], Headers(scope=scope)) or self._app
        await app(scope, receive, send_guarded)

    def _refusal(self, method: str, headers: Headers) -> Response | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse("this server answers for the loopback address only\n", 421)
        origins = {f"http://{host}" for host in self._hosts}
        sites = ("same-origin", "none")
        if headers.get("origin", "") not in {"", *origins} or (
            headers.get("sec-fetch-site", "none") not in sites
        ):
            return PlainTextResponse(
                "this server refuses requests from other sites; enter its address by hand\n", 403
            )
        if method not in METHODS:
            allowed = {"Allow": ", ".join(METHODS)}
            return PlainTextResponse("this server only shows; it takes no input\n", 405, allowed)
        return None
