"""A study of commands on the dashboard: listed as it stands, and shown as its report."""

import html
from pathlib import Path

import pytest

from tests.stability.recorder.recording import Recording, words
from tests.stability.report.live.serving import serving, settled


@pytest.mark.slow
def test_a_study_of_commands_is_listed_and_its_page_is_its_report(tmp_path: Path) -> None:
    study = Recording(tmp_path, words("evaluates.py"))
    assert study.record("baseline") == 0
    assert study.record("nudge", options=("--nudge", "1")) == 0
    assert study.record("lr_x2", "--lr", "0.02") == 0
    with serving(tmp_path) as client:
        listed = html.unescape(settled(client))
        assert "3 finished of 3 runs" in listed
        assert 'href="/study/study/"' in listed
        page = html.unescape(client.page("/study/study/"))
    for shown in ("What changed in each arm", "lr_x2", "--lr", "Held-out loss"):
        assert shown in page
