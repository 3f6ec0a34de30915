"""A training that is anybody's command, as the config of an arm: its program, flags, variables.

`python train.py --lr 0.1` is the program `python train.py` and the flag `lr`: what two arms differ
in has a path, as `flags.lr`, as has any value of our own trainer's config. `{seed}`, `{arm}` and
`{out}` stand for what is another one in each run, so that the config is the same for all seeds.
Leaves out how the command is run (`recorder.launch`).
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from stability.config.flags import parse_flags, split_flags
from stability.config.masking import masked_values, masked_words

__all__ = [
    "ADOPTED",
    "CHANGES",
    "GRADIENT_NEEDS",
    "OF_THE_RUN",
    "PLACEHOLDERS",
    "PRECISION_QUESTION",
    "attention_name",
    "attention_values",
    "call_training",
    "check_held_out",
    "command_training",
    "end_of_program",
    "filled_in",
    "is_adopted",
    "is_command",
    "own_steps",
    "probe_settings",
    "training_config",
]

PLACEHOLDERS = ("seed", "arm", "out")
"""What a command may hold in braces."""

ADOPTED = "checkpoints"
"""What stands for the program where nothing was run: checkpoints were adopted."""

CHANGES = ("init", "batches")
"""What a change may be meant to change besides the numerics: the start weights, the batches."""

GRADIENT_NEEDS = (
    "the model must return its loss, as (logits, loss) or `.loss`, or all of its own that the loss "
    "is made of"
)
"""What a look at the whole model's gradient needs of a script, whose model is called once more."""

PRECISION_QUESTION = (
    "whether the baseline's own precision matters has no PASS: with the lower one as the baseline, "
    "the higher one as the reference and no candidate, the ladder and the report tell how far "
    "apart they train"
)
"""What is said where a study asks for the precision by whose error all others are judged."""

OF_THE_RUN = ("study", "arm", "seed", "out")
"""What a script is told of which run it is."""


_STEP_FLAGS = (
    *("steps", "max_steps", "train_steps", "max_train_steps", "num_train_steps", "total_steps"),
    *("iters", "max_iters", "num_iters", "train_iters", "max_iterations", "num_iterations"),
)
"""Flags, less a group's name before them, by which scripts are told how many updates to make.

Without those that are often something else: `num_steps` of a sampler, `iterations` of a solver.
"""
_NUMBER = re.compile(r"\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d+)?")


def command_training(words: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return what the training that the command `words` does is told, in JSON values.

    `env` are the variables that are set for it. What is secret is masked. ValueError if there is no
    word.
    """
    if not words:
        raise ValueError("record: a command must follow --, as in `-- python train.py`, got none")
    end = end_of_program(words)
    return {
        "program": " ".join(masked_words(words[:end])),
        "flags": parse_flags(masked_words(words[end:])),
        "env": masked_values(env),
    }


def call_training(
    config: Mapping[str, Any] | Namespace | None, argv: Sequence[str]
) -> dict[str, Any]:
    """Return what a training that calls `stability.record` is told, in JSON values.

    `config` as the script gives it, or the flags in `argv` for None. What names a run of it, as its
    seed, is left out: it is no change of numerics. ValueError for a value that is not JSON's.
    """
    given = vars(config) if isinstance(config, Namespace) else config
    if given is None:
        told = parse_flags(masked_words(argv[1:]))
    else:
        told = masked_values(_json_values(given, "config"))
    kept = {name: value for name, value in told.items() if name not in OF_THE_RUN}
    program = argv[0].replace("\\", "/").rsplit("/", 1)[-1] if argv else ""
    return {"program": program, "flags" if given is None else "config": kept, "env": {}}


def _json_values(value: Any, place: str) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _json_values(v, f"{place}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_values(item, place) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    raise ValueError(
        f"stability.record: {place} must be a number, a text, true, false, null, or a list or "
        f"mapping of these, got {type(value).__name__} {value!r}"
    )


def training_config(
    training: Mapping[str, Any],
    *,
    steps: int,
    snapshot_steps: Sequence[int],
    nudge: tuple[int, int] = (0, 0),
    attention: str = "",
    held_out: str = "",
    probe: Mapping[str, Any] | None = None,
    deterministic: bool = True,
    may_change: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the config of a run of a `training` that is not ours, in JSON values.

    `nudge` are the units in the last place by which its start weights are moved and the number of
    the draw, `attention` what takes the place of the script's own. `may_change` names what else is
    meant to be another one than the baseline's, of `CHANGES`: of a flag nobody can tell. `held_out`
    is as `check_held_out` has it; `deterministic` is False where torch's deterministic algorithms
    are not asked for. ValueError for another name.
    """
    unknown = [name for name in may_change if name not in CHANGES]
    if unknown:
        raise ValueError(
            f"record: may-change must be of {', '.join(CHANGES)}, got {', '.join(unknown)}"
        )
    return {
        **training,
        "attention": attention_values(attention),
        "nudge": {"ulps": nudge[0], "draw": nudge[1]},
        "changes": {name: name in may_change for name in CHANGES},
        "train": {"steps": steps, "snapshot_steps": list(snapshot_steps)},
        # only where it is given: older records have none
        **({} if deterministic else {"deterministic": False}),
        **({"held_out": held_out} if held_out else {}),
        **({"probe": dict(probe)} if probe else {}),
    }


def attention_values(name: str) -> dict[str, str]:
    """Return what a record holds of the attention `name`, as `flash:fa2` or `flash:fa2+dq_gain`.

    A fault that is planted on it is a value of its own, as in an arm of our own trainer.
    """
    implementation, _, fault = name.partition("+")
    # only where it is given: older records have none
    return {"implementation": implementation, **({"fault": fault} if fault else {})}


def attention_name(values: Mapping[str, str]) -> str:
    """Return the name of which `attention_values` made `values`."""
    return "+".join(filter(None, (values["implementation"], values.get("fault", ""))))


def probe_settings(candidate: str, every: int, gradient_every: int) -> dict[str, Any]:
    """Return what an instrument looks at, in JSON values; empty if nothing.

    ValueError for a number below 0, or where no look at attention is asked for.
    """
    for name, value in (("every", every), ("gradient_every", gradient_every)):
        if value < 0:
            raise ValueError(f"probe: {name} must be >= 0, got {value}")
    if not candidate and gradient_every:
        raise ValueError(
            "probe: a candidate must be given where gradient_every is, as `flash:fa2`, got none"
        )
    settings = {"candidate": candidate, "every": every, "gradient_every": gradient_every}
    return settings if candidate else {}


def check_held_out(name: str) -> str:
    """Return `name` if it says what is held out; ValueError otherwise.

    It is MODULE:FUNCTION, "all" that a script evaluates, "none" of it, or empty: what it evaluates
    every time and does not train on.
    """
    module, _, function = name.partition(":")
    is_function = function.isidentifier() and all(x.isidentifier() for x in module.split("."))
    if name not in ("", "all", "none") and not is_function:
        raise ValueError(f"held_out must be MODULE:FUNCTION, all or none, got {name!r}")
    return name


def is_adopted(config: Mapping[str, Any]) -> bool:
    """Whether a recorded config is that of checkpoints that existed already (`stability adopt`)."""
    return config.get("program") == ADOPTED


def is_command(config: Mapping[str, Any]) -> bool:
    """Whether a recorded config is that of a command, and not of our own trainer."""
    return "program" in config


def filled_in(word: str, values: Mapping[str, object]) -> str:
    """Return `word` with each of `PLACEHOLDERS` in braces replaced; other braces are left."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", str(value))
    return word


def end_of_program(words: Sequence[str]) -> int:
    """Return where the program ends: with its script, its module, or its first word."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return index + 1
    for index, word in enumerate(words[:-1]):
        if word == "-m":
            return index + 2
    return 1


def own_steps(words: Sequence[str]) -> list[tuple[str, int]]:
    """Return each flag of a command that says how many updates it makes, as given, and the number.

    `--steps 120`, `--max_iters=1e3`, `++trainer.max_steps=120`; below 1, as for no limit, it is
    none. What follows the number, as `conf.yaml`, is the script's; several numbers are no count.
    """
    found = []
    for flag, values, own in split_flags(words[end_of_program(words) :]):
        group, _, name = flag.lstrip("+").replace("-", "_").rpartition(".")
        if name not in _STEP_FLAGS or group not in ("", "train", "trainer", "training"):
            continue
        counts = [float(text) for text in values if _NUMBER.fullmatch(text)]
        is_first = len(counts) == 1 and _NUMBER.fullmatch(values[0])
        if is_first and counts[0] >= 1 and counts[0].is_integer():
            found.append((" ".join(own[:2]), int(counts[0])))
    return found
