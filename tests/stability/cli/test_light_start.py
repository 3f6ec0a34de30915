"""Verbs start light: no heavy library is loaded by help, by a mistake, or to look at a study."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stability.cli.main import VERBS, _let_idle_threads_sleep
from stability.records.identity import WAITING
from tests.sampling import one_in
from tests.stability.report.synthetic import write_synthetic

ROOT = Path(__file__).parents[3]
HEAVY = {
    "datasets",
    "lightning",
    "matplotlib",
    "numba",
    "pandas",
    "plotly",
    "scipy",
    "statsmodels",
    "torch",
    "transformers",
    "uvicorn",
    "wandb",
}
CODE = """
import json, sys
from stability.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
sys.stderr.write("\\n" + json.dumps([code, sorted(sys.modules)]))
"""


def _start(*words: object) -> tuple[int, set[str], str]:
    """Run a command line in a fresh process; return its exit code, modules and error lines."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, words)],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", "HOME": "/nonexistent"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said, _, last = done.stderr.rpartition("\n")
    code, modules = json.loads(last)
    return code, set(modules), said


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """The folder of a study of two seeds."""
    return write_synthetic(tmp_path_factory.mktemp("studies") / "quickstart")


@pytest.mark.parametrize("verb", one_in(4, VERBS))
def test_help_loads_nothing_heavy(verb):
    code, modules, _ = _start(verb, "--help")
    assert code == 0
    assert not modules & (HEAVY | {"numpy", "rich"})


def _with_profile(content: dict) -> None:
    content["arms"]["flash_fa2"]["attention"]["profile"] = "fa22"


MISTAKES = {
    "an unknown key": (lambda c: c["base"].update(trian={}), "trian: unknown key; nearest: train"),
    "a misspelled profile": (_with_profile, "must be a profile of flash, got 'fa22'"),
    "a misspelled arm": (lambda c: c.update(yardstick="fp23"), "must be an arm, got 'fp23'"),
    "a Trainer that ends early": (
        lambda c: c["base"]["train"].update(trainer={"fast_dev_run": True}),
        "base.train.trainer.fast_dev_run: must not be given, got True: it would end the run early",
    ),
    "a Trainer of two nodes": (
        lambda c: c["base"]["train"].update(trainer={"num_nodes": 2, "strategy": "ddp"}),
        "base.train.trainer.num_nodes: must not be given, got 2: a run is laid out over ranks",
    ),
    "a wrong value": (lambda c: c["base"]["train"].update(steps="many"), "train.steps"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_yaml_is_told_before_anything_heavy_is_loaded(tmp_path, mistake):
    edit, said = MISTAKES[mistake]
    content = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    edit(content)
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    code, modules, error = _start("run", path, "--out", tmp_path)
    assert (code, said in error) == (2, True), error
    assert not modules & HEAVY
    assert list(tmp_path.iterdir()) == [path], "nothing is written before the YAML is right"


@pytest.mark.parametrize(
    ("words", "said"),
    one_in(
        4,
        [
            (["run", "missing.yaml"], "missing.yaml: must be a study's YAML file"),
            (["run", "missing.yaml", "--wandbb", "online"], "--wandbb"),
            (["rum"], "no verb 'rum'; nearest: run"),
            (["show", "nowhere"], "folder must hold study.json"),
            (["report", "nowhere"], "folder must hold study.json"),
            (["verdict", "nowhere"], "nowhere: must be the folder of a study"),
            (["verify", "nowhere"], "nowhere: must exist"),
            (["figure", "nowhere"], "nowhere: must be the folder of a study"),
            (["figure", "nowhere", "--what", "lader"], "what must be one of ladder"),
            (["workspace", "nowhere"], "nowhere: must be the folder of a study"),
            (["dashboard", "nowhere"], "runs must be a folder"),
            (["fork", "nowhere", "--at", "1"], "run must be a run's folder"),
            (["bisect", "nowhere", "--at", "1"], "run must be a run's folder"),
            (["compare", "nowhere", "elsewhere"], "nowhere: must exist"),
            (["check", "flash:fa2", "--dtype", "int8"], "dtype must be among bf16, fp16, fp32"),
            (["check", "flash:fa2", "--fault", "dk_gian"], "got 'dk_gian'; nearest: dk_gain"),
            (["check", "flash:fa2", "--from", "nowhere"], "--from must be a run's folder"),
            (["deviate", "--profile", "fa22"], "profile must be a known profile, got 'fa22'"),
            (["probe", "--model", "x"], "text must be given"),
            (["init"], "or --template one of kernel, precision"),
        ],
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_the_command_is_told_before_anything_heavy_is_loaded(words, said):
    code, modules, error = _start(*words)
    assert (code, said in error) == (2, True), error
    assert not modules & HEAVY


@pytest.mark.parametrize(
    "words",
    one_in(
        3,
        [
            ["show"],
            ["show", "--json"],
            ["show", "--arm", "flash_fa2"],
            ["verify"],
            ["verdict", "--arm", "flash_fa2"],
        ],
    ),
    ids=" ".join,
)
def test_a_study_is_looked_at_without_torch(study, words):
    verb, *options = words
    code, modules, error = _start(verb, study, *options)
    assert code in (0, 1, 3), error
    assert not modules & (HEAVY - {"scipy"}), "scipy has the intervals and the growth law"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "--arm", "flash_fa22"], "'flash_fa22'; nearest: flash_fa2"),
        (["verdict", "--arm", "flash_fa22"], "'flash_fa22'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_misspelled_arm_of_a_study_is_told_before_anything_heavy_is_loaded(study, words, said):
    verb, *options = words
    code, modules, error = _start(verb, study, *options)
    assert (code, said in error) == (2, True), error
    assert not modules & HEAVY


def test_a_command_is_recorded_without_lightning_and_gets_the_variables_that_are_its_own(tmp_path):
    # it trains nothing, so that no more than the recorder is loaded on either side
    script, seen = tmp_path / "script.py", tmp_path / "seen.json"
    script.write_text(
        f"import json, os; open({str(seen)!r}, 'w').write(json.dumps({{**os.environ}}))"
    )
    words = (
        "--study",
        "s",
        "--arm",
        "baseline",
        "--seed",
        "0",
        "--out",
        tmp_path,
        "--wandb",
        "disabled",
    )
    command = (sys.executable, script)
    code, modules, error = _start("record", *words, "--", *command)
    assert (code, seen.exists()) == (1, True), error
    assert not modules & (HEAVY - {"torch"})
    found = {name for name in json.loads(seen.read_text()) if not name.startswith("STABILITY_")}
    asked = {"CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "GOMP_SPINCOUNT"}
    assert found - {"LC_CTYPE"} == {"PYTHONPATH", "PATH", "HOME"} | asked


def test_what_handles_studies_of_commands_imports_no_lightning():
    rooms = ", ".join(
        f"stability.study.{each}" for each in ("run_commands", "fork_command", "adopt")
    )
    asked = f"import json, sys, {rooms}; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=ROOT)
    assert "torch" in set(json.loads(done.stdout)) & HEAVY <= {"torch"}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], {"GOMP_SPINCOUNT": "10000"}),
        (["--jobs", "1"], {"GOMP_SPINCOUNT": "10000"}),
        (["--jobs=4"], {"OMP_WAIT_POLICY": "PASSIVE"}),
    ],
)
def test_idle_threads_sleep_at_once_where_several_runs_train(words, found, monkeypatch):
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    _let_idle_threads_sleep(words)
    set_here = {name: os.environ[name] for name in WAITING if name in os.environ}
    for name in set_here:
        monkeypatch.delenv(name)
    assert set_here == found


def test_a_users_own_way_of_waiting_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    _let_idle_threads_sleep(["--jobs", "2"])
    assert not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
