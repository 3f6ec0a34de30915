"""Whatever lies where a record should be, a verb ends in time, in words, and invents no number.

The sample of `make test` is the beginning of the long run: a seed is the number of its trial, and
`python -m tests.stability.fuzz FIRST LAST FOLDER` repeats any of them.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stability.analysis import study_records
from stability.records import metric_log, sealed_json
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths
from stability.records.sealed_json import read_sealed
from tests.stability.fuzz import hostile
from tests.stability.fuzz.records import CANDIDATE, Copy, make_records
from tests.stability.fuzz.trials import Fuzzer
from tests.stability.fuzz.verbs import READERS, call, complaints, numbers_in

SAMPLE = 6
LONG = 2200
"""Trials, of 4.6 records each on average."""


@pytest.fixture(scope="session")
def source(tmp_path_factory, text_file) -> Path:
    return make_records(tmp_path_factory.mktemp("records"), text_file)


@pytest.fixture
def copy(source, tmp_path) -> Copy:
    return Copy(source, tmp_path)


def test_every_kind_of_record_is_there(copy):
    kinds = copy.kinds
    assert {Path(kind).name for kind in kinds} >= {
        *("study.json", "protocol.json", "window.json", "manifest.json", "metrics.jsonl"),
        *("witness.json", "seed-0.json", "step.safetensors", "step.ckpt", "id.txt", "probe.json"),
    }
    for part in (
        "assay",
        "distances",
        "drifts",
        "waterfalls",
        "snapshots",
        "predictions",
        "checkpoints",
    ):
        assert any(f"/{part}/" in kind for kind in kinds), part


@pytest.mark.slow
def test_whole_records_are_refused_by_no_verb(copy):
    report = Fuzzer(copy, verbs=0).whole()
    assert not report.found


def test_a_sample_of_damaged_records(copy):
    report = Fuzzer(copy, verbs=2).run(range(SAMPLE))
    assert not report.found, "\n".join(report.found)
    assert report.records >= 2 * SAMPLE


@pytest.mark.long
def test_ten_thousand_damaged_records(copy):
    report = Fuzzer(copy, verbs=4).run(range(LONG))
    assert not report.found, "\n".join(report.found[:20])
    assert report.records >= 10_000


def test_a_trial_leaves_the_records_as_they_were(copy, source):
    Fuzzer(copy, verbs=0).run(range(40))
    before = {p.relative_to(source): p.read_bytes() for p in source.rglob("*") if p.is_file()}
    after = {
        p.relative_to(copy.folder): p.read_bytes() for p in copy.folder.rglob("*") if p.is_file()
    }
    assert after == before


def _planted(copy: Copy, kind: str, spoil: Callable[[Path], object], *words: str) -> list[str]:
    """Return the complaints about a verb where one record is spoilt."""
    path = copy.kinds[kind][0]
    content = path.read_bytes()
    with copy.without(path):
        path.write_bytes(content)
        spoil(path)
        return complaints(call([*words, str(copy.folder / "tiny")], seconds=5), {path: "planted"})


def _reseal(**changes: object) -> Callable[[Path], None]:
    return lambda path: sealed_json.write_sealed(path, {**read_sealed(path, ""), **changes})


def _as_pipe(path: Path) -> None:
    path.unlink()
    hostile._fifo(path, b"", None)  # pyright: ignore[reportArgumentType]


def test_a_reader_that_does_not_look_at_types_is_caught(copy, monkeypatch):
    spoilt = ("tiny/study.json", _reseal(arms=[3]), "show")
    assert not _planted(copy, *spoilt)
    monkeypatch.setattr(sealed_json, "check_type", lambda *_: None)
    assert "TypeError" in str(_planted(copy, *spoilt))


@pytest.mark.slow
def test_a_reader_that_opens_pipes_is_caught(copy, monkeypatch):
    spoilt = ("tiny/study.json", _as_pipe, "verdict")
    assert not _planted(copy, *spoilt)
    monkeypatch.setattr(sealed_json, "read_plain", Path.read_bytes)
    assert "no end after 5 s" in str(_planted(copy, *spoilt))


def test_a_reader_that_takes_any_depth_is_caught(copy, monkeypatch):
    spoilt = ("tiny/protocol.json", lambda path: path.write_bytes(b"[" * 10**5), "verdict")
    assert not _planted(copy, *spoilt)
    monkeypatch.setattr(sealed_json, "parse_json", sealed_json.json.loads)
    assert "RecursionError" in str(_planted(copy, *spoilt))


def test_a_message_that_a_terminal_obeys_is_caught(copy, monkeypatch):
    spoilt = ("tiny/study.json", _reseal(arms=hostile.ESCAPES), "show")
    assert not _planted(copy, *spoilt)
    monkeypatch.setattr("stability.cli.main.readable", lambda words: words)
    monkeypatch.setattr(study_records, "read_study_file", _raise_escapes)
    assert "that a terminal obeys" in str(_planted(copy, *spoilt))


def _raise_escapes(_: Path) -> None:
    raise ValueError(f"study.json: {hostile.ESCAPES}")


def test_a_number_that_is_not_on_record_is_caught(copy, monkeypatch):
    """A reader that skips checksums prints what a flipped bit has made of a drift."""
    path = RunPaths.for_run(copy.folder / "tiny", CANDIDATE, 0).metrics
    text = path.read_text()
    *before, last = re.finditer(rf'"{drift_name("all", "rel_l2")}": ([^,]+)', text)
    assert before
    spoilt = f"{text[: last.start(1)]}0.734375{text[last.end(1) :]}"
    path.unlink()
    path.write_text(spoilt)
    reader = next(each for each in READERS if each.name == "show --json")
    fuzzer = Fuzzer(copy, verbs=0)

    def strange() -> set[str]:
        printed = numbers_in(call(reader.words(copy.folder)).out)
        path.unlink()
        path.write_text(text)
        found = fuzzer._strange(reader, printed, path)
        path.unlink()
        path.write_text(spoilt)
        return found

    assert not strange()
    monkeypatch.setattr(metric_log, "_is_sealed", lambda _: True)
    monkeypatch.setattr(study_records, "_fault", lambda *_, **__: "")
    assert "0.734375" in strange()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: data[: len(data) // 2], "seed-0: metrics.jsonl has lost its end"),
        (lambda data: data.replace(b": 0.", b": 1.", 1), "seed-0: metrics.jsonl is damaged in its"),
    ],
)
def test_a_run_whose_log_is_damaged_is_not_forked(copy, spoil, said):
    """Else numbers that nobody has measured would stand in the fork's log under a new seal."""
    path = RunPaths.for_run(copy.folder / "tiny", CANDIDATE, 0).metrics
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(spoil(data))
    reader = next(each for each in READERS if each.name == "fork")
    assert said in call(reader.words(copy.folder)).err
    assert not (copy.folder.parent / "fork").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depth": 3}, "must hold the "),
        ({"depth": 10**9}, "depth must be at most 4096"),
        ({"width": 65536}, "must hold the "),
        ({"context": 10**9}, "must hold the "),
        ({"qk_norm": True}, "must hold the "),
        ({"context": 31, "vocab_size": 257}, "must fit the manifest's model"),
    ],
)
@pytest.mark.parametrize("verb", ["deviate from a run", "check"])
def test_a_model_that_is_not_the_snapshots_is_not_built(copy, verb, changes, said):
    """Under a right seal a manifest may ask for a model that no memory holds."""
    run = RunPaths.for_run(copy.folder / "tiny", CANDIDATE, 0)
    content = read_sealed(run.manifest, "")
    content["config"]["model"] |= changes
    run.manifest.unlink()
    sealed_json.write_sealed(run.manifest, content)
    reader = next(each for each in READERS if each.name == verb)
    answer = call(reader.words(copy.folder), 5, reader.stubs)
    assert said in answer.err
    assert not complaints(answer, {run.manifest: "planted"})
