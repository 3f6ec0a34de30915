"""`stability experiment`: what it writes, what stays after a failure, what its exit code says."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from experiments.kit import runner as kit
from experiments.kit.record import read_experiment
from experiments.kit.results_table import BEGIN, END
from experiments.kit.runner import load
from stability.cli import experiment as verb
from stability.cli.main import main
from stability.config import shipped

TOY = '''"""Toy numbers fall.

Claim: the number falls
Source: a book
Published: 4 to 1
Varies: the place
Measured: the number
Refuted if: it rises
Sizes: cpu: 2 places; gpu: 3; quick: 1
"""
from dataclasses import dataclass

from experiments.kit.record import Findings
from experiments.kit.stated_tests import StatedTest
from stability.report.paper.style import new_figure


@dataclass(frozen=True)
class Settings:
    places: tuple[int, ...]


SIZES = {"quick": Settings((1,)), "cpu": Settings((1, 2)), "gpu": Settings((1, 2, 3))}


def measure(settings):
    rows = [{"place": place, "number": 4.0 / place} for place in settings.places]
    falls = StatedTest(statement="falls", found="0.5x", decision="holds")
    rerun = StatedTest(statement="rerun", found="0", decision=CONTROL)
    said = f"{len(rows)} places"
    return Findings(measured=said, published=[falls], controls=[rerun], rows=rows)


def draw(rows):
    figure = new_figure("column", 2)
    figure.add_subplot().plot([row["place"] for row in rows], [row["number"] for row in rows])
    return figure
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkout with two experiments of which the second's control is refuted."""
    experiments = tmp_path / "experiments"
    experiments.mkdir()
    (experiments / "README.md").write_text(f"By hand.\n{BEGIN}\n{END}\n")
    (experiments / "no_experiment.py").write_text("raise RuntimeError\n")
    (experiments / "toy.py").write_text(TOY.replace("CONTROL", "'holds'"))
    (experiments / "unsound.py").write_text(TOY.replace("CONTROL", "'refuted'"))
    (experiments / "kit").symlink_to(Path(kit.__file__).parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(verb, "_run_alone", _run_here)
    return experiments


def _run_here(folder, kept, name, size, redraw):
    """Do in this process, where it can be watched, what the verb has a process of its own do."""
    return kit.run_experiments(folder, name, size, redraw, kept)


def _said(capsys) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_cpu_size_keeps_record_figure_and_row(folder, capsys):
    assert main(["experiment", "toy"]) == 0
    assert "agrees: yes" in _said(capsys)
    record = read_experiment(folder / "results" / "toy.cpu.json")
    assert (record.name, record.size, record.measured) == ("toy", "cpu", "2 places")
    assert record.settings == {"places": [1, 2]}
    assert record.rows == [{"place": 1, "number": 4.0}, {"place": 2, "number": 2.0}]
    assert record.versions["torch"] == torch.__version__
    assert record.hardware["name"]
    assert (folder / "results" / "toy.cpu.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "README.md").read_text()
    assert page.startswith(f"By hand.\n{BEGIN}\n")
    assert "| [toy](#toy-cpu) |" in page
    assert "unsound" not in page
    files = sorted(path.name for path in (folder / "results").iterdir())
    assert files == ["toy.cpu.json", "toy.cpu.png"]  # and nothing half written


def test_quick_size_keeps_nothing(folder, capsys):
    before = (folder / "README.md").read_text()
    assert main(["experiment", "toy", "--size", "quick"]) == 0
    assert "1 places" in _said(capsys)
    assert not (folder / "results").exists()
    assert (folder / "README.md").read_text() == before


@pytest.mark.parametrize("size", ["quick", "cpu"])
@pytest.mark.parametrize(("word", "code"), [("refuted", 1), ("undecided", 3)])
def test_a_control_that_does_not_hold_is_an_exit_code_whatever_was_published(
    folder, size, word, code, capsys
):
    (folder / "unsound.py").write_text(TOY.replace("CONTROL", f"'{word}'"))
    assert main(["experiment", "unsound", "--size", size]) == code
    assert "agrees: yes: 1 of 1 holds" in (said := _said(capsys))
    assert f"a control is {word}: the rest proves nothing yet" in said
    assert (folder / "results" / "unsound.cpu.json").exists() == (size == "cpu")


def test_all_runs_each_and_one_refuted_control_fails_it_whatever_is_undecided(folder):
    (folder / "vague.py").write_text(TOY.replace("CONTROL", "'undecided'"))
    assert main(["experiment", "all"]) == 1
    page = (folder / "README.md").read_text()
    assert page.index("[toy](#toy-cpu)") < page.index("[unsound](#unsound-cpu)")


def test_all_goes_on_after_one_that_cannot_run(folder, capsys):
    text = (folder / "toy.py").read_text()
    assert "def measure(settings" in text
    broken = text.replace(
        "def measure(settings",
        "def measure(other):\n    raise ValueError('no luck')\n\n\ndef unused(settings",
    )
    (folder / "a_toy.py").write_text(broken)
    assert main(["experiment", "all"]) == 1
    assert "a_toy: no luck" in _said(capsys)
    assert (folder / "results" / "toy.cpu.json").exists()
    with pytest.raises(SystemExit, match="2"):
        main(["experiment", "a_toy"])


def test_without_a_name_all_are_listed(folder, capsys):
    assert main(["experiment", "toy"]) == 0
    capsys.readouterr()
    assert main(["experiment"]) == 0
    said = _said(capsys)
    assert "toy Toy numbers fall cpu: yes" in said
    assert "unsound Toy numbers fall not run" in said
    assert "no_experiment" not in said


def test_an_unknown_name_is_answered_with_the_nearest(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["experiment", "tay"])
    assert "or all, got 'tay'; nearest: toy" in _said(capsys)


def test_gpu_size_needs_a_gpu_before_anything_runs(folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(["experiment", "toy", "--size", "gpu"])
    assert "got 'gpu' without a CUDA device; try cpu" in _said(capsys)
    assert not (folder / "results").exists()


def test_redraw_draws_what_is_kept_and_measures_nothing(folder):
    assert main(["experiment", "toy"]) == 0
    results, page = folder / "results", folder / "README.md"
    record, picture, row = (
        path.read_bytes() for path in (results / "toy.cpu.json", results / "toy.cpu.png", page)
    )
    (results / "toy.cpu.png").unlink()
    page.write_text(f"By hand.\n{BEGIN}\n{END}\n")
    (folder / "toy.py").write_text(TOY.replace("CONTROL", "1 / 0"))
    assert main(["experiment", "all", "--redraw"]) == 0  # unsound was never run
    assert (results / "toy.cpu.json").read_bytes() == record
    assert (results / "toy.cpu.png").read_bytes() == picture
    assert page.read_bytes() == row


def test_redraw_of_what_was_never_run_says_what_writes_it(folder, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["experiment", "toy", "--redraw"])
    assert "no such file; `stability experiment` writes it" in _said(capsys)


@pytest.mark.parametrize("broken", ["new_figure(", "Findings("])
def test_after_an_error_the_old_figure_and_row_stand_and_a_measurement_is_not_lost(folder, broken):
    assert main(["experiment", "toy"]) == 0
    picture, page = folder / "results" / "toy.cpu.png", folder / "README.md"
    before = picture.read_bytes(), page.read_bytes()
    changed = TOY.replace("CONTROL", "'holds'").replace("4.0 / place", "8.0 / place")
    (folder / "toy.py").write_text(changed.replace(f" {broken}", f" nothing.{broken}"))
    with pytest.raises(NameError):
        main(["experiment", "toy"])
    assert (picture.read_bytes(), page.read_bytes()) == before
    number = read_experiment(picture.with_suffix(".json")).rows[0]["number"]
    assert number == (8.0 if broken == "new_figure(" else 4.0)
    assert len(list(picture.parent.iterdir())) == 2


def test_a_damaged_result_is_named_and_the_page_stays(folder, capsys):
    assert main(["experiment", "toy"]) == 0
    result = folder / "results" / "toy.cpu.json"
    result.write_text(result.read_text().replace("4.0", "5.0"))
    before = (folder / "README.md").read_text()
    with pytest.raises(SystemExit, match="2"):
        main(["experiment", "all", "--redraw"])
    assert "toy.cpu.json: must have the checksum" in _said(capsys)
    assert (folder / "README.md").read_text() == before


def _git(folder, *words):
    author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *words], cwd=folder.parent, check=True, capture_output=True)


def test_the_commit_is_marked_only_if_code_differs_from_it(folder):
    result = folder / "results" / "toy.cpu.json"
    assert main(["experiment", "toy"]) == 0
    assert read_experiment(result).commit == ""
    _git(folder, "init", "-q")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", "all")
    for _ in range(2):  # the second time record, figure and page differ from the commit
        assert main(["experiment", "toy"]) == 0
    commit = read_experiment(result).commit
    assert len(commit) >= 7
    assert "-" not in commit
    (folder / "toy.py").write_text(TOY.replace("CONTROL", "str('holds')"))
    assert main(["experiment", "toy"]) == 0
    assert read_experiment(result).commit == f"{commit}-changed"


def test_outside_of_a_checkout_the_folder_beside_the_package_is_taken(tmp_path, monkeypatch, capfd):
    """By a process in which nobody's module of that name is in the way."""
    (tmp_path / "experiments.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    assert main(["experiment"]) == 0
    assert "stable_fig3" in capfd.readouterr().out
    assert main(["experiment", "stable_fig33"]) == 2
    assert "nearest: stable_fig3" in capfd.readouterr().err


def test_an_installed_package_is_not_written_into(folder, tmp_path, monkeypatch, capsys):
    installed = tmp_path / "packages" / "stability_experiments" / "experiments"
    installed.parent.mkdir(parents=True)
    folder.rename(installed)
    monkeypatch.setattr(shipped, "experiments", lambda: installed)
    page = (installed / "README.md").read_text()
    assert main(["experiment", "toy"]) == 0
    kept = tmp_path / "experiments" / "results"
    assert sorted(path.name for path in kept.iterdir()) == ["toy.cpu.json", "toy.cpu.png"]
    assert not (installed / "results").exists()
    assert (installed / "README.md").read_text() == page
    # what came with the package is listed until it was run here
    (installed / "results").mkdir()
    record = (kept / "toy.cpu.json").rename(installed / "results" / "toy.cpu.json")
    capsys.readouterr()
    assert main(["experiment"]) == 0
    assert "toy Toy numbers fall cpu: yes" in _said(capsys)
    assert record.exists()


def test_an_experiment_hides_no_module_of_its_name(folder):
    (folder / "json.py").write_text(TOY.replace("CONTROL", "'holds'"))
    assert load(folder, "json").SIZES["quick"].places == (1,)
    import json as imported

    assert imported is json
