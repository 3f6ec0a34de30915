"""Who may ask the dashboard: a browser that knows its token, under one of its own names.

A server on the loopback address is open to every account of the machine, so a request must carry
the token of the printed address, once as `?token=...` and from then on as a cookie. It is open to
every page that a browser shows as well: another site may point a name of its own at 127.0.0.1 (DNS
rebinding), or place requests to it in its pages. So the host that a request names must be this
server, and a request from another site is refused.

A cookie belongs to an address and not to a port: a browser that visits another account's server on
the same loopback address shows it this cookie too. Leaves out what is shown (`server`).
"""

import hmac
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from markupsafe import escape
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "check_host"]

TOKEN = "token"
"""The name of the entry of an address's query that holds the token."""
METHODS = ("GET", "HEAD")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
# an answer forbids the browser to run or fetch anything that this server did not serve as a file
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


def check_host(name: str) -> str:
    """Return the host's name, or `name:port`, in small letters; ValueError if it is neither."""
    host, colon, port = name.partition(":")
    is_name = host != "" and all(each.isalnum() or each in "-._" for each in host)
    if not (is_name and host.isascii()) or (colon and not (port.isascii() and port.isdigit())):
        raise ValueError(
            f"dashboard: allow_host must be a name or name:port, got {name!r}; divide several by "
            "commas"
        )
    return name.lower()


class Guard:
    """Wraps an application that listens on the loopback address at `port`.

    `token` is what a request must carry, nothing if it is empty. `allowed` are further names that
    the server may be called by, as checked by `check_host`: one without a port goes with any.
    """

    def __init__(self, app: ASGIApp, port: int, token: str, allowed: Sequence[str] = ()) -> None:
        self._app = app
        self._token = token
        self._cookie = f"stability-{port}"
        self._own = {f"{name}:{port}" for name in LOOPBACK_NAMES}
        if port == 80:  # which a browser leaves out
            self._own |= set(LOOPBACK_NAMES)
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] != "http":
            raise ValueError(f"Guard: scope must be http, got {scope['type']}; ask over http")
        await (self._answer(scope) or self._app)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> Response | None:
        """Return a refusal or, for a right token in the address, what leads on without it."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_mine(hosts[0].lower()):
            return _refusal(421, "this server answers for the loopback address only")
        if scope["method"] not in METHODS:
            refused = _refusal(405, "this server only shows; it takes no input")
            refused.headers["Allow"] = ", ".join(METHODS)
            return refused
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == TOKEN]
        if self._token and len(given) == 1 and self._is_right(given[0]):
            # wherever the link was: the page that follows is asked for by one of ours
            return self._welcome(scope, urlencode([each for each in query if each[0] != TOKEN]))
        if _is_foreign(headers, hosts[0].lower(), self._own):
            return _refusal(
                403, "this server refuses requests from other sites; enter its address by hand"
            )
        if self._token and not self._knows_token(headers):
            return _refusal(403, "this server shows itself by the whole address that it printed")
        return None

    def _is_mine(self, host: str) -> bool:
        if host in self._own or host in self._allowed:
            return True
        name, _, port = host.partition(":")
        return name in self._allowed and (not port or (port.isascii() and port.isdigit()))

    def _is_right(self, token: str) -> bool:
        # in a time that does not tell how much of it is right
        return hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())

    def _knows_token(self, headers: Headers) -> bool:
        for line in headers.getlist("cookie"):
            try:
                cookie = SimpleCookie(line).get(self._cookie)
            except CookieError:
                continue
            if cookie is not None and self._is_right(cookie.value):
                return True
        return False

    def _welcome(self, scope: Scope, query: str) -> Response:
        """Return a page that keeps the token as a cookie and opens the address without it.

        A redirect would count as the request of whoever held the link, and a strict cookie would
        not go with it.
        """
        # two slashes at the start, and a backslash is one to a browser, would name another server
        path = scope["raw_path"].decode("latin-1").replace("\\", "%5C")
        address = escape("/" + path.lstrip("/") + (f"?{query}" if query else ""))
        welcome = HTMLResponse(
            '<!doctype html><meta charset="utf-8"><title>Studies</title>'
            f'<meta http-equiv="refresh" content="0; url={address}">'
            f'<p><a href="{address}">The studies</a></p>\n',
            headers={"Cache-Control": "no-store"},
        )
        welcome.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        return welcome


def _is_foreign(headers: Headers, host: str, own: set[str]) -> bool:
    """Whether another site's page asks; a tunnel may end in a server that speaks https."""
    origins = {"", f"http://{host}"} | (set() if host in own else {f"https://{host}"})
    site = headers.get("sec-fetch-site", "none")
    return headers.get("origin", "") not in origins or site not in ("same-origin", "none")


def _refusal(status: int, line: str) -> Response:
    return PlainTextResponse(f"{line}\n", status)
