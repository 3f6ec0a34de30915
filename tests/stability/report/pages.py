"""The page of a study, and the charts' data in a page, as tests read them."""

import json
import re
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.report.page.html import render
from tests.stability.report.typed_arrays import decode

__all__ = ["figures_of", "mean_of", "page_of", "traces_of"]


def page_of(study_dir: Path) -> str:
    """Return the study's page without plotly's own source, which is not ours to check."""
    study = read_study(study_dir)
    return render(study, ladder_of(study)).replace(get_plotlyjs(), "")


def figures_of(page: str) -> dict[str, Any]:
    """Return the plotly figures of a page by the key of their chart."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data
    return json.loads(data.group(1), object_hook=decode)["figures"]


def traces_of(page: str, key: str) -> list[dict[str, Any]]:
    """Return what one chart of a page draws."""
    return figures_of(page)[key]["data"]


def mean_of(study_dir: Path, arm: str, name: str) -> dict[int, float]:
    """Return a metric's mean over the seeds of an arm, by step, as the records say."""
    found = read_study(study_dir).arm(arm)
    assert found
    seeds = [run.series(name) for run in found.runs.values()]
    return {step: sum(seed[step] for seed in seeds) / len(seeds) for step in seeds[0]}
