"""The server as a browser, or somebody who means harm, meets it: over a real connection."""

import html
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

from stability.records.metric_log import MetricLog
from stability.report.live.server import SERVED
from tests.stability.report.live.serving import HOSTILE, eventually, serving, settled


def test_list_shows_each_study_as_what_it_is(client):
    page = html.unescape(settled(client))
    assert "14 finished of 14 runs" in page
    assert "14 to come of 14 runs" in page
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


@pytest.mark.slow
def test_what_plotly_looks_for_is_whole_before_two_threads_can_meet_over_it(tmp_path):
    # in a process of its own: in this one a page has been made already
    program = (
        "import sys; from pathlib import Path; from stability.report.live import server\n"
        "assert 'pandas' not in sys.modules\n"
        "made = server.make_server(Path(sys.argv[1]), 1, token='')\n"
        "looked = [sys.modules[name] for name in server.LOOKED_FOR if name in sys.modules]\n"
        "assert sys.modules['pandas'] in looked and not any(\n"
        "    getattr(each.__spec__, '_initializing', False) for each in looked)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_end_of_the_server_is_that_of_its_summaries(runs):
    with serving(runs) as client:
        settled(client)
        server = client.server
    assert server._pages._closing.is_set()


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
