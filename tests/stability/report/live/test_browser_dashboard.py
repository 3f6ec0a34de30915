"""The dashboard in a real browser: the token opens it once, a cookie from then on."""

import shutil
import socket
import threading

import pytest

from stability.cli.report import _page_that_opens
from stability.report.live.server import make_server

TOKEN = "0123456789abcdef" * 3
REFUSED = "this server shows itself by the whole address that it printed"


@pytest.fixture
def online(browser):
    """The browser, allowed to reach this machine."""
    browser.set_online(True)
    yield browser
    browser.driver.delete_all_cookies()
    browser.driver.get("about:blank")
    browser.set_online(False)
    browser.console()
    browser.requests()


@pytest.fixture
def address(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "runs" / "quickstart")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = make_server(tmp_path / "runs", port, token=TOKEN)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{port}/"
        server.should_exit = True
        thread.join()


def test_token_opens_the_dashboard_and_a_cookie_what_it_links_to(online, address):
    driver = online.driver
    driver.get(address)
    assert online.run("return document.body.innerText").strip() == REFUSED
    with _page_that_opens(f"{address}?token={TOKEN}") as page:
        driver.get(page)  # a page of another site, to the browser
        online.wait("return document.querySelector('h2 a') !== null")
    assert driver.current_url == address
    online.console()
    online.click("h2 a")
    online.wait("return window.Plotly && document.getElementById('live') !== null")
    assert driver.current_url == f"{address}study/quickstart/"
    assert online.console() == []
    driver.delete_all_cookies()
    driver.get(address)
    assert online.run("return document.body.innerText").strip() == REFUSED
