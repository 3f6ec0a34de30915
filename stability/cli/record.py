"""`stability record -- COMMAND`: record the training that any command does as an arm of a study."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stability.cli.output import FAILS, HOLDS, print_line
from stability.config.commands import command_training, probe_settings
from stability.tracking.environment import WandbMode, check_wandb, resolve_mode

__all__ = ["option_help", "publish", "record", "split_options"]


def record_arm(
    study: str = "",
    arm: str = "",
    seed: int = 0,
    steps: int = 0,
    snapshots: str = "",
    nudge: int = 0,
    draw: int = 0,
    role: str = "",
    change: str = "",
    may_change: str = "",
    question: str = "",
    deterministic: bool = True,
    attention: str = "",
    held_out: str = "",
    probe: str = "",
    every: int = 10,
    gradient_every: int = 0,
    same_start: bool = False,
    check_observer: bool = False,
    wandb: WandbMode | None = None,
    out: Path = Path("runs"),
    words: list[str] | None = None,
    env: dict[str, str] | None = None,
) -> int:
    """Run a command and record the training in it: no line of its code is changed.

    The arm called `baseline` comes first; every other arm is paired with it, by the seed. Exit code
    0 if the run counts, 1 if it does not, 2 for wrong input, before anything is run.

    Args:
        study: the study's name, and that of its folder
        arm: the arm's name; `baseline` is what the others are compared with
        seed: seeds Python, NumPy and torch before the script does; {seed} in the command is it
        steps: end the training after as many updates; 0: it ends by itself. The baseline's are
            those of all arms
        snapshots: updates after which the weights are kept, e.g. 10,100,1000; by default 1, 2, 5,
            10, 20, ... and the last
        nudge: move the start weights by as many units in the last place
        draw: which draw of the nudge's coin
        role: what the arm is there for: candidate, reference, rerun, nudge, broken or yardstick
        change: the path of the one change where several flags make it, e.g. flags
        may_change: what else the change is meant to change: init, batches or init,batches
        question: what the study asks
        deterministic: turn on torch's deterministic algorithms
        attention: what takes the place of scaled_dot_product_attention in the script: sdpa:math and
            its like, flash:fa2 and others of ours, or MODULE:FUNCTION of yours; with a planted
            fault flash:fa2+out_gain_1pct
        held_out: what the held-out loss is of: MODULE:FUNCTION that returns the loss of the model
            it is given, `all` that the script evaluates, or `none`; by default what the script
            evaluates every time and does not train on
        probe: an attention that runs beside the script's own, e.g. flash:fa2, compared call by
            call; with --attention that one is compared with the script's own. The script's
            environment must have stability
        every: the probe looks at every so many updates
        gradient_every: every so many updates also look at the whole model's gradient; the model
            must return its loss, or all of its own that the loss is made of
        same_start: give it the baseline's start weights, bit by bit, where its code makes others
        check_observer: run the command a second time, unobserved; it must end in the same bits
        wandb: where W&B's records of the study go once the command has ended, never from its own
            process: offline, which needs no account, online or disabled; by default where
            WANDB_MODE says, else offline
        out: folder that gets a folder named after the study
        words: the command
        env: variables that are set for it
    """
    if not study or not arm:
        missing = "--study" if not study else "--arm"
        raise ValueError(
            f"record: {missing} must be given, as in "
            "`stability record --study lr --arm baseline -- python train.py`"
        )
    if same_start and "init" in may_change.split(","):
        raise ValueError(
            "record: same_start must not be given with --may_change init, which it undoes"
        )
    from stability.recorder.launch import Asked  # heavy from here on: numpy behind the contract
    from stability.study.edited_sources import refuse_edited
    from stability.study.foreign import RunFailedError, measure_study, record_command
    from stability.study.foreign_assay import assay_recorded
    from stability.study.foreign_plan import plan_run

    # an attention that is swapped in is what a look at the gradient compares
    candidate = probe or (attention if gradient_every else "")
    asked = Asked(
        seed=_at_least(0, "seed", seed),
        steps=_at_least(0, "steps", steps),
        snapshot_steps=_listed_steps(snapshots, steps),
        deterministic=deterministic,
        attention=attention,
        held_out=held_out,
        probe=probe_settings(candidate, every, gradient_every),
        same_start=same_start,
        nudge=(_at_least(0, "nudge", nudge), _at_least(0, "draw", draw)),
    )
    run = plan_run(
        out,
        study,
        arm,
        seed,
        command_training(words or [], env or {}),
        words=words or [],
        env=env,
        asked=asked,
        role=role,
        change=change,
        may_change=[name for name in may_change.split(",") if name],
        question=question,
    )
    mode = resolve_mode(wandb)
    check_wandb(mode)
    if run.is_kept:
        refuse_edited(run)
        print_line(f"{arm}, seed {seed}: on record already, {run.paths.root}")
        assay_recorded(run, print_line)
        return HOLDS
    try:
        manifest = record_command(run, check_observer=check_observer)
    except RunFailedError as error:
        print_line(f"FAILED: {error}")
        return FAILS
    found = manifest.resolved
    ranks = f" on {found['ranks']} ranks" if found["ranks"] > 1 else ""
    print_line(
        f"{arm}, seed {seed}: {manifest.state} after {manifest.step} updates{ranks}, "
        f"{len(found['names'])} weights of {', '.join(found['models']) or 'no module'}"
    )
    for note in [*found["notes"], manifest.message, *measure_study(run)]:
        if note:
            print_line(f"  {note}")
    assay_recorded(run, print_line)
    if trouble := publish(run.folder, mode):
        print_line(trouble)
    print_line(f"ladder: stability show {run.folder}")
    return HOLDS


# its own name, since jsonargparse looks for it by that in all packages above, and one of them has a
# `record` that is loaded when it is looked for
record = record_arm


def publish(folder: Path, mode: WandbMode) -> str:
    """Publish what has ended of a study to W&B, with its report; return what went wrong."""
    if mode == "disabled":
        return ""
    from stability.analysis.study_records import read_study  # heavy: plotly for the page
    from stability.cli.workspace import publish_study
    from stability.report.page.html import write_page

    recorded = read_study(folder)
    write_page(recorded, folder)
    return publish_study(recorded, folder, mode)


def _at_least(least: int, name: str, value: int) -> int:
    if value < least:
        raise ValueError(f"record: {name} must be >= {least}, got {value}")
    return value


def _listed_steps(text: str, end: int) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() and int(word) for word in words):
        raise ValueError(
            f"record: snapshots must be whole numbers from 1, such as 10,100, got {text!r}"
        )
    steps = sorted({int(word) for word in words})
    if end and steps and steps[-1] > end:
        raise ValueError(
            f"record: snapshots must not lie beyond the end of training, step {end} as --steps "
            f"says, got {steps[-1]}"
        )
    return steps


def option_help() -> str:
    """Return what the words after the options are."""
    return (
        "--env NAME=VALUE (once for each): a variable that is set for the command\n"
        "-- COMMAND ...: what to run, e.g. -- torchrun --nproc-per-node 2 train.py --seed {seed};\n"
        "  {seed}, {arm} and {out} (a folder of the run's own) are filled in"
    )


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the command after `--`, and each `--env NAME=VALUE`, from the verb's other arguments.

    ValueError for a variable without a value.
    """
    given = list(words)
    end = given.index("--") if "--" in given else len(given)
    rest, env, remaining = [], {}, given[:end]
    while remaining:
        word = remaining.pop(0)
        if word != "--env" and not word.startswith("--env="):
            rest.append(word)
            continue
        text = word.partition("=")[2] if word != "--env" else (remaining or [""]).pop(0)
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"record: --env must be NAME=VALUE, got {text!r}")
        env[name] = value
    return rest, {"words": given[end + 1 :], "env": env}
