"""Takes the pictures of what a user sees: report, dashboard, terminal and figure.

They are there to be looked at before a release, and some stand in the documentation. Nothing is
staged: the program itself trains, fails and is killed, and a headless Chromium and a terminal of 80
columns show what comes of it. `make screenshots` runs this: 8 to 10 minutes on two busy cores.

    PYTHONPATH=. python docs/scripts/take_screenshots.py [STUDY] [--out FOLDER] [--said]

All pictures go to FOLDER, by default build/screenshots. Those of `SHOWN` in shown_pictures.py go
to docs/ as well, if STUDY, the folder of the quickstart study, is given and answers what
README.md says. Those of `SAID` go there anyway; with `--said` they alone are taken, which needs no
browser.
Leaves out whether a picture is any good: that is for a person to say.
"""

import argparse
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

from docs.scripts.shown_pictures import MISTAKES, is_of_readme, renew, renew_said
from tests.stability.report.browser import Browser, launch_browser

ROOT = Path(__file__).resolve().parents[2]

COLUMNS, ROWS = 80, 50
FIRST_SCREENS = {400: (800, 1.5), 1280: (800, 1.0), 2000: (1250, 0.6)}
"""By width of the window, its height, and how many pixels of a picture one of its pixels gets."""
PAPER = (718, 1015)
"""Width and height in pixels between the browser's margins of A4."""
PATIENCE_S = 240
MANY = 60
THEMES: dict[str, TerminalTheme] = {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}

STUDY = """
name: {name}
question: {question}
base:
  model: {{depth: 2, width: 64, heads: 2, context: 64, vocab_size: 256}}
  attention: {{implementation: baseline}}
  data: {{source: stdlib, tokenizer: bytes}}
  optimizer: {{lr: 5.0e-4, warmup_steps: 20}}
  train: {{steps: {steps}, batch_size: 4, snapshot_steps: [4, 8], checkpoint_every: 8}}
  probe: {{every: 4, seeds: first}}
arms:
  baseline: {{}}
  candidate:
    attention: {{implementation: "{attention}"}}
  reference: {{role: reference, probe: {{every: 0}}}}
  nudge: {{nudge: {{ulps: 1}}, probe: {{every: 0}}}}
seeds: [0, 1]
yardstick: nudge
early_step: 8
policy: {{step: 8}}
"""
KERNELS = '''
"""Two attentions: one that is right, and one that gives up."""
import torch

calls = 0


def attend(q, k, v, *, causal, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def gives_up(q, k, v, *, causal, scale=None):
    global calls
    calls += 1
    if calls > 30:
        raise RuntimeError("my_kernels: out of shared memory: required 131072, limit 101376")
    return attend(q, k, v, causal=causal, scale=scale)
'''


def main() -> int:
    """Take all pictures; return 1 if those of docs/ had to stay as they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("study", nargs="?", type=Path, help="the folder of the quickstart study")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "screenshots")
    parser.add_argument("--said", action="store_true", help="only what needs no browser")
    asked = parser.parse_args()
    out: Path = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="screenshots-")))
        (work / "my_kernels.py").write_text(KERNELS, encoding="utf-8")
        shot_training(work, out)
        nowhere = work / "nowhere"  # else a mistake is told with what is nearest there
        nowhere.mkdir()
        shot_words(nowhere, out)
        if asked.said:
            renew_said(out)
            return 0
        browser = stack.enter_context(open_browser())
        study = asked.study.resolve() if asked.study else work / "runs" / "finished"
        shot_report(study, browser, out)
        shot_terminal(study, browser, out)
        shot_figures(study, out)
        shot_dashboards(work, study, browser, out)
    renew_said(out)
    if asked.study is None:
        say(f"{out} has the pictures; for the rest of docs/ give the quickstart study's folder")
        return 0
    return renew_docs(study, out)


# ---- what is shown


def shot_training(work: Path, out: Path) -> None:
    """Train a study to its end in a terminal, and take the terminal half way."""
    write_study(work, "finished", "Does my kernel matter?")
    shots = 0

    def look(screen: str) -> None:
        nonlocal shots
        if not shots and screen.count("finished") >= 3 and re.search(r" [5-9]/16", screen):
            shots += 1
            shot_screen(screen, "stability run study.yaml", "terminal-training", out)

    said = in_terminal(["run", "finished.yaml", "--wandb", "disabled"], work, look)
    if not shots:
        raise RuntimeError(f"the training was over before a picture was taken: {said}")


def shot_words(work: Path, out: Path) -> None:
    """Take what is said to somebody who begins: the help, mistakes, what runs on this machine."""
    shot_screen(in_terminal(["--help"], work), "stability --help", "terminal-help", out)
    said = ""
    for words in MISTAKES:
        said += f"$ stability {' '.join(words)}\n{in_terminal(words, work)}\n"
    shot_screen(said, "mistakes", "terminal-mistakes", out)
    said = in_terminal(["doctor"], work).partition("what runs here")
    shot_screen("".join(said[1:]), "stability doctor", "terminal-doctor", out)


def shot_report(study: Path, browser: Browser, out: Path) -> None:
    """Take the report at three widths, light and dark, then as it is printed."""
    stability(["report", str(study)])
    page = study / "report.html"
    for width in (400, 1280, 2000):
        for theme in ("light", "dark"):
            browser.open(page, width=width, dark=theme == "dark")
            browser.draw_all()
            shot_whole(out / f"report-{width}-{theme}.png", browser, width)
            shot_first(out / f"report-{width}-{theme}-first.png", browser, width)
    browser.open(page, width=1120, height=800, scale=1.5)
    browser.draw_all()
    browser.screenshot(out / "report-first-screen.png")
    browser.run("document.querySelector('#section-drift').scrollIntoView()")
    browser.settle()
    browser.screenshot(out / "report-drift.png")
    browser.open(page, width=1280)
    browser.draw_all()
    (out / "report-printed.pdf").write_bytes(browser.print_pdf())
    browser.set_size(*PAPER)
    browser.set_media("print")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.settle()
    browser.screenshot(out / "report-printed.png")
    browser.set_media("")


def shot_terminal(study: Path, browser: Browser, out: Path) -> None:
    """Take what `show` answers in 80 columns: of a study, and of one arm."""
    said = in_terminal(["show", study.name], study.parent)
    title = f"stability show runs/{study.name}"
    shot_screen(said, title, "terminal-show", out, browser)
    shot_screen(answer_of(said), title, "terminal-answer", out, browser)
    arm = "flash_fa2" if (study / "flash_fa2").is_dir() else "candidate"
    said = in_terminal(["show", study.name, arm], study.parent)
    shot_screen(said, f"stability show runs/{study.name} {arm}", "terminal-arm", out, browser)


def answer_of(said: str) -> str:
    """Return what `show` prints above the ladder, whose heading has two lines below a blank one."""
    lines = said.strip("\n").split("\n")
    plain = [Text.from_ansi(line).plain.strip() for line in lines]
    ladder = next(place for place, line in enumerate(plain) if re.match("arm +what changed", line))
    end = max(place for place in range(ladder) if not plain[place])
    return "\n".join(lines[:end])


def shot_figures(study: Path, out: Path) -> None:
    """Draw figures in the width of a paper's column."""
    for what in ("ladder", "drift", "heatmap"):
        stability(["figure", str(study), "--what", what, "--out", str(out / f"figure-{what}.png")])


def shot_dashboards(work: Path, study: Path, browser: Browser, out: Path) -> None:
    """Take the dashboard of no study, of studies in every state, of many; and a comparison."""
    empty, mixed, many = (work / name / "runs" for name in ("empty", "mixed", "many"))
    for folder in (empty, mixed, many):
        folder.mkdir(parents=True)
    with serving(empty, browser):
        shot_themes("dashboard-empty", browser, out)
        shot_first(out / "dashboard-empty-light-first.png", browser, 1280, 240)
    finished = work / "runs" / "finished"
    shutil.copytree(finished, mixed / "finished")
    fail(work, mixed)
    kill(work, mixed)
    with training(work, mixed, "going", updates=400), serving(mixed, browser):
        shot_themes("dashboard-mixed", browser, out)
    for number in range(MANY):
        shutil.copytree(finished, many / f"kernel-of-day-{number:02}")
    with serving(many, browser):
        shot_themes("dashboard-many", browser, out)
        shot_first(out / "dashboard-many-light-first.png", browser, 1280)
    shutil.copytree(study, mixed / "quickstart")
    with serving(mixed, browser) as address:
        browser.driver.get(f"{address}compare?study=finished&study=quickstart")
        browser.draw_all()
        shot_themes("compare", browser, out)
        browser.set_size(1280, 800)
        browser.run("document.querySelector('#side-by-side').scrollIntoView()")
        browser.settle()
        browser.screenshot(out / "compare-ladders.png")


def fail(work: Path, runs: Path) -> None:
    """Train a study whose candidate gives up after some calls."""
    write_study(work, "gives_up", "Is the new tiling worth it?", attention="my_kernels:gives_up")
    stability(["run", "gives_up.yaml", "--out", str(runs), "--wandb", "disabled"], work, rc=1)


def kill(work: Path, runs: Path) -> None:
    """Kill a study's process, as a machine that runs out of memory does."""
    with training(work, runs, "killed", updates=300):
        pass


@contextmanager
def training(work: Path, runs: Path, name: str, *, updates: int) -> Iterator[None]:
    """A study that trains and has made some updates, until it is killed at the end."""
    write_study(work, name, "Does a longer run tell more?", steps=updates)
    words = ["run", f"{name}.yaml", "--out", str(runs), "--wandb", "disabled"]
    with started(words, work) as process:
        log = runs / name / "baseline" / "seed-0" / "metrics.jsonl"
        wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") > 40, f"training of {name}")
        yield
        os.killpg(process.pid, signal.SIGKILL)  # with the process that trains


# ---- the program


def command(words: list[str]) -> list[str]:
    """Return the command line that runs a verb of this clone."""
    return [sys.executable, "-m", "stability.cli.main", *words]


def environment() -> dict[str, str]:
    """Return the variables of a terminal of 80 columns, with this clone's packages."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")
    }
    path = os.pathsep.join(str(each) for each in (ROOT, ROOT / "kernels"))
    return {**kept, "TERM": "xterm-256color", "LINES": str(ROWS), "PYTHONPATH": path}


def stability(words: list[str], folder: Path = ROOT, rc: int = 0) -> None:
    """Run a verb that has to end with exit code `rc`."""
    done = subprocess.run(
        command(words), cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode != rc:
        raise RuntimeError(f"stability {' '.join(words)}: {done.returncode}\n{done.stderr}")


@contextmanager
def started(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A verb that runs in the background; killed at the end."""
    with subprocess.Popen(
        command(words),
        cwd=folder,
        env={**environment(), "XDG_CACHE_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def write_study(
    work: Path, name: str, question: str, *, attention: str = "my_kernels:attend", steps: int = 16
) -> None:
    """Write the YAML file of a small study into `work`."""
    text = STUDY.format(name=name, question=question, attention=attention, steps=steps)
    (work / f"{name}.yaml").write_text(text, encoding="utf-8")


def in_terminal(
    words: list[str], folder: Path, look: Callable[[str], None] = lambda screen: None
) -> str:
    """Run a verb in a pseudo-terminal; return what is on its screen and above at the end.

    `look` is called with it whenever something was written.
    """
    child, terminal = pty.fork()
    if not child:
        os.chdir(folder)
        line = command(words)
        os.execvpe(line[0], line, environment())
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written, end = b"", time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            written += os.read(terminal, 65536)
        except OSError:  # Linux's way to say that the child has ended
            break
        look(screen_of(written))
    os.close(terminal)
    os.waitpid(child, 0)
    return screen_of(written)


def screen_of(written: bytes) -> str:
    """Return what stays of the written lines: a moving bar's are erased and written again."""
    text = re.sub(r"\x1b\[\?25[lh]", "", written.decode(errors="replace").replace("\r\n", "\n"))
    lines = [""]
    for part in re.split(r"(\n|\r|\x1b\[1A|\x1b\[2K)", text):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[1A":
            lines.pop()
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part != "\r":
            lines[-1] += part
    return "\n".join(lines)


# ---- the browser


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless Chromium, closed at the end."""
    browser = launch_browser()
    try:
        yield browser
    finally:
        browser.close()


@contextmanager
def serving(runs: Path, browser: Browser) -> Iterator[str]:
    """The dashboard of a folder in the browser: gives its address without the token."""
    with started(["dashboard", str(runs), "--port", "0"], runs.parent) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split(" ")[0]
        browser.set_online(True)
        browser.set_size(1280)
        browser.driver.get(address)
        browser.wait("return !!document.querySelector('.studies')")
        wait_for(lambda: "being read" not in browser.run("return document.body.innerText"), "list")
        yield address.split("?")[0]
        browser.driver.get("about:blank")
        browser.set_online(False)


def shot_themes(name: str, browser: Browser, out: Path) -> None:
    """Take the whole open page in both themes; it stays light."""
    for theme in ("dark", "light"):
        browser.set_theme(dark=theme == "dark")
        shot_whole(out / f"{name}-{theme}.png", browser, 1280)


def shot_first(path: Path, browser: Browser, width: int, height: int = 0) -> None:
    """Take what the open page shows before anybody scrolls, in a window of this width."""
    usual, scale = FIRST_SCREENS[width]
    browser.set_size(width, height or usual, scale)
    browser.settle()
    browser.screenshot(path)
    browser.set_size(width)


def shot_whole(path: Path, browser: Browser, width: int) -> None:
    """Take the open page in a window as high as it is: what sticks to an edge hides nothing."""
    height = browser.run("return document.documentElement.scrollHeight")
    browser.set_size(width, max(200, height))
    browser.settle()
    browser.screenshot(path)
    browser.set_size(width)


def shot_screen(
    screen: str, title: str, name: str, out: Path, browser: Browser | None = None
) -> None:
    """Draw a terminal's screen on a light and on a dark ground; with a browser take it too."""
    text = Text.from_ansi(screen.strip("\n"))
    for theme, colours in THEMES.items():
        console = Console(width=COLUMNS, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(text)
        drawn = out / f"{name}-{theme}.svg"
        drawn.write_text(console.export_svg(title=title, theme=colours), encoding="utf-8")
        if browser is None:
            continue
        width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn.read_text("utf-8"))[0]
        browser.open(drawn, width=round(float(width)), height=round(float(height)))
        browser.screenshot(out / f"{name}-{theme}.png")


def wait_for(happened: Callable[[], object], what: str) -> None:
    """Return once `happened` is true; RuntimeError if it is not within PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: did not happen within {PATIENCE_S} s")
        time.sleep(0.1)


# ---- the documentation


def renew_docs(study: Path, out: Path) -> int:
    """Copy the pictures that pages show, made small; return 1 if the answer is not README's."""
    said = in_terminal(["show", study.name], study.parent)
    if not is_of_readme(said, (ROOT / "README.md").read_text("utf-8")):
        say(f"{study} does not answer what README.md says: docs/ stays as it was; see {out}")
        return 1
    renew(out)
    return 0


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
