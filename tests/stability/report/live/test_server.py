"""The server as a browser, or somebody who means harm, meets it: over a real connection."""

import asyncio
import contextlib
import html
import http.client
import re
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from starlette.responses import PlainTextResponse

from stability.records.events import Event
from stability.records.metric_log import MetricLog
from stability.report.live import deadlines
from stability.report.live.guard import Guard, check_host
from stability.report.live.server import SERVED, make_server
from tests.stability.report.synthetic_probe import write_probe

TOKEN = "0123456789abcdef" * 3
HOSTILE = "<script>alert(1)</script>\"'&🦊../../etc/passwd"


class Client:
    """Sends a request target as it stands: nothing is normalised."""

    def __init__(self, port):
        self.port = port
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


@pytest.fixture(scope="module")
def runs(finished, synthetic, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "runs"
    shutil.copytree(finished, folder / "quickstart")
    shutil.copytree(finished, folder / "deep" / "er" / "another")
    synthetic.write_synthetic(folder / quote(HOSTILE, safe="<>\"'& ()🦊"), question=HOSTILE * 6)
    synthetic.write_study_json(folder / "not-begun")
    synthetic.write_study_json(folder / "torn")
    (folder / "torn" / "study.json").write_text('{"config": {')
    event = Event(20, "finding", HOSTILE, HOSTILE)
    write_probe(folder / "probed", planted=(2, 1), events=(event,))
    (folder / "secret.txt").write_text("secret")
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "out").symlink_to(folder.parent)
    return folder


@contextmanager
def serving(runs, **options):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = make_server(runs, port, **({"token": TOKEN} | options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield Client(port)
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def client(runs):
    with serving(runs) as started:
        yield started


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


def test_list_shows_each_study_as_what_it_is(client):
    page = html.unescape(settled(client))
    assert "14 finished of 14 runs" in page
    assert "14 missing of 14 runs" in page
    assert "torn/study.json: must be JSON" in page
    assert "flash_fa2 moves the weights" in page
    assert "head 1: error ratio stands out since step 20" in page
    for name in ("quickstart", "deep/er/another", "not-begun", "torn", "probed"):
        assert f'href="/study/{quote(name, safe="")}/"' in page


@pytest.mark.parametrize("name", ["quickstart", "deep%2Fer%2Fanother", "deep/er/another"])
def test_study_page_is_the_report_with_served_scripts(client, name):
    page = client.page(f"/study/{name}/")
    assert "What changed in each arm" in page
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="data">',
        *(f'<script src="/assets/{n}.js">' for n in ("plotly", "report", "live")),
    ]
    stamp = client.page(f"/study/{name}/stamp")
    assert f'data-stamp="{stamp}"' in page


def test_probe_has_its_own_page(client):
    page = client.page("/study/probed/")
    assert "What was compared" in page
    assert f'data-stamp="{client.page("/study/probed/stamp")}"' in page
    assert 'src="/assets/plotly.js"' in page


def test_study_that_cannot_be_read_says_so_and_looks_for_better(client):
    page = client.page("/study/torn/")
    assert "must be JSON, is torn or damaged" in page
    assert "/assets/live.js" in page
    assert client.page("/study/torn/stamp") in page


def test_hostile_names_stay_text_on_every_page(client, runs):
    (name,) = (path.name for path in runs.iterdir() if "script" in path.name)
    for target in (
        "/",
        "/study/probed/",
        f"/study/{quote(name, safe='')}/",
        f"/compare?study=quickstart&study={quote(name)}",
    ):
        page = settled(client) if target == "/" else client.page(target)
        assert html.escape(HOSTILE).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in page
        assert "<script>alert" not in page
        assert set(re.findall(r"<script(?! src=\"/assets/)[^>]*>", page)) <= {
            '<script type="application/json" id="data">'
        }
        assert not re.findall(r"\son\w+=", re.sub(r"<script.*?</script>", "", page, flags=re.S))


@pytest.mark.parametrize(
    "target",
    [
        "/secret.txt",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/study/../secret.txt",
        "/study/..%2fsecret.txt",
        "/study/%2e%2e%2fsecret.txt/",
        "/study/%252e%252e%252fsecret.txt/",
        "/study/../../etc/passwd/",
        "/study//etc/passwd/",
        "/study/%2Fetc%2Fpasswd/",
        "/study/..\\..\\secret.txt/",
        "/study/%5c..%5csecret.txt/",
        "/study/quickstart%00/",
        "/study/%00/",
        "/study/out/",
        "/study/out%2Fruns%2Fquickstart/",
        "/study/quickstart",
        "/study/quickstart/study.json",
        "/study/quickstart/baseline/seed-0/manifest.json",
        "/study/quickstart/../torn/",
        "/study/./quickstart/",
        "/study/" + 5000 * "a" + "/",
        "/study/%ff%fe/",
        "/study/.%2fquickstart/stamp",
        "/assets/../html.py",
        "/assets/%2e%2e%2fhtml.py",
        "/assets/report.html.j2",
        "/assets/",
        "/compare?study=quickstart&study=../runs/torn",
        "/compare?study=quickstart&study=/etc",
        "/compare/stamp?study=%2e%2e",
        "/compare?study=quickstart&study=probed",
        "http://127.0.0.1/secret.txt",
        "//etc/passwd",
    ],
)
def test_nothing_but_the_pages_can_be_asked_for(client, target):
    answer, text = client.ask(target)
    assert answer.status == 404
    assert "secret" not in text
    assert len(text) < 100, "no page"


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


def _hung_up_after(port, first, more=b""):
    """Send `first`, then `more` again and again; the seconds until the server hangs up."""
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(first)
        try:
            while time.monotonic() - start < 20:
                connection.settimeout(0.05)
                try:
                    if not connection.recv(2**16):
                        break
                except TimeoutError:
                    connection.sendall(more)
        except OSError:
            pass
        return time.monotonic() - start


HEAD = "GET /{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"


@pytest.mark.parametrize(
    ("head", "more"),
    [
        ("", ""),
        ("GET / HT", ""),
        (HEAD, "X-Slow: 1\r\n"),
        (HEAD + "Content-Length: 1000000\r\n\r\n", "x"),
        (HEAD + "\r\n", "G"),
    ],
    ids=["silence", "half-a-line", "dripping-head", "dripping-body", "dripping-second-head"],
)
def test_slow_client_is_hung_up_on(client, monkeypatch, head, more):
    monkeypatch.setattr(deadlines, "REQUEST_S", 0.3)
    first = head.format(path="", port=client.port).encode()
    assert _hung_up_after(client.port, first, more.encode()) < 5
    assert client.ask("/stamp")[0].status == 200


def test_client_that_does_not_read_is_hung_up_on(client, monkeypatch):
    monkeypatch.setattr(deadlines, "SENDING_S", 0.3)
    asked = HEAD.format(path="assets/plotly.js", port=client.port)
    asked += f"Cookie: stability-{client.port}={TOKEN}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", client.port))
        connection.sendall(asked.encode() * 3)
        time.sleep(1.5)
        got = 0
        connection.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(2**20):
                got += len(part)
    assert got < 3 * len(client.page("/assets/plotly.js"))


def test_many_silent_clients_keep_no_answer_from_others(client):
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
            silent.sendall(b"GET / HTTP/1.1\r\n")
        assert client.ask("/stamp")[0].status == 200


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


def test_head_is_a_page_without_its_text(client):
    answer, text = client.ask("/study/quickstart/", method="HEAD")
    assert answer.status == 200
    assert int(answer.getheader("Content-Length")) > 10_000
    assert text == ""


@pytest.mark.parametrize("target", ["/", "/study/quickstart/", "/study/torn/", "/none", "/stamp"])
def test_every_answer_forbids_what_others_serve(client, target):
    answer, _ = client.ask(target)
    policy = dict(
        part.split(" ", 1) for part in answer.getheader("Content-Security-Policy").split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert not re.search(r"\*|https?:", " ".join(policy.values()))
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert answer.getheader("Referrer-Policy") == "no-referrer"
    if answer.status == 200:
        assert answer.getheader("Cache-Control") == "no-store"
    refused, _ = client.ask(target, Host="evil.example")
    unknown, _ = client.ask(target, Cookie=None)
    policies = {each.getheader("Content-Security-Policy") for each in (answer, refused, unknown)}
    assert len(policies) == 1


@pytest.mark.parametrize("name", ["plotly.js", *SERVED])
def test_assets_are_sent_once(client, name):
    answer, text = client.ask(f"/assets/{name}")
    assert answer.status == 200
    kind = "text/css" if name.endswith("css") else "text/javascript"
    assert answer.getheader("Content-Type").startswith(kind)
    assert len(text) > 500
    again, text = client.ask(f"/assets/{name}", If_None_Match=answer.getheader("ETag"))
    assert (again.status, text) == (304, "")
    assert client.ask(f"/assets/{name}", If_None_Match='"old"')[0].status == 200


def test_several_requests_at_once_are_all_answered(client):
    targets = ["/study/quickstart/", "/study/deep%2Fer%2Fanother/", "/", "/stamp"] * 3
    with ThreadPoolExecutor(len(targets)) as pool:
        pages = list(pool.map(client.page, targets))
    assert pages[0] == pages[4] == pages[8]
    assert "What changed in each arm" in pages[1]


def test_stamps_and_pages_follow_a_study_that_grows(client, runs):
    settled(client)
    compare = "?study=deep/er/another&study=quickstart"
    stamps = ("/study/quickstart/stamp", f"/compare/stamp{compare}")
    before = [client.page(stamp) for stamp in stamps]
    list_before = client.page("/stamp")
    page = client.page("/study/quickstart/")
    others = client.page("/study/torn/stamp")
    log = MetricLog(runs / "quickstart" / "flash_fa2" / "seed-0" / "metrics.jsonl")
    log.append(200, {"train/loss": 7.125})
    log.close()
    after = [client.page(stamp) for stamp in stamps]
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert client.page("/study/torn/stamp") == others
    grown = client.page("/study/quickstart/")
    assert f'data-stamp="{after[0]}"' in grown
    assert "7.125" in grown
    assert "7.125" not in page
    assert f'data-stamp="{after[1]}"' in client.page(f"/compare{compare}")
    eventually(lambda: client.page("/stamp"), lambda stamp: stamp != list_before)


def test_study_that_appears_is_listed_and_one_that_goes_is_not(client, runs, synthetic):
    synthetic.write_study_json(runs / "newcomer")
    assert "/study/newcomer/" in client.page("/")
    assert client.ask("/study/newcomer/")[0].status == 200
    shutil.rmtree(runs / "newcomer")
    assert "/study/newcomer/" not in client.page("/")
    assert client.ask("/study/newcomer/stamp")[0].status == 404


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        ("", 0),
        ("?study=quickstart", 1),
        ("?study=quickstart&study=quickstart", 1),
    ],
)
def test_one_study_is_no_comparison(client, chosen, count):
    answer, text = client.ask(f"/compare{chosen}")
    assert answer.status == 400
    assert f"2 to 6 studies can be compared, {count} were chosen" in text


def test_comparison_with_a_torn_study_says_so(client):
    assert "must be JSON" in client.page("/compare?study=quickstart&study=torn")
