"""The example workflow that holds a pull request to a kernel's check: its steps are carried out.

Leaves out which options its verbs have (`test_configs.py`), and what GitHub's own actions do.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.pages import ROOT, code_of, in_short

WORKFLOW = ROOT / "examples" / "ci" / "kernel_check.yml"
WRONG = """
import my_kernel

def attend(q, k, v, *, causal, scale=None):
    return 1.05 * my_kernel.attend(q, k, v, causal=causal, scale=scale)
"""


@dataclass
class Job:
    """A job of the workflow in a folder, as a runner of GitHub's does it."""

    folder: Path
    inputs: dict[str, str]

    def holds(self, condition, failed):
        """Return whether a step is run, by its `if`; one without `always()` needs all before."""
        parts = [part.strip() for part in condition.split("&&")] if condition else []
        if failed and "always()" not in parts:
            return False
        for part in parts:
            if part != "always()":
                kind, of = re.fullmatch(r"(inputs\.|hashFiles)(\S+) != ''", part).groups()
                is_there = self.inputs[of] if kind == "inputs." else self.found(of[2:-2])
                if not is_there:
                    return False
        return True

    def found(self, pattern):
        """Return the files of a pattern, as GitHub's `hashFiles` finds them."""
        return [*self.folder.glob(pattern)]

    def run(self):
        """Run the steps, and return the verb and the exit code of each that was run."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        source = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        github = {
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
        }
        ended = []
        for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["check"]["steps"]:
            line = step.get("run", "")
            failed = any(code for _, code in ended)
            if (
                not line
                or line.startswith("pip install")
                or not self.holds(step.get("if", ""), failed)
            ):
                continue
            assert "${{" not in line, "what is given would be a part of the command"
            given = {
                name: self.inputs[re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1]]
                for name, value in step.get("env", {}).items()
            }
            (self.folder / "step.sh").write_text(line)
            done = subprocess.run(
                ["bash", "-e", "step.sh"],
                cwd=self.folder,
                env={**os.environ, **github, **given, "PATH": path, "PYTHONPATH": source},
                capture_output=True,
                text=True,
            )
            ended.append((line.split()[1], done.returncode))
            with (self.folder / "said.txt").open("a") as said:
                said.write(done.stdout + done.stderr)
        return ended

    @property
    def said(self):
        return (self.folder / "said.txt").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What a repository holds: a kernel, and a study of it."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert code_of(["init", "--template", "kernel"]) == 0
    study = tmp_path / "study.yaml"
    study.write_text(in_short(study.read_text()))
    return tmp_path


@pytest.mark.slow
def test_a_right_kernel_passes_its_check_and_a_wrong_one_fails_the_job_in_words(folder):
    assert Job(folder, {"attention": "my_kernel:attend", "study": ""}).run() == [("check", 0)]
    (folder / "wrong_kernel.py").write_text(WRONG)
    wrong = Job(folder, {"attention": "wrong_kernel:attend", "study": "study.yaml"})
    assert wrong.run() == [("check", 1)], "nothing is trained after it, and nothing packed"
    assert "wrong_kernel:attend FAILS at" in wrong.said
    assert "out and all gradients are 1.05" in wrong.said


def test_what_is_given_is_no_part_of_a_command(folder):
    given = 'nothing:here"; touch planted; echo "'
    assert Job(folder, {"attention": given, "study": ""}).run() == [("check", 2)]
    assert not (folder / "planted").exists()


@pytest.mark.slow
def test_a_study_is_judged_and_its_bundle_is_there_to_be_uploaded(folder):
    (folder / "runs" / "another").mkdir(parents=True)  # which the repository may hold
    (folder / "runs" / "another" / "study.json").write_text("{}")
    job = Job(folder, {"attention": "my_kernel:attend", "study": "study.yaml"})
    # of one seed there is no verdict, which fails the job; what was recorded is packed all the same
    assert job.run() == [("check", 0), ("run", 0), ("verdict", 3), ("export", 0)], job.said
    assert "INCONCLUSIVE" in (folder / "summary.md").read_text()
    assert re.search(r"^::(warning|error|notice)\b", job.said, re.MULTILINE)
    (upload,) = (
        step["with"]["path"]
        for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["check"]["steps"]
        if "upload-artifact" in step.get("uses", "")
    )
    assert len([*folder.glob(upload)]) == 1


def test_what_pip_installs_is_an_input_so_that_no_index_has_to_have_the_package():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    (install,) = (
        step for step in workflow["jobs"]["check"]["steps"] if step.get("run", "").startswith("pip")
    )
    assert install["env"] == {"PACKAGE": "${{ inputs.package }}"}
    assert install["run"] == 'pip install "$PACKAGE"'
    # PyYAML reads the key `on` as true
    assert workflow[True]["workflow_call"]["inputs"]["package"]["default"] == "training-stability"
