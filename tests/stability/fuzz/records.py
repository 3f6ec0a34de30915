"""A small study that has every kind of record, and a probe; and how a copy of it is damaged.

The study is trained; what a study gets only later or elsewhere (a frozen window, a waterfall,
drifts that were computed anew, W&B's id of a run) is written by the functions that write it.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from attention_kernels.testing.fault_names import FAULT_LEVELS
from stability.analysis.study_distances import study_distances
from stability.analysis.study_records import read_study
from stability.analysis.window import pick_window, window_record
from stability.records.assay import AssayRecord, FaultRecord, write_assay
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.records.remade_drifts import RemadeDrifts, write_remade
from stability.records.waterfall_record import WaterfallRecord, write_waterfall
from stability.records.window import write_window
from tests.conftest import train_edited
from tests.stability.fuzz.hostile import damage
from tests.stability.report.synthetic_probe import write_probe

__all__ = ["Copy", "copy_records", "ends_in_its_own_words", "kinds_of_records", "make_records"]

ARMS = {
    "flash_fa2": {"attention": {"implementation": "flash", "profile": "fa2"}},
    "nudge": {"nudge": {"ulps": 1}},
    "reference": {"precision": "32-true", "role": "reference"},
}
CANDIDATE, CONTROL = "flash_fa2", "nudge"
SUFFIXES = (".json", ".jsonl", ".safetensors", ".ckpt", ".txt", ".sha256")


def make_records(folder: Path, text: Path) -> Path:
    """Make the study `tiny` and the probe `probe` below `folder`; return the folder of both."""

    def edit(content: dict) -> None:
        content |= {"arms": ARMS, "seeds": [0], "early_step": 2}
        content["yardstick"] = ""
        content["base"]["train"] |= {"steps": 4, "snapshot_steps": [2], "keep_checkpoints": 0}
        content["base"]["probe"]["gradient_every"] = 2

    config, study = train_edited(folder, text, edit)
    shutil.copy(config, study.parent)
    _write_rare(study)
    _write_inputs(study.parent / "qkv.safetensors")
    probe = study.parent / "probe"
    probe.mkdir()
    write_probe(probe, layers=2, heads=2)
    return study.parent


def _write_rare(study: Path) -> None:
    recorded = read_study(study)
    distances = study_distances(recorded, [0])
    picked = pick_window(distances, [CONTROL], "reference", 10.0)
    write_window(study, window_record(picked, distances, "reference", 10.0))
    run, baseline = (RunPaths.for_run(study, arm, 0) for arm in (CANDIDATE, "baseline"))
    of, origin = (
        read_manifest(x.manifest).files[x.name_of(x.snapshot(4))] for x in (run, baseline)
    )
    drifts = {"drift/all/rel_l2": 0.015625}
    row = RemadeDrifts(arm=CANDIDATE, step=4, parents=(of, origin), drifts=drifts)
    write_remade(study, 0, [row])
    steps = [
        {"change": change, "point": "p", "format": "bf16", "errors": {"out": 0.25}}
        for change in ("none", "lowered", "raised")
    ]
    steps[0]["point"] = ""
    write_waterfall(
        run,
        WaterfallRecord(
            profile="fa2",
            format="bf16",
            layer=0,
            step=4,
            point={"changes": [["p", "bf16"]]},
            numerics={"p": "bf16"},
            steps=steps,  # pyright: ignore[reportArgumentType]
            versions={"torch": "2"},
        ),
    )
    write_assay(study, _assay(run))
    run.wandb_dir.mkdir(exist_ok=True)
    for kept in ("id.txt", "published-offline.sha256"):
        (run.wandb_dir / kept).write_text("0123456789abcdef\n")


def _assay(run: RunPaths) -> AssayRecord:
    """Return an assay that finds each fault: ratios and shares far beyond the limits."""
    figures = {"error_ratio": (3.5, 3.25, 3.75), "gain": (0.5, 0.25, 0.5)}
    figures |= {"golden_bias_ulp": (0.5, 0.5, 0.5)}
    operator: dict[str, Any] = dict.fromkeys(("out", "dq", "dk", "dv"), figures)
    own = FaultRecord(name="", what="no fault", levels=(), operator=operator)
    faults = [
        FaultRecord(
            name=name,
            what="a fault",
            levels=levels,
            operator=operator,
            ratios=(2.5, 2.75, 3.25),
            share=0.5,
            share_se=0.0625,
            share_looks=24,
            own_ratios=(1.0, 1.125, 0.875),
            own_share=0.0,
            own_share_se=0.0625,
        )
        for name, levels in FAULT_LEVELS.items()
    ]
    parents = {run.name_of(run.snapshot(4)): _weights(run)}
    return AssayRecord(arm=CANDIDATE, seed=0, parents=parents, own=own, faults=tuple(faults))


def _write_inputs(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(1, 2, 16, 16, generator=generator) for name in "qkv"}, path)


def copy_records(source: Path, target: Path) -> Path:
    """Copy records, whatever lies where one should be, to `target`, which is made anew."""
    shutil.rmtree(target, ignore_errors=True)
    for folder, _, names in os.walk(source):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True)
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                shutil.copyfile(path, place / name)
            else:
                os.link(path, place / name, follow_symlinks=False)
    return target


def _weights(run: RunPaths) -> str:
    return read_manifest(run.manifest).files[run.name_of(run.snapshot(4))]


def kinds_of_records(folder: Path) -> dict[str, list[Path]]:
    """Return the records below a folder by kind: those whose names differ in numbers and arm."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in SUFFIXES:
            name = path.relative_to(folder).as_posix()
            name = re.sub(r"[^/]+/seed-\d+/", "ARM/", re.sub(r"step-\d+", "step", name))
            found.setdefault(name, []).append(path)
    return found


class Copy:
    """A copy of the records, by hard links, that is damaged and mended again."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.folder = folder / "runs"
        self._whole = folder / "whole"
        for target in (self.folder, self._whole):
            shutil.copytree(source, target, copy_function=os.link)
        self._kinds = kinds_of_records(self.folder)
        self._files = {path for paths in self._kinds.values() for path in paths}

    @property
    def kinds(self) -> Mapping[str, list[Path]]:
        """The records by kind."""
        return self._kinds

    @contextmanager
    def damaged(self, draw: Random, count: int) -> Iterator[dict[Path, str]]:
        """Damage records of `count` kinds inside the block; give what was done to each."""
        chosen = draw.sample(sorted(self._kinds), min(count, len(self._kinds)))
        done: dict[Path, str] = {}
        try:
            for kind in chosen:
                path = draw.choice(self._kinds[kind])
                done[path] = "not yet"
                done[path] = damage(path, draw)
            yield done
        finally:
            for path in done:
                self._mend(path)

    @contextmanager
    def without(self, *gone: Path) -> Iterator[None]:
        """Leave files or folders out inside the block."""
        for path in gone:
            _remove(path)
        try:
            yield
        finally:
            for path in gone:
                self._mend(path)

    def _mend(self, path: Path) -> None:
        whole = self._whole / path.relative_to(self.folder)
        _remove(path)
        if whole.is_dir():
            shutil.copytree(whole, path, copy_function=os.link)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(whole, path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def ends_in_its_own_words(how: str) -> bool:
    """Whether a damage leaves a record under a right seal, so that no reader can tell."""
    return how in ("odd_json", "odd_line", "of_another", "doubled")
