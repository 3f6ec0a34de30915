"""Puts a training together from what the environment asks for: its spool, states, nudge and end."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Callable, Dict, Mapping, Optional, Set

import torch
from torch import Tensor, nn

from .attention import ReplacedCalls, replace_attention
from .environment import changed_since, environment, own_files, own_modules
from .evaluations import Evaluations, returned_loss
from .given_start import StartRefused, give_start, read_start
from .held_out import HeldOutLoss
from .hooks import install, install_count
from .installed import installed_code, own_libraries
from .launched import started
from .looks import Looks, is_looked_at
from .memory import most_memory
from .names import buffers_of, frozen_beside
from .nudge import nudge_weights
from .planned import is_due
from .returned_gradient import ReturnedGradient
from .spool import Spool
from .start_dtypes import read_dtypes
from .taken_start import hash_start
from .training import Training
from .update_clock import UpdateClock
from .witness import InsideWitness

__all__ = ["code_told", "due_at", "looks_at", "record_process", "start_of"]

_LONGEST_ERROR = 200
"""Characters of an error that are told."""


def record_process(asked: Mapping[str, str]) -> Callable[[], None]:
    """Hand all that this process trains to a spool; return what is to be called at its end."""
    # `startup` has put these rooms into the package under which this runs
    executed, known_answers, numeric_switches = (
        import_module(f".{name}", __package__)
        for name in ("probe.executed", "probe.known_answers", "records.numeric_switches")
    )

    switches = numeric_switches.all_switches
    rank = int(asked.get("RANK", "0"))
    attention = asked.get("STABILITY_ATTENTION", "")
    replaced = replace_attention(attention) if attention else None
    sources: Set[str] = set()
    """The files of the user's that were imported; at the end `__main__` has none any more."""

    def begin(state: Dict[str, Tensor]) -> Dict[str, Any]:
        if replaced:
            replaced.prepare(next(iter(state.values())).device)
        with spool.telling_refusals():
            if witness:
                witness.begin(state)
            sources.update(own_files().values())
            return start_of(state, asked, rank, switches())

    def told() -> Dict[str, Any]:
        sources.update(own_files().values())
        changed = changed_since(sources, started().time)
        files = sorted({*sources, *own_libraries()})
        calls = replaced.told() if replaced else {}
        seen = witness.told() if witness else {}
        found = {"modules": own_modules(), "files": files, "attention": calls, **seen}
        later = {"written": started().written(), "changed": changed, **code_told()}
        timed = training.clock.told() if training.clock else {}
        return {**found, "held_out": held_out, "memory": most_memory(), **later, **timed}

    observes = asked.get("STABILITY_OBSERVES", "1") == "1"
    held_out = asked.get("STABILITY_HELD_OUT", "")
    has_function = observes and ":" in held_out
    spool = Spool(asked["STABILITY_SPOOL"], rank)
    if replaced:
        replaced.refusing = spool.telling_refusals
    training = Training(
        spool,
        due=due_at(asked.get("STABILITY_SNAPSHOTS", "")) if observes else lambda step: False,
        steps=int(asked.get("STABILITY_STEPS", "0")),
        keeps_state=rank == 0,
        begin=begin,
        end=told,
        evaluations=Evaluations(watches=observes and held_out in ("", "all")),
        held_out=HeldOutLoss(held_out) if has_function else None,
    )
    if asked.get("STABILITY_TRIAL"):
        training.clock = UpdateClock(asked["STABILITY_TRIAL"])
    if observes and not rank and asked.get("STABILITY_PROBE"):
        training.look = _looking(asked["STABILITY_PROBE"], training, replaced, spool)
    witness = None
    if observes:
        install(training)
    else:
        install_count(training)
    if observes and rank == 0:
        looks = Looks(training, executed.Executed, looks_at(asked))
        looks.begin()
        witness = InsideWitness(looks, switches, known_answers.known_answers, switches())
    _note_errors(training)
    return lambda: training.end("exit")


def _note_errors(training: Training) -> None:
    """Tell `training` of the error that ends this process, before Python does what it does."""
    before = sys.excepthook

    def note(kind: Any, error: Any, traceback: Any) -> None:
        training.error = f"{kind.__name__}: {error}"[:_LONGEST_ERROR]
        before(kind, error, traceback)

    sys.excepthook = note


def _looking(
    asked: str, training: Training, replaced: Optional[ReplacedCalls], spool: Spool
) -> Callable[[nn.Module], Any]:
    """Return what looks at a model, once it trains; the process ends here where it can't."""
    if find_spec("stability") is None:
        raise SystemExit(
            "stability: probe: the script's environment must have stability, which is not found "
            f"by {sys.executable}; install it there, or record without a probe"
        )

    def refusal(why: str) -> StartRefused:
        # nothing is gathered at the end: other ranks are in the middle of an update
        training.error = why
        spool.write({"kind": "refused", "why": why})
        return StartRefused(why, code=1)

    def look(model: nn.Module) -> Any:
        # the one part that needs the package; by its name, as the launcher gives it
        named = json.loads(asked).get("instrument", "stability.recorder.instrument")
        instrument = import_module(named).Instrument(
            asked,
            training.measured,
            training.apart,
            returned_loss,
            partial(ReturnedGradient, training.models),
            attention=replaced.name if replaced else "",
            sdpa=replaced.original if replaced else None,
            marked=replaced.marked if replaced else None,
            state=lambda: training.state,
            refusal=refusal,
        )
        with spool.telling_refusals():
            try:
                instrument.begin(model, training.step)
            except ValueError as error:
                raise StartRefused(str(error)) from error
        return instrument

    if replaced:
        replaced.is_watched = True
    return look


def due_at(listed: str) -> Callable[[int], bool]:
    """Return after which updates the state is kept: those listed, or the 1-2-5 series for none."""
    steps = {int(step) for step in listed.split(",") if step}
    return (lambda step: step in steps) if steps else is_due


def looks_at(asked: Mapping[str, str]) -> Callable[[int], bool]:
    """Return which updates are looked at: those that the baseline's were, if that is on record."""
    steps = {int(step) for step in asked.get("STABILITY_LOOKS", "").split(",") if step}
    last = int(asked.get("STABILITY_STEPS", "0"))
    return (lambda update: update in steps) if steps else (lambda u: is_looked_at(u, last))


def start_of(
    state: Dict[str, Tensor], asked: Mapping[str, str], rank: int, switches: Mapping[str, Any]
) -> Dict[str, Any]:
    """Give and nudge the start state where that is asked for; return what is known before updates.

    `switches` are torch's, by name (`records.numeric_switches`).
    """
    # what does not train is no part of the state, and of what a run starts from
    frozen = frozen_beside(state)
    buffers = sorted(buffers_of(state))
    own = before = hash_start(state, frozen, buffers)
    given = asked.get("STABILITY_START", "")
    if given:
        give_start(state, read_start(given))
        before = hash_start(state, frozen, buffers)
    ulps, draw = (int(x) for x in asked.get("STABILITY_NUDGE", "0 0").split())
    if ulps:
        nudge_weights(state, ulps, int(asked.get("STABILITY_SEED", "0")), draw)
    group = _group_size()
    return {
        "init": before,
        "buffers": buffers,
        "given": {"own": own} if given else {},
        "baseline_dtypes": read_dtypes(asked.get("STABILITY_START_DTYPES", "")),
        "nudged": bool(ulps),
        "rank": torch.distributed.get_rank() if group > 1 else rank,
        "world": group,
        "pid": os.getpid(),
        "script": sys.argv[0] if sys.argv else "",
        "launched": started().told(),
        "environment": environment(switches),
        # here and at the end: Python takes away the script's name before it ends
        "modules": own_modules(),
    }


def code_told() -> Dict[str, Any]:
    """Return what is known at a process's end of the installed code and libraries it has loaded."""
    code, unhashed = installed_code()
    own = {f"library.{file}" for file in own_files().values()}  # those that are modules
    return {"code": {k: v for k, v in code.items() if k not in own}, "unhashed": unhashed}


def _group_size() -> int:
    distributed = torch.distributed
    is_group = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_group else 1
