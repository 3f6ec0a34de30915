"""`stability init -- COMMAND`: write a study of a command, after a trial of two updates."""

import json
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from stability.cli.output import FAILS, HOLDS, print_line
from stability.cli.record import split_options as split_command
from stability.cli.templates import Template, write_template
from stability.config.command_study import expand_commands, load_command_study
from stability.config.commands import command_training, end_of_program, own_steps
from stability.config.convert import Place
from stability.config.flags import PLACE, split_flags
from stability.config.load import RESERVED, check_name, parse_value
from stability.config.masking import masked_values, masked_words
from stability.records.atomic_files import make_folders, write_text

if TYPE_CHECKING:
    from stability.records.manifest import Manifest

__all__ = ["init", "option_help", "split_options"]

TRIAL = 2
"""Updates of the trial."""
STEPS = 100
"""Updates of an arm, unless others are asked for."""
_OF_SWITCHES = "  # a bare switch is true, and false where it is not given: bf16: true for --bf16\n"
_WIDER = {
    "dtype": {"bfloat16": "float32", "float16": "float32", "bf16": "fp32", "fp16": "fp32"},
    "precision": {"bf16-mixed": "32-true", "16-mixed": "32-true", "bf16": "fp32", "fp16": "fp32"},
    "mixed_precision": {"bf16": "no", "fp16": "no"},
}
"""Values of flags by which scripts ask for low precision, and those of a higher one."""
_SWITCHES = ("bf16", "fp16", "amp")
"""Flags that are given, or true, where they do."""
_OFF = {"True": "False", "true": "false"}
_LOOKS = 25
"""At least of a run, where an attention is swapped: the gradient is judged from 20 on."""
_OF_ATTENTION = """\
  # of an attention only the same one with a planted fault counts, and both need a probe; `stability
  # init --attention flash:fa2` (or MODULE:FUNCTION) writes them:
  # fa2: {attention: flash:fa2, probe: &looked {candidate: flash:fa2, every: 2, gradient_every: 1}}
  # broken: {attention: flash:fa2+out_gain_1pct, probe: *looked}
"""
_CANDIDATE = """\
  # what is in question: another value of one flag, variable (env), commit (ref) or python
{switch}  # candidate:
  #   flags: {{a-flag: its-other-value}}
"""
_SWAPPED = """\
  # what is in question: it takes the place of the script's own attention, and is compared with it
  {arm}:
    attention: {name}
    probe: &looked {{candidate: {name}, every: {every}, gradient_every: {every}}}
"""
_PLANTED = """\
  # one with a planted fault, which must be found to be harmed
  broken:
    attention: {name}+out_gain_1pct
    probe: *looked
"""
_REFERENCE = """\
  # the baseline one precision higher, from which both sides' distances are measured: beside BF16 by
  # autocast FP32, on weights of the same dtype
"""
_BROKEN = """\
  # a verdict also needs one that must be found to be harmed, as ten times the learning rate
  # broken:
  #   role: broken
  #   flags: {a-learning-rate: ten-times-it}
"""
_A_REFERENCE = "a reference"
_SEEDED = (
    "the command takes no seed that was found: Python, NumPy and torch are seeded before it, and "
    "another seed makes another run"
)
_SEEDS_ITSELF = (
    "the command seeds itself: given another seed beforehand it is the same run. A verdict needs 3 "
    "seeds: give it the seed that it takes, as in `-- python train.py --seed 0`, to a new file"
)
_ONE_SEED = """\
# a verdict needs 3 seeds, and the command was given none that it takes: put {seed} into it, as in
# `command: python train.py --seed {seed} {flags}`, and make these [0, 1, 2]
"""


def init(
    name: str = "",
    to: Path = Path("study.yaml"),
    steps: int | None = None,
    words: list[str] | None = None,
    env: dict[str, str] | None = None,
    template: Template | None = None,
    attention: str = "",
) -> int:
    """Write a first study: of a command, after a trial of two updates, or by a template.

    With --template nothing is tried: a study is written that runs as it is, beside the files that
    it needs, and the next commands are said. Of a command what was seen of its training is said.
    The study has a baseline, a rerun and a nudge, and places for a candidate, a reference and a
    broken arm; with --attention these are the attention and the same with a planted fault. A
    reference is written where a flag of the command is known to ask for low precision. Exit code 1
    if the trial is no training that can be recorded, or has no attention to replace.

    Args:
        name: the study's name, by default the template's, or my_study
        to: the YAML file to write; one that is there is never written over
        steps: updates of every arm; by default the command's own, of a flag as `--steps 120` or
            `--max_iters=120`, else 100. With an attention at least 20, one for each look
        words: the command
        env: variables that are set for it
        template: what the study asks of: a kernel of your own, the precision of linear layers, a
            script of your own, the layout over ranks, or checkpoints that exist already
        attention: what is in question, in the place of the script's own attention: `flash:fa2`, or
            your kernel as MODULE:FUNCTION, called as `function(q, k, v, *, causal, scale)`
    """
    if template is not None:
        _check_template(name, to, steps, attention, has_command=bool(words or env))
        return write_template(template, to, name or f"my_{template}")
    name = name or "my_study"
    given, has_seed = _with_seed(words or [])
    steps, end = _updates(steps, given)
    _check_command(name, to, steps, given, attention, end)
    text = partial(study_text, name, given, env or {}, steps, attention=attention)
    from stability.study.foreign import RunFailedError  # heavy from here on

    with tempfile.TemporaryDirectory(prefix="stability-init-") as folder:
        trials = _Trials(Path(folder), given, env or {}, attention)
        try:
            found = trials.record()
        except RunFailedError as error:
            print_line(f"FAILED: {error}")
            return FAILS
        said = "" if has_seed else trials.of_seed()
        why_not = trials.of_reference(text(), found.hashes["init_weights"])
    _print_seen(found.resolved, [said, why_not and f"no reference is written: {why_not}"])
    make_folders(to.parent)
    written = text(is_seeded=has_seed or said == _SEEDED, has_reference=not why_not)
    write_text(to, written)
    if masked_words(given) != given or masked_values(env or {}) != (env or {}):
        print_line(
            f"{to}: holds a password or key as it was given; records do not, and a variable of the "
            "shell is in neither"
        )
    print_line(f"every run ends after {steps} updates, {end}")
    _print_next(to, _to_fill_in(written), attention)
    return HOLDS


def _print_next(to: Path, missing: Sequence[str], attention: str) -> None:
    """Print what comes next, with the study in the file `to`, which lacks the arms `missing`."""
    if attention and not attention.startswith("sdpa:"):
        print_line(f"first, its numbers alone, in seconds: stability check {attention} --quick")
    todo = " and ".join(missing)
    print_line(f"{to}: {f'fill in {todo}, then: ' if todo else ''}stability run {to}")
    if _A_REFERENCE in missing:
        print_line("  a reference is the command one precision higher, as FP32 beside BF16 by")
        print_line("  autocast, by one flag of its own; without one there is no PASS")
    print_line(f"how long that takes, and what a PASS lacks: stability estimate {to}")


def _print_seen(found: Mapping[str, Any], notes: Sequence[str]) -> None:
    """Print what was seen of the training, after the `notes` that are not empty."""
    from stability.recorder.held_out import NONE_SEEN  # heavy

    trial = f"{NONE_SEEN} in {TRIAL} updates (later ones are found in the runs)"
    models = ", ".join(found["models"]) or "no module"
    print_line(f"after {TRIAL} updates: {len(found['names'])} weights of {models}")
    for note in [*notes, *(note.replace(NONE_SEEN, trial) for note in found["notes"])]:
        if note:
            print_line(f"  {note}")


@dataclass(frozen=True, slots=True)
class _Trials:
    """Records two updates of a command, as often as is asked, into a temporary folder."""

    folder: Path
    words: Sequence[str]
    env: Mapping[str, str]
    attention: str

    def record(self, study: str = "trial", seed: int = 0, words: Sequence[str] = ()) -> "Manifest":
        """Record the command, or other `words`; RunFailedError if it is no training."""
        from stability.recorder.launch import Asked  # heavy
        from stability.study.foreign import record_command
        from stability.study.foreign_plan import plan_run

        given = words or self.words
        swapped = "" if words else self.attention
        probe = {"candidate": swapped, "every": 1, "gradient_every": 1} if swapped else {}
        run = plan_run(
            self.folder,
            study,
            "baseline",
            seed,
            command_training(given, self.env),
            asked=Asked(seed=seed, steps=TRIAL, attention=swapped, probe=probe),
            words=given,
            env=self.env,
        )
        return record_command(run)

    def of_seed(self) -> str:
        """Return what is to be said of the command, given another seed beforehand."""
        from stability.study.foreign import RunFailedError  # heavy
        from stability.study.foreign_checks import SAME_RUN

        try:
            self.record(seed=1)
        except RunFailedError as error:
            if SAME_RUN in str(error):
                return _SEEDS_ITSELF
            return f"whether another seed makes another run is not known: {error}"
        return _SEEDED

    def of_reference(self, text: str, start: str) -> str:
        """Return why the reference that `text` has is none; empty if it is, or has none.

        `start` is the hash of the baseline's start weights, which must be the reference's too.
        """
        from stability.study.foreign import RunFailedError  # heavy

        path = self.folder / "study.yaml"
        write_text(path, text)
        arms = {arm.name: arm for arm in expand_commands(load_command_study(path))}
        if "reference" not in arms:
            return ""
        words = arms["reference"].config.words()
        try:
            # without the attention in question, which a reference has not
            found = self.record(study="reference", words=words)
        except RunFailedError as error:
            return str(error).partition(": ")[2]  # which begins with the run
        except ValueError as error:
            return str(error)
        same = found.hashes["init_weights"] == start
        return "" if same else f"`{shlex.join(words)}` starts from other weights, or another dtype"


def _to_fill_in(text: str) -> list[str]:
    """Return the arms that a study has places for alone, and that a verdict needs."""
    arms = {"candidate": "a candidate", "reference": _A_REFERENCE, "broken": "a broken arm"}
    return [said for arm, said in arms.items() if f"\n  # {arm}:\n" in text]


def _check_template(
    name: str, to: Path, steps: int | None, attention: str, *, has_command: bool
) -> None:
    """ValueError for what makes no sense beside --template."""
    if attention:
        raise ValueError(
            f"init: attention must be given with a command, got {attention!r} with --template"
        )
    if has_command:
        raise ValueError(
            "init: either --template or a command must be given, got both; a command's study "
            "needs no template"
        )
    if steps is not None:
        raise ValueError(
            f"init: steps must be left out with --template, got {steps}: the template's YAML has "
            "them, as train.steps"
        )
    if to.suffix not in (".yaml", ".yml"):
        raise ValueError(f"init: to must be a YAML file, got {str(to)!r}; e.g. study.yaml")
    if name:
        check_name(name, Place(source="init: name"), ())


def _check_command(
    name: str, to: Path, steps: int, words: Sequence[str], attention: str, whose: str
) -> None:
    """ValueError for a study of a command that can't be written, or would show nothing.

    `whose` choice `steps` are is said where they are too few.
    """
    check_name(name, Place(source="init: name"), ())
    if to.exists():
        raise ValueError(f"init: {to}: must not be there yet; choose another file by --to")
    if steps < 1:
        raise ValueError(f"init: steps must be >= 1, got {steps}")
    if not words:
        raise ValueError(
            "init: a command must follow --, as in `-- python train.py`, or --template "
            f"one of {', '.join(get_args(Template))}"
        )
    if "+" in attention:
        raise ValueError(
            f"init: attention must be given without a planted fault, got {attention!r}: the study "
            "has an arm with one beside it"
        )
    if not attention:
        return
    from stability.analysis.gradient_evidence import LOOKS_NEEDED  # heavy: numpy

    if steps < LOOKS_NEEDED:
        raise ValueError(
            f"init: steps must be >= {LOOKS_NEEDED} with --attention, got {steps}, {whose}: the "
            f"gradient is judged from {LOOKS_NEEDED} looks on, at most one an update"
        )


def _updates(steps: int | None, words: Sequence[str]) -> tuple[int, str]:
    """Return the updates of every arm, and whose choice they are: the command's, where it tells.

    ValueError where the command ends before init's own `steps`, and so would every run.
    """
    given = own_steps(words)
    own = ", ".join(dict.fromkeys(said for said, _ in given))
    least, first = min(((count, said) for said, count in given), default=(None, ""))
    if steps is not None:
        if least is not None and steps > least:
            raise ValueError(
                f"init: steps must be <= {least}, where the command ends itself by {first}, got "
                f"{steps}: every run would end too early; raise {first} in the command, or lower "
                "--steps before the --"
            )
        return steps, f"as init's --steps says{own and f'; the command has {own}'}"
    if least is None:
        why = "since the command names none that was found"
        return STEPS, f"{why}; --steps before the -- sets others"
    if len({count for _, count in given}) == 1:
        return least, f"the command's own {own}"
    return least, f"the command's own {first}, the smallest of {own}"


def study_text(
    name: str,
    words: Sequence[str],
    env: dict[str, str],
    steps: int,
    *,
    is_seeded: bool = True,
    attention: str = "",
    has_reference: bool = True,
) -> str:
    """Return the YAML of a study of the command `words`.

    `is_seeded`: whether seeds differ; `attention`: what is in question, if it is one;
    `has_reference`: whether a reference is written where a flag is known.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes what would be read as something else."""

    def text_of(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        style = None if parse_value(text) == text else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, text_of)
    end = end_of_program(words)
    flags = split_flags(words[end:])
    place = _place([own for flag, _, own in flags if not flag.startswith(PLACE)])
    seeds = "[0, 1, 2]" if is_seeded else f"[0]\n{_ONE_SEED}"
    names = [flag for flag, _, _ in flags]
    fixed, rest = list(words[:end]), {}
    for flag, values, own in flags:
        is_named = place == "{settings}" or own[0].startswith("-")
        is_other = flag.startswith(PLACE) or not is_named
        # as they are: what has no name, or another form, what is filled in, or given repeatedly
        if is_other or "{seed}" in values or names.count(flag) > 1:
            fixed += own
        else:
            rest[flag] = True if not values else [_value(text) for text in values]
            rest[flag] = rest[flag][0] if len(values) == 1 else rest[flag]
    # no shell reads it, and none needs its braces quoted
    command = re.sub(r"'([\w=./-]*\{seed\}[\w=./-]*)'", r"\1", shlex.join(fixed))
    base = {
        "command": f"{command} {place}",
        "flags": rest,
        **({"env": env} if env else {}),
        "train": {"steps": steps},
    }
    said = yaml.dump(
        {"base": base}, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=1000
    )
    asked = _CANDIDATE.format(switch=_OF_SWITCHES if place == "{flags}" else "")
    broken = _BROKEN + _OF_ATTENTION
    if attention:
        broken = ""
        asked = _swapped(attention, max(1, steps // _LOOKS))
    return f"""name: {name}
question: Does the candidate matter?

{said}
arms:
  # the base is the baseline: the low precision, as BF16, whose own error a verdict measures by;
  # with FP32 as the baseline a nudge is as far as that error, and no step can be judged
{asked}{_REFERENCE}{_reference(rest, is_known=has_reference)}{broken}  rerun: {{}}
  nudge:
    nudge: {{ulps: 1}}

seeds: {seeds.rstrip()}
"""


def _swapped(attention: str, every: int) -> str:
    """Return the arm of an attention that is looked at, and the same with a planted fault."""
    name = attention.rpartition(":")[2]
    taken = ("baseline", "broken", "reference", "rerun", "nudge")
    # a function may be called as another arm is, or as YAML's null
    is_name = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name) and parse_value(name) == name
    arm = name if is_name and name.lower() not in (*taken, *RESERVED) else "candidate"
    said = _SWAPPED.format(arm=arm, name=attention, every=every)
    # no fault can be planted on PyTorch's own
    planted = "flash:fa2" if attention.startswith("sdpa:") else attention
    return said + _PLANTED.format(name=planted)


def _reference(flags: Mapping[str, Any], *, is_known: bool) -> str:
    """Return the arm of the reference, filled in where a flag is known to ask for low precision.

    A place for it alone where `is_known` is not the case.
    """
    known = {
        name: _OFF[str(x)] for name, x in flags.items() if name in _SWITCHES and str(x) in _OFF
    }
    for name, x in flags.items():
        wider = _WIDER.get(name.rpartition(".")[2].replace("-", "_"), {})
        known |= {name: wider[x]} if isinstance(x, str) and x in wider else {}
    lines = ["reference:", "  role: reference", "  flags: {a-precision: a-higher-one}"]
    if len(known) != 1 or not is_known:
        return "".join(f"  # {line}\n" for line in lines)
    ((name, value),) = known.items()
    # a switch is given or not; a text stays one
    wide = "false" if flags[name] is True else json.dumps(value)
    shown = name if parse_value(name) == name else json.dumps(name)
    return f"  reference:\n    role: reference\n    flags: {{{shown}: {wide}}}\n"


def option_help() -> str:
    """Return what the words after the options are."""
    return (
        "--env NAME=VALUE (once for each): a variable that is set for the command\n"
        "-- COMMAND ...: what to run, e.g. -- python train.py --seed 0 --lr 0.1"
    )


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the command, and each `--env`, from the verb's other arguments, as `record` does."""
    return split_command(words)


def _with_seed(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the command with its seed in braces, and whether it has one."""
    given = list(words)
    if any("{seed}" in word for word in given):
        return given, True
    for index, word in enumerate(given):
        name, equals, value = word.lstrip("-").partition("=")
        if name != "seed":
            continue
        if equals and value.isdigit():
            given[index] = f"{word.partition('=')[0]}={{seed}}"
            return given, True
        if index + 1 < len(given) and given[index + 1].isdigit():
            given[index + 1] = "{seed}"
            return given, True
    return given, False


def _place(flags: Sequence[Sequence[str]]) -> str:
    """Return where flags of these words go: a script may take no other form than it was given."""
    dashed = [own for own in flags if own[0].startswith("-")]
    if flags and not dashed:
        return "{settings}"
    is_assigned = bool(dashed) and all("=" in own[0] for own in dashed)
    return "{assigned}" if is_assigned else "{flags}"


def _value(text: str) -> Any:
    """Return a flag's value as YAML would have it: a number where it is one."""
    for kind in (int, float):
        try:
            found = kind(text)
        except ValueError:
            continue
        # only where it is written again as it was: 1e-3 and 007 stay what they are
        return found if str(found) == text else text
    return text
