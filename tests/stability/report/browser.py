"""A headless Chromium that reads a page from disk as a person would: no network, a mouse, a theme.

Leaves out what a page should show (`test_browser_report`, `test_hostile_names`). The drawn charts
are asked through plotly's own objects, the mouse is real: events go in at the pixel of a point.
"""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

__all__ = ["Browser", "launch_browser", "start_browser"]

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI is root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--hide-scrollbars",
)
LOCAL = ("file:", "data:", "blob:", "about:", "chrome:", "http://127.0.0.1")
PATIENCE = 20
"""Seconds until something that should happen counts as not happening."""

CHOOSE = """
const [section, name, option] = arguments;
const select = document.querySelector(
  `[data-section="${section}"] select[data-choice="${name}"]`);
const before = select.value;
select.value = option;
select.dispatchEvent(new Event("change", { bubbles: true }));
return before;
"""
CHARTS = (Path(__file__).parent / "browser.js").read_text(encoding="utf-8")


class Browser:
    """One Chromium with one page at a time, offline; what it logs and asks for is kept."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self.width = 0
        self.shown: tuple[Path, int, bool] | None = None
        """The page, width and theme that `open` was last asked for."""

    def open(
        self,
        path: Path,
        *,
        width: int = 1200,
        height: int = 900,
        dark: bool = False,
        scale: float = 1,
    ) -> None:
        """Open the page at `path` anew, and forget what earlier pages logged."""
        self.driver.get("about:blank")
        self.console()
        self.requests()
        self.width = width
        self.shown = (path, width, dark)
        self.set_size(width, height, scale)
        self.set_theme(dark=dark)
        self.driver.get(path.as_uri())

    def set_size(self, width: int, height: int = 900, scale: float = 1) -> None:
        """Set the window in CSS pixels, each of `scale` pixels of the screen."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._cdp("Emulation.setDeviceMetricsOverride", **metrics)

    def set_online(self, online: bool) -> None:
        """Let the browser reach this machine, or nothing."""
        through = -1 if online else 0
        rates = {"latency": 0, "downloadThroughput": through, "uploadThroughput": through}
        self._cdp("Network.emulateNetworkConditions", **rates, offline=not online)

    def set_theme(self, *, dark: bool) -> None:
        """Say what the system's theme is, as it changes at dusk."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", features=[feature])

    def set_media(self, media: str) -> None:
        """Lay the page out for `media`, e.g. `print`, in no set theme; "" is the screen."""
        self._cdp("Emulation.setEmulatedMedia", media=media)

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a function with this body returns; a promise is waited for."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """Return what `script` returns as soon as that is truthy; AssertionError if it never is."""
        return until(lambda: self.run(script, *arguments), f"wait: {script.splitlines()[-1]}")

    def draw_all(self) -> None:
        """Draw every chart, also those that nobody has scrolled to."""
        self.wait("return !!window.report")
        self.run("return window.report.drawAll().then(() => null)")

    def draw(self, *plots: str) -> None:
        """Scroll to each of `plots` and wait until it is drawn, as charts are when they come near.

        AssertionError if one is not.
        """
        for plot in plots:
            self.run("document.getElementById(arguments[0]).scrollIntoView()", plot)
            self.wait("return !!document.getElementById(arguments[0])._fullLayout", plot)
        self.settle()

    def plots(self) -> list[str]:
        """Return the ids of the page's charts, drawn or not."""
        return self.run("return [...document.querySelectorAll('.plot')].map((plot) => plot.id)")

    def traces(self, plot: str) -> list[dict[str, Any]]:
        """Return the traces that a drawn chart holds now, numbers as plain lists."""
        return self.run(f"{CHARTS} return traces(...arguments)", plot)

    def hover(self, plot: str, trace: int, point: int, row: int = 0) -> str:
        """Move the mouse onto a point, or onto cell (`point`, `row`), and return what pops up.

        Moves it away again, until that is gone.
        """
        place = (plot, trace, point, row)
        _, y = self.run(f"{CHARTS} return pixel(...arguments)", *place)
        self.run("window.scrollBy({ top: arguments[0] - innerHeight / 2, behavior: 'instant' })", y)
        x, y = self.run(f"{CHARTS} return pixel(...arguments)", *place)
        self._move(x, y)
        said = self.wait(f"{CHARTS} return hovered(...arguments)", plot)
        self._move(1, 1)
        self.wait("return !document.querySelector('.hoverlayer *')")
        return said

    def click(self, selector: str) -> None:
        """Click what `selector` finds, as a person does: it has to be in sight and enabled."""
        element = self.driver.find_element("css selector", selector)
        self.run("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", element)
        element.click()

    def choose(self, section: str, name: str, option: str) -> str:
        """Choose `option` for `name` in a section, once drawn return what was chosen before."""
        before = self.run(CHOOSE, section, name, option)
        self.settle()
        return before

    def settle(self) -> None:
        """Wait until what was drawn is on the screen."""
        self.run("return new Promise((d) => requestAnimationFrame(() => setTimeout(d, 50)))")

    def console(self) -> list[str]:
        """Return what was logged since the last call, errors of scripts among it."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return every address off this machine that was asked for since the last call."""
        entries = (json.loads(e["message"])["message"] for e in self.driver.get_log("performance"))
        asked = [
            entry["params"]["request"]["url"]
            for entry in entries
            if entry["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith(LOCAL)]

    def print_pdf(self) -> bytes:
        """Return what the printer gets."""
        return base64.b64decode(self._cdp("Page.printToPDF", printBackground=True)["data"])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of what is in sight, or of the whole page."""
        found = self._cdp("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End the browser and its driver, and remove its files."""
        self.driver.quit()

    def _move(self, x: float, y: float) -> None:
        self._cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _cdp(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self.driver.execute_cdp_cmd(command, arguments)


def start_browser() -> Browser:
    """Start a Chromium; skips the test where there is none. `close` ends it."""
    try:
        return launch_browser()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def launch_browser() -> Browser:
    """Start a Chromium; FileNotFoundError where there is none. `close` ends it."""
    driver, program = _programs()
    options = ChromeOptions()
    options.binary_location = program
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(executable_path=driver, log_output=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "HTTP_PROXY"):  # the driver listens on this machine
            patch.delenv(name, raising=False)
        browser = Browser(Chrome(options=options, service=service))
    browser.set_online(False)
    browser.driver.set_script_timeout(3 * PATIENCE)
    return browser


def until(found: Callable[[], Any], what: str) -> Any:
    """Return what `found` returns as soon as that is truthy; AssertionError if it never is."""
    end = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < end, f"{what}: did not happen"
        time.sleep(0.02)
    return value


def _programs() -> tuple[str, str]:
    """Return the driver and the browser; FileNotFoundError unless both are here."""
    driver = shutil.which("chromedriver")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if not driver or not program:
        raise FileNotFoundError(
            "no browser here; install Debian's packages chromium and chromium-driver"
        )
    return driver, program
