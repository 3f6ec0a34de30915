"""The pictures of the program that pages of the documentation show: their names, size and age.

`take_screenshots.py` takes them; `.ci/release_check.py` asks here whether what they show has
changed since. Leaves out how a picture is taken.
"""

import hashlib
import html
import json
import re
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

SHOWN = {
    "quickstart.png": "report-first-screen.png",
    "screenshots/report-400.png": "report-400-light-first.png",
    "screenshots/report-400-dark.png": "report-400-dark-first.png",
    "screenshots/report-1280.png": "report-1280-light-first.png",
    "screenshots/report-1280-dark.png": "report-1280-dark-first.png",
    "screenshots/report-2000.png": "report-2000-light-first.png",
    "screenshots/report-2000-dark.png": "report-2000-dark-first.png",
    "screenshots/report-printed.png": "report-printed.png",
    "screenshots/drift.png": "report-drift.png",
    "screenshots/dashboard-empty.png": "dashboard-empty-light-first.png",
    "screenshots/dashboard.png": "dashboard-mixed-light.png",
    "screenshots/dashboard-dark.png": "dashboard-mixed-dark.png",
    "screenshots/dashboard-many.png": "dashboard-many-light-first.png",
    "screenshots/compare.png": "compare-ladders.png",
    "screenshots/answer.png": "terminal-answer-dark.png",
    "screenshots/figure.png": "figure-drift.png",
    "screenshots/figure-ladder.png": "figure-ladder.png",
}
"""What pages of the documentation show, below docs/, and which of the pictures it is."""

SAID = {
    "screenshots/help.svg": "terminal-help-light.svg",
    "screenshots/mistakes.svg": "terminal-mistakes-dark.svg",
    "screenshots/doctor.svg": "terminal-doctor-light.svg",
    "screenshots/training.svg": "terminal-training-light.svg",
    "screenshots/training-dark.svg": "terminal-training-dark.svg",
}
"""The same of terminals whose words are no study's, so that any machine can take them."""
MISTAKES = (
    ["run", "study.yaml"],
    ["show", "runs", "--jsn"],
    ["init", "--template", "kernle"],
    ["check", "flash:fa9"],
    ["verdict"],
)
"""Commands of which the picture of mistakes shows what is said, in an empty folder."""

MADE_OF = Path("docs") / "screenshots" / "made_of.json"
SOURCES = "stability/report"
"""All that shows something lies here: a change of it may make a picture old. Left out are the
numbers, which are README's, and the sentences of `stability/analysis`."""
DRAWN = ("terminal/progress.py", "terminal/time_left.py")
"""What of it pictures of `SAID` alone show: any machine takes those, and a test reads them."""

COLOURS, MOST_OFF = 256, 24
"""Of a committed picture: so many stay, a third of the bytes, and none is off by more of 255."""
MOST_BYTES = 150_000


def renew(out: Path) -> None:
    """Write the pictures that pages show, made small, and what they were made of.

    RuntimeError for one that is too large, or whose colours are off.
    """
    for target, source in SHOWN.items():
        with Image.open(out / source) as picture:
            whole = picture.convert("RGB")
        # other methods give up the colour of a thin line, by which an arm is known
        method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
        small = whole.quantize(COLOURS, method=method, dither=dither)
        off = np.asarray(ImageChops.difference(whole, small.convert("RGB"))).max()
        if off > MOST_OFF:
            raise RuntimeError(f"{target}: colours must be off by {MOST_OFF} at most, are by {off}")
        small.save(DOCS / target, optimize=True)
        size = (DOCS / target).stat().st_size
        if size > MOST_BYTES:
            raise RuntimeError(f"{target}: must have at most {MOST_BYTES} bytes, has {size}")
    (ROOT / MADE_OF).write_text(json.dumps(made_of(ROOT), indent=2) + "\n", encoding="utf-8")


def renew_said(out: Path) -> None:
    """Write the pictures of `SAID`, whose letters are the reader's own: none is fetched."""
    for target, source in SAID.items():
        drawn = (out / source).read_text(encoding="utf-8")
        drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
        # rich names each drawing by a random number
        drawn = re.sub(r"terminal-\d+", "terminal", drawn)
        (DOCS / target).write_text(drawn, encoding="utf-8")


def words_of(drawn: str) -> str:
    """Return what stands in the drawing of a terminal, without white space."""
    words = "".join(re.findall(r"<text[^>]*>([^<]*)</text>", drawn))
    return "".join(html.unescape(words).split())


def is_of_readme(said: str, readme: str) -> bool:
    """Return whether each line of README's answer is printed too."""
    block = next(text for text in re.findall(r"```text\n(.*?)```", readme, re.DOTALL))
    printed = {line.strip() for line in Text.from_ansi(said).plain.splitlines()}
    return all(line.strip() in printed for line in block.splitlines())


def made_of(root: Path) -> dict[str, str]:
    """Return the hash of each file that the looks of a page or of the terminal are written in."""
    paths = (root / SOURCES).rglob("*")
    drawn = [root / SOURCES / name for name in DRAWN]
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(paths)
        if path.is_file() and "__pycache__" not in path.parts and path not in drawn
    }


def changed_since(root: Path) -> list[str]:
    """Return the files that have changed, come or gone since the pictures were taken."""
    then = json.loads((root / MADE_OF).read_text(encoding="utf-8"))
    now = made_of(root)
    return [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
