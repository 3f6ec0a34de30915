"""Who may ask the server: this machine, hosts that were allowed, and holders of the token."""

import asyncio
import html
import re

import pytest
from starlette.responses import PlainTextResponse

from stability.report.live.guard import Guard, check_host
from tests.stability.report.live.serving import TOKEN, serving


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1:{port}.evil.example",
        "localhost.evil.example:{port}",
        "127.0.0.1:{port}@evil.example",
        "0.0.0.0:{port}",
        "192.168.0.2:{port}",
    ],
)
@pytest.mark.parametrize("target", ["/", "/study/quickstart/stamp", "/assets/report.js", "/none"])
def test_request_that_names_another_host_is_refused(client, host, target):
    answer, text = client.ask(target, Host=host and host.format(port=client.port))
    assert answer.status in (400, 421)  # 400 by uvicorn, for none at all
    assert "quickstart" not in text


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_names_of_this_machine_are_served(client, name):
    assert client.ask("/stamp", Host=f"{name}:{client.port}")[0].status == 200


def _status(port, host, allowed=()):
    """What the guard answers at a port that a test may not listen on."""

    async def page(scope, receive, send):
        await PlainTextResponse("page")(scope, receive, send)

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "headers": [(b"host", host.encode())]}
    scope["query_string"] = b""
    asyncio.run(Guard(page, port, "", allowed)(scope, None, send))
    return sent[0]["status"]


def test_a_browser_leaves_port_80_out():
    assert [_status(80, host) for host in ("127.0.0.1", "localhost:80")] == [200, 200]
    assert [_status(80, "evil.example"), _status(8080, "127.0.0.1")] == [421, 421]


@pytest.mark.parametrize(
    ("allowed", "host", "status"),
    [
        (["dash.example"], "dash.example", 200),
        (["dash.example"], "DASH.example:9000", 200),
        (["dash.example:9000"], "dash.example:9000", 200),
        (["dash.example:9000"], "dash.example:9001", 421),
        (["dash.example:9000"], "dash.example", 421),
        (["localhost"], "localhost:9000", 200),
        (["dash.example"], "evil.example", 421),
        (["dash.example"], "dash.example.evil.example", 421),
        (["dash.example"], "evil.dash.example", 421),
        (["dash.example"], "dash.example:9000@evil.example", 421),
        (["dash.example"], "dash.example:", 200),
        (["dash.example"], "dash.example:x", 421),
        ([], "dash.example", 421),
    ],
)
def test_host_that_was_allowed_and_no_other_is_served(allowed, host, status):
    assert _status(8765, host, allowed) == status


@pytest.mark.parametrize(
    "name", ["", "*", "a b", "http://a", "a/b", "a:", "a:x", "a:1:2", "ü.example"]
)
def test_what_is_no_host_cannot_be_allowed(name):
    with pytest.raises(ValueError, match="allow_host must be a name or name:port, got"):
        check_host(name)


def test_page_of_an_allowed_host_may_ask_and_that_of_another_may_not(runs):
    with serving(runs, allowed=["dash.example"]) as tunnel:
        ask = {"Host": "dash.example", "Sec_Fetch_Site": "same-origin"}
        for origin, status in (
            ("https://dash.example", 200),
            ("http://dash.example", 200),
            ("https://evil.example", 403),
            ("https://dash.example.evil.example", 403),
        ):
            assert tunnel.ask("/stamp", Origin=origin, **ask)[0].status == status
        assert tunnel.ask("/stamp", Host="dash.example", Cookie=None)[0].status == 403


WRONG_TOKENS = ["", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "f" * 48, "%00", "\xfc".encode().hex()]


@pytest.mark.parametrize(
    "target", ["/", "/stamp", "/study/quickstart/", "/assets/report.js", "/no"]
)
def test_request_without_the_token_gets_one_line(client, target):
    def refused(target, **headers):
        answer, text = client.ask(target, **headers)
        assert (answer.status, text.count("\n")) == (403, 1)
        assert "by the whole address that it printed" in text
        assert answer.getheader("Set-Cookie") is None

    refused(target, Cookie=None)
    for wrong in WRONG_TOKENS:
        refused(target, Cookie=f"stability-{client.port}={wrong}")
        refused(f"{target}?token={wrong}", Cookie=None)
    refused(target, Cookie=f"stability-1={TOKEN}")
    refused(target, Cookie=TOKEN)
    refused(f"{target}?token={TOKEN}&token=other", Cookie=None)
    refused(f"{target}?Token={TOKEN}", Cookie=None)
    refused(f"{target}#token={TOKEN}", Cookie=None)


@pytest.mark.parametrize("target", [f"/{TOKEN}", f"/token={TOKEN}/", f"/study/{TOKEN}/"])
def test_token_in_the_path_is_no_token(client, target):
    assert client.ask(target, Cookie=None)[0].status == 403


@pytest.mark.parametrize(
    ("target", "clean"),
    [
        ("/", "/"),
        ("/study/deep%2Fer%2Fanother/", "/study/deep%2Fer%2Fanother/"),
        ("/compare?study=quickstart&study=deep/er/another", None),
    ],
)
def test_token_opens_any_address_and_a_cookie_the_links_in_it(client, target, clean):
    joined = "&" if "?" in target else "?"
    # from another site, as a link in a mail is: the token says that its holder may
    answer, text = client.ask(
        f"{target}{joined}token={TOKEN}", Cookie=None, Sec_Fetch_Site="cross-site"
    )
    assert answer.status == 200
    assert TOKEN not in text
    (address,) = re.findall(r'content="0; url=([^"]*)"', text)
    assert html.unescape(address) == (
        clean or "/compare?study=quickstart&study=deep%2Fer%2Fanother"
    )
    cookie = answer.getheader("Set-Cookie")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    kept = cookie.split("; ")[0]
    page, text = client.ask(html.unescape(address), Cookie=f"other=1; {kept}; more=2")
    assert page.status == 200
    assert TOKEN not in text


@pytest.mark.parametrize("target", ["//evil.example/", "/\\evil.example/", "http://evil.example/"])
def test_token_leads_to_no_other_server(client, target):
    _, text = client.ask(f"{target}?token={TOKEN}")
    (address,) = re.findall(r'content="0; url=([^"]*)"', text)
    assert re.match(r"/[^/\\]", address)


def test_token_helps_no_foreign_host_and_no_method(client):
    assert client.ask(f"/?token={TOKEN}", Host="evil.example")[0].status == 421
    assert client.ask(f"/?token={TOKEN}", method="POST")[0].status == 405


def test_without_a_token_only_where_that_was_asked_for(runs):
    with serving(runs, token="") as open_to_all:
        assert open_to_all.ask("/stamp", Cookie=None)[0].status == 200
        assert open_to_all.ask("/stamp?token=", Cookie=None)[0].status == 200
        assert open_to_all.ask("/stamp", Host="evil.example", Cookie=None)[0].status == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_request_from_another_site_is_refused(client, headers):
    sent = {name: value.format(port=client.port) for name, value in headers.items()}
    for target in ("/", "/stamp", "/assets/plotly.js"):
        answer, text = client.ask(target, **sent)
        assert answer.status == 403
        assert "quickstart" not in text


def test_own_pages_may_ask(client):
    own = {"Origin": f"http://{client.host}", "Sec_Fetch_Site": "same-origin"}
    assert client.ask("/stamp", **own)[0].status == 200
    assert client.ask("/stamp", Sec_Fetch_Site="none")[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"])
def test_server_takes_no_input(client, method):
    answer, _ = client.ask("/", method=method)
    assert answer.status == 405
    assert answer.getheader("Allow") == "GET, HEAD"
    assert answer.getheader("Access-Control-Allow-Origin") is None
