"""Faults of a command that are near a limit after the first looks: which are planted once more."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from stability.analysis.assay import faults_due, found_at, stale_part
from stability.analysis.sequential import look_alpha
from stability.config.study import PolicyConfig
from stability.probe.planted_faults import MOST
from stability.records.assay import AssayRecord, FaultRecord, unplanted
from stability.study import foreign_assay
from stability.study.foreign_assay import FIRST_LOOKS

POLICY = PolicyConfig()
DUE = faults_due("")
Figures = tuple[FaultRecord, tuple[FaultRecord, ...]]


def _figures(name: str, ratio: float, share: float, share_se: float, looks: int) -> FaultRecord:
    return FaultRecord(
        name=name,
        what="",
        levels=DUE.get(name, ()),
        operator={},
        ratios=tuple(ratio * (1.01 if i % 2 else 0.99) for i in range(looks)),
        share=share,
        share_se=share_se,
        share_looks=looks,
        own_ratios=(1.0, 1.01, 0.99),
        own_share=0.0,
        own_share_se=0.002,
    )


FOUND_AT_ONCE: dict[str, Any] = dict.fromkeys(DUE, (20.0, 0.0, 0.01, 3))
NEAR = (1.0, 0.026, 0.0155)


class Command:
    """Stands for the script: what it would tell of each fault, and what it was asked for."""

    def __init__(self, steps: int = 60, **instead: Any) -> None:
        self.asked: list[tuple[list[str], int]] = []
        self.said: list[str] = []
        self._steps, self._instead = steps, instead

    def plant(self, names: Sequence[str], looks: int) -> Figures:
        self.asked.append((list(names), looks))
        own = FaultRecord(name="", what="", levels=(), operator={})
        found = FOUND_AT_ONCE | self._instead
        return own, tuple(_figures(name, *found[name]) for name in names)

    def assay(self, monkeypatch: pytest.MonkeyPatch) -> AssayRecord:
        manifest: Any = SimpleNamespace(resolved={}, environment={}, step=self._steps)
        monkeypatch.setattr(foreign_assay, "read_manifest", lambda path: manifest)
        monkeypatch.setattr(foreign_assay, "parents_of", lambda paths: {})
        monkeypatch.setattr(foreign_assay, "_planted", lambda *given: self.plant(*given[5:]))
        run: Any = SimpleNamespace(arm="fa2", seed=0, paths=SimpleNamespace(manifest=None))
        return foreign_assay._assay(run, None, self.said.append, lambda *_: None, POLICY)


def _by_name(record: AssayRecord) -> dict[str, FaultRecord]:
    return {fault.name: fault for fault in record.faults}


def test_where_each_fault_is_settled_the_command_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command(out_gain=(1.0, 0.0, 0.001, FIRST_LOOKS))
    record = command.assay(monkeypatch)
    assert command.asked == [(list(DUE), FIRST_LOOKS)]
    assert command.said == []
    assert [fault.name for fault in record.faults] == list(DUE)
    assert not stale_part(record, "")


def test_a_fault_near_a_limit_is_planted_in_a_second_process_with_more_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = Command(dv_gain=(*NEAR, FIRST_LOOKS), out_gain=(*NEAR, FIRST_LOOKS))
    plant = command.plant

    def planting(names: Sequence[str], looks: int) -> Figures:
        if looks == MOST:
            closer = {"dv_gain": (1.0, 0.038, 0.007, 48), "out_gain": (1.0, 0.026, 0.0155, 72)}
            command._instead = closer
        return plant(names, looks)

    monkeypatch.setattr(command, "plant", planting)
    record = command.assay(monkeypatch)
    assert command.asked == [(list(DUE), FIRST_LOOKS), (["dv_gain", "out_gain"], MOST)]
    faults = _by_name(record)
    assert list(faults) == list(DUE)
    assert {name: faults[name].share_looks for name in ("dv_gain", "out_gain", "dropped_key")} == {
        "dv_gain": 48,
        "out_gain": 72,
        "dropped_key": 3,
    }
    alpha = look_alpha(POLICY.alpha)
    assert found_at("gradient", faults["dv_gain"], record.own, alpha, POLICY)
    assert not found_at("gradient", faults["out_gain"], record.own, alpha, POLICY)
    (said,) = command.said
    assert said == (
        "dv_gain, out_gain on fa2: neither found nor surely missed at 24 looks, so its command "
        "runs once more, for up to 60 updates"
    )


@pytest.mark.parametrize(("steps", "looks"), [(8, 24), (12, 36), (24, 24), (25, 24)])
def test_a_command_runs_again_only_where_it_has_more_batches(
    steps: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fewer updates than looks each batch was looked at with several snapshots already."""
    command = Command(steps, dv_gain=(*NEAR, looks))
    command.assay(monkeypatch)
    assert len(command.asked) == 1 + (steps > FIRST_LOOKS)


@pytest.mark.parametrize("is_told", [False, True], ids=["it ends with an error", "it says so"])
def test_a_second_process_that_fails_is_on_record_and_tried_again(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command(dv_gain=(*NEAR, FIRST_LOOKS))
    plant = command.plant

    def planting(names: Sequence[str], looks: int) -> Figures:
        if looks == MOST:
            if is_told:
                return unplanted("no disk"), ()
            raise ValueError("no disk")
        return plant(names, looks)

    monkeypatch.setattr(command, "plant", planting)
    record = command.assay(monkeypatch)
    faults = _by_name(record)
    assert {name for name, fault in faults.items() if fault.error} == {"dv_gain"}
    assert (faults["dv_gain"].error, faults["dv_gain"].share_looks) == ("no disk", FIRST_LOOKS)
    assert stale_part(record, "") == "dv_gain could not be looked at again: no disk"
    mended = replace(record, faults=tuple(replace(fault, error="") for fault in record.faults))
    assert not stale_part(mended, "")


@pytest.mark.parametrize("told", [["dv_gain"], ["out_gain", "dv_gain"], []], ids=str)
def test_a_process_that_tells_of_other_faults_than_asked_for_has_failed(
    told: list[str],
) -> None:
    own = asdict(_figures("", 1.0, 0.0, 0.002, 3))
    faults = [asdict(_figures(name, 1.0, 0.0, 0.002, 3)) for name in told]
    assay = {"own": own, "faults": faults}
    with pytest.raises(ValueError, match="must tell of dv_gain, out_gain, has told of"):
        foreign_assay._told(assay, ["dv_gain", "out_gain"])
