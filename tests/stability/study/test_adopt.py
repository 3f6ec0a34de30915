"""`stability adopt`: checkpoints that exist already become a study, and what is unknown is said."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stability.metrics.drift import drift
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths, StudyPaths
from stability.records.sealed_json import read_sealed, write_sealed
from stability.study.capture import capture
from tests.stability.recorder.recording import code_of
from tests.stability.records.dcp_by_hand import save

States = dict[int, dict[str, Tensor]]


def states(scale: float = 1.0, steps: tuple[int, ...] = (0, 10, 20), **changes: Tensor) -> States:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    moved = {step: {k: v + scale * step * 1e-3 for k, v in start.items()} for step in steps}
    return {step: {**state, **changes} for step, state in moved.items()}


def as_folders(folder: Path, series: States) -> Path:
    for step, state in series.items():
        place = folder / f"checkpoint-{step}"
        place.mkdir(parents=True)
        save_file(state, place / "model.safetensors")
        (place / "optimizer.pt").write_bytes(b"not read")
    return folder


def as_older_folders(folder: Path, series: States) -> Path:
    """As Hugging Face wrote them before safetensors, and still does where it is asked to."""
    for step, state in series.items():
        place = folder / f"checkpoint-{step}"
        place.mkdir(parents=True)
        torch.save(state, place / "pytorch_model.bin")
    return folder


def as_files(folder: Path, series: States, prefix: str = "", key: str = "model") -> Path:
    folder.mkdir()
    for step, state in series.items():
        named = {f"{prefix}{name}": value for name, value in state.items()}
        torch.save({key: named, "iter": step}, folder / f"epoch=1-step={step}.pt")
    return folder


def as_dcp(folder: Path, series: States, key: str = "model") -> Path:
    for step, state in series.items():
        save(folder / f"step-{step}", {key: state, "optimizer": {"state": state}})
    # a write that was killed
    shutil.copytree(folder / "step-0", folder / ".step-40.tmp")
    return folder


def adopted(tmp_path: Path, *words: str, seed: int = 0) -> int:
    out = ("--study", "mine", "--out", str(tmp_path / "runs"), "--seed", str(seed))
    return code_of("adopt", *words, *out)


def run_of(tmp_path: Path, arm: str) -> RunPaths:
    return RunPaths.for_run(tmp_path / "runs" / "mine", arm, 0)


@pytest.mark.parametrize(
    ("prefix", "key"),
    [("", "state_dict"), ("module._orig_mod.", "model"), ("module.", "model_state_dict")],
)
def test_series_of_other_kinds_and_names_are_compared_weight_by_weight(
    prefix: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = states(), states(1.5)
    words = [
        f"baseline={as_folders(tmp_path / 'a', a)}",
        f"x={as_files(tmp_path / 'b', b, prefix, key)}",
    ]
    assert adopted(tmp_path, *words, "--change", "x=another kernel") == 0
    said = capsys.readouterr().out
    assert "same start             proven" in said
    assert "one change             declared" in said
    assert "same batches           unknown" in said
    found = read_metrics(run_of(tmp_path, "x").metrics)[drift_name("all", "rel_l2")]
    assert found.steps == [0, 10, 20]
    assert found.values == [drift(b[step], a[step])["all"]["rel_l2"] for step in (0, 10, 20)]
    assert code_of("show", str(tmp_path / "runs" / "mine")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "declared: another kernel" in shown
    assert "Of x: its change is declared, not checked; batches, code and machine" in shown
    assert code_of("verify", str(tmp_path / "runs" / "mine")) == 1
    stands = (
        "unproven: proven: the same weights, the same start; declared: another kernel; unknown: "
        "batches, code and machine"
    )
    said = " ".join(capsys.readouterr().out.split())
    assert stands in said
    assert "missing" not in said
    assert code_of("report", str(tmp_path / "runs" / "mine")) == 0


@pytest.mark.parametrize("write", [as_older_folders, as_dcp])
def test_folders_of_torchs_own_files_are_checkpoints_too(tmp_path: Path, write: Any) -> None:
    words = [
        f"baseline={as_folders(tmp_path / 'a', states())}",
        f"x={write(tmp_path / 'b', states(1.5))}",
    ]
    assert adopted(tmp_path, *words) == 0
    found = read_metrics(run_of(tmp_path, "x").metrics)[drift_name("all", "rel_l2")]
    assert found.steps == [0, 10, 20]
    assert found.values == [
        drift(states(1.5)[x], states()[x])["all"]["rel_l2"] for x in found.steps
    ]


def test_what_not_all_have_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = states(2.0, (0, 5, 10, 20), head=torch.ones(3), count=torch.ones(3, dtype=torch.int64))
    words = [
        f"baseline={as_folders(tmp_path / 'a', states())}",
        f"x={as_folders(tmp_path / 'b', more)}",
    ]
    assert adopted(tmp_path, *words) == 0
    said = capsys.readouterr().out
    assert "1 checkpoints of x were left out, whose steps another arm has not: 5" in said
    assert "1 weights of x were left out, which another arm has not: head" in said
    assert "not declared of x" in said


def test_another_start_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {step: {k: v + 1 for k, v in state.items()} for step, state in states().items()}
    words = [
        f"baseline={as_folders(tmp_path / 'a', states())}",
        f"x={as_folders(tmp_path / 'b', other)}",
        f"same={as_folders(tmp_path / 'c', states())}",
    ]
    assert adopted(tmp_path, *words, "--role", "same=rerun") == 0
    assert "same start             not so   x starts from other bits" in capsys.readouterr().out
    assert read_manifest(run_of(tmp_path, "same").manifest).axis == "none"
    assert set(read_metrics(run_of(tmp_path, "same").metrics)["drift/all/rel_l2"].values) == {0}


def test_weights_that_are_stored_low_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low = {s: {k: v.bfloat16() for k, v in state.items()} for s, state in states().items()}
    words = [f"baseline={as_folders(tmp_path / 'a', low)}", f"x={as_folders(tmp_path / 'b', low)}"]
    assert adopted(tmp_path, *words) == 0
    assert "x is stored in bfloat16, which hides" in capsys.readouterr().out


def test_names_are_matched_by_rename(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        f"baseline={as_folders(tmp_path / 'a', states())}",
        f"x={as_files(tmp_path / 'b', states(), 'net.')}",
    ]
    assert adopted(tmp_path, *words) == 2
    said = capsys.readouterr().err
    assert "the checkpoints share no name: baseline has 0.bias, 0.weight" in said
    assert "x has net.0.bias" in said
    assert not (tmp_path / "runs").exists()
    assert adopted(tmp_path, *words, "--rename", "net.=") == 2, "an empty name is no value"
    assert adopted(tmp_path, *words, "--rename", "net.0=0", "--rename=net.1=1") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["baseline={a}"], "two series or more must be named"),
        (["x={a}", "y={b}"], "one of them baseline, got x, y"),
        (["baseline={a}", "x=nowhere"], "nowhere: must be a folder of checkpoints"),
        (["baseline={a}", "x={empty}"], "must hold checkpoints with their step in the name"),
        (["baseline={a}", "x={late}"], "must share a step above 0"),
        (["baseline={a}", "x={wide}"], "0.weight must have one shape, has baseline (4, 3)"),
        (["baseline={a}", "x={twice}"], "must hold one checkpoint a step, has 10.pt and step-10"),
        (["baseline={a}", "x={b}", "--change", "z=1"], "z must be one of the arms x"),
        (["baseline={a}", "x={b}", "--role", "x=best"], "role must be a role, got 'best'"),
        (["baseline={a}", "x={b}", "x={a}"], "a series must name x once"),
        (["baseline={a}", "x"], "a series must be NAME=VALUE, got 'x'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide: Any = {"0.weight": torch.zeros(5, 3)}
    places = {
        "a": as_folders(tmp_path / "a", states()),
        "b": as_folders(tmp_path / "b", states(2.0)),
        "empty": tmp_path,
        "late": as_folders(tmp_path / "late", states(steps=(30,))),
        "wide": as_folders(tmp_path / "wide", states(**wide)),
        "twice": as_files(tmp_path / "twice", states()),
    }
    torch.save(states()[10], places["twice"] / "10.pt")
    (places["twice"] / "epoch=1-step=10.pt").rename(places["twice"] / "step-10.pt")
    assert adopted(tmp_path, *(word.format(**places) for word in words)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def verified(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    capsys.readouterr()
    code = code_of("verify", str(tmp_path / "runs" / "mine"), "--all", *more)
    return code, " ".join(capsys.readouterr().out.split())


def test_a_series_that_begins_later_has_an_unknown_start_and_lacks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (10, 20)
    words = [
        f"baseline={as_folders(tmp_path / 'a', states(steps=steps))}",
        f"x={as_folders(tmp_path / 'b', states(1.5, steps))}",
    ]
    assert adopted(tmp_path, *words) == 0
    code, said = verified(tmp_path, capsys)
    assert code == 1
    assert (
        "unproven: proven: the same weights; unknown: the change, the start, batches, code and "
        "machine" in said
    )
    assert "missing" not in said


def test_of_an_adopted_run_no_inputs_can_be_had(tmp_path: Path) -> None:
    words = [f"{arm}={as_folders(tmp_path / arm, states())}" for arm in ("baseline", "x")]
    assert adopted(tmp_path, *words) == 0
    with pytest.raises(
        ValueError,
        match=r"^run must be one .*, which was adopted from checkpoints; check the attention",
    ):
        capture(run_of(tmp_path, "x").root, 0)


def test_a_forged_adoption_is_worse_than_unproven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"baseline={as_folders(tmp_path / 'a', states())}",
        f"x={as_folders(tmp_path / 'b', states(1.5))}",
    ]
    assert adopted(tmp_path, *words, "--change", "x=kernel") == 0
    assert verified(tmp_path, capsys)[1].count("unproven") == 3
    run = run_of(tmp_path, "x")
    kept = run.manifest.read_bytes()
    known = read_manifest(run.manifest)
    forged = {
        "final_weights": replace(known, hashes={**known.hashes, "final_weights": "f" * 64}),
        "init_weights": replace(known, hashes={**known.hashes, "init_weights": "f" * 64}),
        "record": replace(known, role="yardstick"),
    }
    for name, manifest in forged.items():
        write_manifest(run.manifest, manifest)
        code, said = verified(tmp_path, capsys)
        assert (code, f"hashes.{name} is" in said or "was there as yardstick" in said) == (1, True)
        run.manifest.write_bytes(kept)
    path = StudyPaths(tmp_path / "runs" / "mine").study
    content = read_sealed(path, "")
    content["arms"][1]["role"] = "nudge"
    write_sealed(path, content)
    said = verified(tmp_path, capsys)[1]
    assert "must not be nudge in an arm that changes config.declared" in said


def tied_states(scale: float) -> States:
    torch.manual_seed(0)
    start, rest = torch.randn(6, 4), torch.randn(4)
    found: States = {}
    for step in (0, 10):
        weight = start + scale * step * 1e-3
        found[step] = {"emb.weight": weight, "norm": rest + scale * step * 1e-3, "head": weight}
    return found


def test_a_tied_weight_counts_once_and_its_name_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tied_states(1.0), tied_states(2.0)
    words = [f"baseline={as_files(tmp_path / 'a', a)}", f"x={as_files(tmp_path / 'b', b)}"]
    assert adopted(tmp_path, *words) == 0
    said = capsys.readouterr().out
    assert "head is the same tensor as emb.weight, which stands for both" in said
    assert "2 steps from 0 to 10, 2 weights" in said
    found = read_metrics(run_of(tmp_path, "x").metrics)
    once = [{n: x for n, x in state[10].items() if n != "head"} for state in (b, a)]
    assert found[drift_name("all", "rel_l2")].values[1] == drift(*once)["all"]["rel_l2"]
    assert "drift/head/rel_l2" not in found


def test_the_verdict_asks_nothing_of_checkpoints_that_they_cannot_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"baseline={as_folders(tmp_path / 'a', states(steps=(0, 20)))}",
        f"x={as_folders(tmp_path / 'b', states(1.5, (0, 20)))}",
    ]
    assert adopted(tmp_path, *words) == 0
    capsys.readouterr()
    code_of("verdict", str(tmp_path / "runs" / "mine"))
    said = " ".join(capsys.readouterr().out.split())
    assert "no run has a held-out loss: checkpoints tell none. assay" in said
    assert "adopt such a series with `--role NAME=reference`" in said
    assert "held_out:" not in said
    # and so it can be done
    other = [
        f"baseline={as_folders(tmp_path / 'c', states(1.2, (0, 20)))}",
        f"x={as_folders(tmp_path / 'd', states(1.7, (0, 20)))}",
    ]
    assert adopted(tmp_path, *other, "--role", "x=reference", seed=1) == 0
    higher = RunPaths.for_run(tmp_path / "runs" / "mine", "x", 1)
    assert read_manifest(higher.manifest).role == "reference"


def test_the_series_of_one_seed_do_not_count_as_another_seed_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"baseline={as_folders(tmp_path / 'a', states())}",
        f"x={as_folders(tmp_path / 'b', states(1.5))}",
    ]
    assert adopted(tmp_path, *words) == 0
    assert adopted(tmp_path, *words, seed=1) == 2
    said = capsys.readouterr().err
    assert "seed 1 must be another run than seed 0, ends in the same weights" in said
    assert "baseline needs the folder of its own seed, got" in said
    assert not RunPaths.for_run(tmp_path / "runs" / "mine", "baseline", 1).manifest.exists()


class _Wrapped(LightningModule):
    """Holds the model that trains as `model`, as most modules of Lightning do."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.model = nn.Linear(3, 2)
        self.lr = lr

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def _trained(folder: Path, lr: float) -> States:
    """Train with Lightning, which keeps a checkpoint each second update; return their weights."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2)
    keeps = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(
        max_steps=4, accelerator="cpu", callbacks=[keeps], logger=False, enable_progress_bar=False
    )
    trainer.fit(_Wrapped(lr), data)
    found = {}
    for path in folder.glob("*.ckpt"):
        held = torch.load(path)
        found[held["global_step"]] = {
            name.removeprefix("model."): x for name, x in held["state_dict"].items()
        }
    return found


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_checkpoints_that_lightning_writes_are_compared_with_bare_ones(tmp_path: Path) -> None:
    a, b = _trained(tmp_path / "a", 0.01), _trained(tmp_path / "b", 0.02)
    assert sorted(a) == sorted(b) == [2, 4]
    bare = as_folders(tmp_path / "bare", a)
    words = [f"baseline={tmp_path / 'a'}", f"x={tmp_path / 'b'}", f"bare={bare}"]
    assert adopted(tmp_path, *words, "--change", "x=optimizer.lr", "--role", "bare=rerun") == 0
    for arm, states_of in {"x": b, "bare": a}.items():
        found = read_metrics(run_of(tmp_path, arm).metrics)[drift_name("all", "rel_l2")]
        assert found.steps == [2, 4]
        expected = [drift(states_of[step], a[step])["all"]["rel_l2"] for step in (2, 4)]
        assert found.values == expected
        assert (max(found.values) == 0) == (arm == "bare")


def test_series_in_an_object_store_are_adopted_and_their_urls_are_on_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = as_folders(tmp_path / "baseline", states())
    there = as_folders(tmp_path / "other", states(1.5))
    fsspec.filesystem("memory").put(f"{there}/", "/series/other/", recursive=True)
    code = adopted(tmp_path, f"baseline={here}", "candidate=memory://series/other")
    assert code == 0
    assert "memory://series/other: 6 files, " in capsys.readouterr().out
    found = {
        arm: read_manifest(RunPaths.for_run(tmp_path / "runs" / "mine", arm, 0).manifest).resolved
        for arm in ("baseline", "candidate")
    }
    assert found["baseline"]["folder"] == str(here)
    assert found["candidate"]["folder"] == "memory://series/other"
    assert code_of("show", str(tmp_path / "runs" / "mine")) == 0
