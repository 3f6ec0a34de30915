"""What the command line asks of an executor, and how the job's own command line is made."""

import pytest

from stability.cli.main import main
from stability.cli.run import _Asked
from stability.execute.executor import StudyCommand
from stability.execute.ray_tasks import RayTasks


def _refused(capsys, *words):
    with pytest.raises(SystemExit, match="2"):
        main(["run", *words])
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nudge"], "only and seed must be given together"),
        (["--seed", "1"], "only and seed must be given together"),
        (["--slurm.partition", "gpu"], "executor must be slurm for --slurm options, got 'local'"),
        (["--only", "nudge", "--seed", "0", "--finish"], "only and finish must not both be given"),
        (["--executor", "slrum"], "slrum"),
    ],
)
def test_words_that_do_not_fit_are_refused(write_study, capsys, words, said):
    assert said in _refused(capsys, str(write_study()), *words)


def test_the_job_is_given_what_decides_the_run_and_no_option_of_the_executor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = _Asked(
        study=tmp_path / "study.yaml",
        out=tmp_path.relative_to(tmp_path),
        wandb=None,
        check_observer=True,
        jobs=0,
        seeds=3,
        keep="none",
        executor="slurm",
        only="",
        seed=None,
        finish=False,
        overrides={"train.steps": "50", "slurm.partition": "gpu"},
    )
    command = StudyCommand(words=asked.words("offline"), folder=tmp_path, name="s")
    assert command.one("nudge", 4) == [
        *("run", str(tmp_path / "study.yaml"), "--out", str(tmp_path), "--wandb", "offline"),
        *(
            "--seeds",
            "3",
            "--keep",
            "none",
            "--check-observer",
            "--train.steps=50",
            "--only",
            "nudge",
        ),
        *("--seed", "4"),
    ]
    assert command.finish()[-1] == "--finish"
    assert asked.options("slurm") == {"partition": "gpu"}


def test_what_ray_lacks_is_named(tmp_path, monkeypatch):
    command = StudyCommand(words=(), folder=tmp_path, name="s")
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'training-stability\[ray\]'"):
        RayTasks(command, {})
    monkeypatch.setitem(__import__("sys").modules, "ray", pytest)
    with pytest.raises(ValueError, match=r"--ray\.num-gpus must be a number, got 'all'"):
        RayTasks(command, {"num-gpus": "all"})
