"""Studies of every kind, served once for each module of tests."""

import shutil
from urllib.parse import quote

import pytest

from stability.records.events import Event
from tests.stability.report.live.serving import HOSTILE, serving
from tests.stability.report.synthetic_probe import write_probe


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


@pytest.fixture(scope="module")
def client(runs):
    with serving(runs) as started:
        yield started
