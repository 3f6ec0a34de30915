"""A probe as one HTML file, with the look and the rules of a study's report (`html`).

Leaves out the numbers (`analysis.probed`, `analysis.locate`) and the charts (`probe_charts`).
"""

import json
from pathlib import Path

from stability.analysis.probe_records import Probed, read_probe
from stability.records.atomic_files import write_text
from stability.report.page.html import fill
from stability.report.page.probe_charts import probe_sections
from stability.report.terminal.probe import located_lines

__all__ = ["render_probe", "write_probe_page"]

PAGE_FILE = "probe.html"


def write_probe_page(folder: Path) -> Path:
    """Write `probe.html` from the records in `folder` and return its path.

    ValueError as `read_probe`. Also works while the probe runs.
    """
    path = folder / PAGE_FILE
    write_text(path, render_probe(read_probe(folder)))
    return path


def render_probe(probed: Probed, stamp: str = "") -> str:
    """Return the whole page; every name and message in it is shown as text, whatever it holds.

    `stamp` is as in `html.fill`.
    """
    steps = [str(step) for step in probed.steps()]
    described = {"the model's": probed.record.primary, **probed.record.shadows}
    return fill(
        "probe.html.j2",
        charts=[],
        sections=probe_sections(probed),
        stamp=stamp,
        probed=probed,
        steps=", ".join(steps if len(steps) <= 8 else [*steps[:4], "...", *steps[-3:]]),
        located=located_lines(probed),
        descriptions=[(name, json.dumps(text, indent=1)) for name, text in described.items()],
    )
