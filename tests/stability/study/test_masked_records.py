"""No file of a study holds a password that its command was given, and the training gets it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.stability.recorder.recording import Recording, code_of

KEY, TOKEN, PASSWORD = "kQ7-flag-hunter2", "kQ7-env-hunter2", "kQ7-url-hunter2"
SCRIPT = f"""
import argparse, os, torch
flags = argparse.ArgumentParser()
flags.add_argument("--seed", type=int)
flags.add_argument("--api-key")
flags.add_argument("--lr", type=float, default=0.1)
flags.add_argument("--db", default="")
flags.add_argument("--dies", action="store_true")
asked = flags.parse_args()
assert asked.api_key == {KEY!r}, asked.api_key
assert os.environ["HF_TOKEN"] == {TOKEN!r}
if asked.dies:
    raise SystemExit("no such licence: " + asked.api_key)
torch.manual_seed(asked.seed)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr)
for _ in range(3):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(torch.randn(4, 3)), torch.zeros(4, 2)).backward()
    optimizer.step()
"""


def holders(folder: Path) -> list[str]:
    """Return the files below a folder that hold one of the three."""
    secrets = [x.encode() for x in (KEY, TOKEN, PASSWORD)]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    return [str(x) for x in files if any(secret in x.read_bytes() for secret in secrets)]


@pytest.mark.long
def test_of_single_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    address = f"pg://me:{PASSWORD}@host/x"
    study = Recording(
        tmp_path / "runs",
        [sys.executable, str(tmp_path / "train.py"), "--api-key", KEY, "--db", address],
    )
    variable = ("--env", f"HF_TOKEN={TOKEN}", "--wandb", "offline")
    # as a user does: W&B looks at the arguments of the process that it is called in
    command = [str(Path(sys.executable).with_name("stability")), "record", "--study", "study"]
    command += ["--arm", "baseline", "--out", str(study.out), *variable, "--", *study.command]
    subprocess.run([*command, "--seed", "{seed}"], check=True, cwd=tmp_path)
    assert study.record("rerun", options=variable) == 0
    assert study.record("faster", "--lr", "0.2", options=variable) == 0
    assert study.drift("rerun")[3] == 0
    assert code_of("verify", str(study.folder)) == 0
    assert code_of("report", str(study.folder)) == 0
    assert code_of("show", str(study.folder)) == 0
    assert KEY not in capsys.readouterr().out
    assert holders(tmp_path / "runs") == []
    assert holders(tmp_path) == [str(tmp_path / "train.py")]
    # what a launcher or argparse quotes at its end goes on record too
    assert study.record("dies", "--dies", options=variable) == 1
    assert holders(tmp_path) == [str(tmp_path / "train.py")]
    assert "no such licence: masked:" in study.manifest("dies").message
    # another key is another training
    assert study.record("other", options=("--env", "HF_TOKEN=other", "--wandb", "disabled")) == 1


YAML = """
name: study
question: Does it matter?
base:
  command: {python} {script} --seed {{seed}} --db pg://me:{password}@host/x
  flags: {{api-key: {key}}}
  env: {{HF_TOKEN: {token}}}
  train: {{steps: 3}}
arms:
  baseline: {{}}
  rerun: {{}}
  faster: {{flags: {{lr: 0.2}}}}
"""


@pytest.mark.slow
def test_of_a_study_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    study = tmp_path / "study.yaml"
    text = YAML.format(
        python=sys.executable, script=tmp_path / "train.py", key=KEY, token=TOKEN, password=PASSWORD
    )
    study.write_text(text)
    out = tmp_path / "runs"
    assert code_of("run", str(study), "--out", str(out), "--wandb", "disabled") == 0
    assert code_of("verify", str(out / "study")) == 0
    assert code_of("run", str(study), "--out", str(out), "--wandb", "disabled") == 0, "goes on"
    assert holders(out) == []
    capsys.readouterr()
    given = ["--resume", "--seed {resume}", "--set", "flags.lr=0.3"]
    run = out / "study/baseline/seed-0"
    start = str(tmp_path / "train.py")
    assert code_of("fork", str(run), "--start", start, *given) == 2
    assert "holds a password or key, which is not on record" in capsys.readouterr().err
