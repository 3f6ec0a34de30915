"""A study's YAML that anybody may have written: it is sound, or one line says what is wrong in it.

Nothing is written before that, and nothing is trained here: where a study is sound, the verb ends
at the place where its first byte would be written.
"""

import copy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from stability.cli.output import HOLDS, WRONG
from stability.config import load
from tests.conftest import tiny_content
from tests.stability.fuzz.hostile import ANY, VALUES, change
from tests.stability.fuzz.verbs import call, complaints

SAMPLE = 40
LONG = 5000

WORDS = ("base", "arms", "seeds", "role", "until", "numerics", "trainer", "probe", "fault", "~")
TEXTS = (
    *("&a [*a, *a]", "*nobody", "!!python/object:os.system {}", "!!int abc", "!!set {1, 2}"),
    *("2020-13-41", "0x_", "1e999999", "- - - -", "? [1]\n: 2", "%YAML 9.9\n---", "---\n---", "\t"),
    *(
        "<<: {a: 1}",
        "1_000",
        "0o17",
        ".inf",
        "=",
        "!!binary x",
        "'",
        '"\\x',
        "{" * 3000,
        "[" * 3000,
    ),
)


class _SoundError(SystemExit):
    """The first byte would be written, and then training begin."""


@pytest.fixture
def untrained(monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise _SoundError(HOLDS)

    monkeypatch.setattr("stability.study.run_study.seal_protocol", stop)  # the first write


def _write(path: Path, draw: Random, text: Path) -> str:
    """Write a study that is somehow odd; return how."""
    content: dict[str, Any] = copy.deepcopy(tiny_content(text))
    for _ in range(draw.choice((1, 1, 2))):
        change(content, draw, (*VALUES, *WORDS))
    how = draw.choice(("values", "values", "text", "bytes"))
    try:
        plain = yaml.safe_dump(content, sort_keys=False, allow_unicode=draw.random() < 0.5)
    except (ValueError, UnicodeError, yaml.YAMLError):  # no YAML can say it
        plain, how = yaml.safe_dump(tiny_content(text)), "text"
    if how == "text":
        lines = plain.splitlines(keepends=True)
        at = draw.randrange(len(lines))
        name = lines[at].rpartition(":")[0]
        lines[at] = draw.choice((f"{name}: {draw.choice(TEXTS)}\n", f"{draw.choice(TEXTS)}\n"))
        plain = "".join(lines)
    path.unlink(missing_ok=True)
    path.write_text(plain, encoding="utf-8", errors="surrogatepass")
    if how == "bytes":
        data = path.read_bytes()
        path.unlink()
        damage = draw.choice(ANY)
        damage(path, data, draw)
        how = damage.__name__
    return how


def _fuzz(seeds: range, folder: Path, text: Path) -> tuple[list[str], int]:
    """Return complaints with their seeds, and how many studies were refused."""
    found, refused = [], 0
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        path, out = place / "study.yaml", place / "runs"
        how = _write(path, Random(seed), text)
        answer = call(["run", str(path), "--out", str(out)])
        refused += answer.code == WRONG
        wrong = complaints(answer, {path: how})
        if answer.code not in (HOLDS, WRONG):
            wrong.append(f"exit code {answer.code}: {answer.err}")
        if out.exists():
            wrong.append(f"has written {sorted(out.rglob('*'))}")
        found += [f"seed {seed}, {how}: {each}" for each in wrong]
    return found, refused


@pytest.mark.usefixtures("untrained")
def test_a_sample_of_odd_studies(tmp_path, text_file):
    found, refused = _fuzz(range(SAMPLE), tmp_path, text_file)
    assert not found, "\n".join(found)
    assert refused > SAMPLE / 2


@pytest.mark.long
@pytest.mark.usefixtures("untrained")
def test_five_thousand_odd_studies(tmp_path, text_file):
    found, _ = _fuzz(range(LONG), tmp_path, text_file)
    assert not found, "\n".join(found[:20])


@pytest.mark.usefixtures("untrained")
def test_a_loader_that_lets_an_error_of_yaml_out_is_caught(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(load.yaml, "YAMLError", KeyboardInterrupt)
    found, _ = _fuzz(range(40), tmp_path, text_file)
    assert "ScannerError" in str(found) or "ParserError" in str(found)
