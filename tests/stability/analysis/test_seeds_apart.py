"""Seeds of an arm that were trained otherwise are told apart, by what is on record of them."""

from types import SimpleNamespace
from typing import Any

from stability.analysis.protocol_check import seeds_apart
from stability.records.manifest import Manifest, RunState


def run(state: RunState, **environment: Any) -> SimpleNamespace:
    """Return a recorded run of a command."""
    manifest = Manifest(
        study="study",
        arm="lr",
        seed=0,
        axis="none",
        config={"program": "train.py", "flags": {}, "env": {}},  # pyright: ignore
        diff={},
        environment=environment,
        resolved={},
        hashes={},
        state=state,
        step=2,
        message="",
    )
    return SimpleNamespace(manifest=manifest)


def apart(*runs: SimpleNamespace) -> list[str]:
    arm = SimpleNamespace(name="lr", runs=dict(enumerate(runs)))
    return list(seeds_apart(SimpleNamespace(arms=[arm])))  # pyright: ignore


def test_a_seed_of_other_code_is_named() -> None:
    trained, other = (run("finished", **{"module.mine": code}) for code in ("a", "b"))
    said = "lr, seed 1, was trained with another environment.module.mine than seed 0"
    assert apart(trained, other) == [said]


def test_a_seed_that_failed_is_of_no_other_code() -> None:
    trained = run("finished", **{"module.mine": "a"})
    assert apart(trained, run("failed"), trained) == []
    assert apart(run("failed"), trained, trained) == [], "the first one"
