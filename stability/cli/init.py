"""`stability init -- COMMAND`: write a study of a command, after a trial of two updates."""

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from stability.cli.command_parts import parts_of, with_seed
from stability.cli.flag_arms import flags_of_arms, is_lower_precision, with_values_joined
from stability.cli.output import FAILS, HOLDS, print_line
from stability.cli.record import split_options as split_command
from stability.cli.study_text import study_text
from stability.cli.templates import Template, check_no_fault, write_template
from stability.cli.trials import SEEDED, TRIAL, Trials, tried
from stability.config.commands import PRECISION_QUESTION, filled_in, own_steps
from stability.config.convert import Place
from stability.config.load import check_name
from stability.config.masking import masked_values, masked_words
from stability.records.atomic_files import make_folders, write_text

__all__ = ["init", "option_help", "split_options"]

STEPS = 100
"""Updates of an arm, unless others are asked for."""
_A_REFERENCE = "a reference"
_A_MILDER = "a milder broken arm"
_A_LOSS = "a held-out loss"
_AS_ASKED = "as init's --steps says"
_CHECKED = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""What `stability check` calls a dtype."""
_OF_PRECISION = (
    "{} is a lower precision than the command's, beside which no step can be judged: give the flag "
    "to the command, and leave --candidate out, as in the command at the end; "
    f"{PRECISION_QUESTION}"
)


def init(
    name: str = "",
    to: Path = Path("study.yaml"),
    steps: int | None = None,
    words: list[str] | None = None,
    env: dict[str, str] | None = None,
    template: Template | None = None,
    attention: str = "",
    candidate: str = "",
    broken: str = "",
) -> int:
    """Write a first study: of a command, after a trial of two updates, or by a template.

    With --template nothing is tried: a study is written that runs as it is, beside the files that
    it needs, and the next commands are said. Of a command what was seen of its training is said.
    The study has a baseline, a rerun and a nudge, and places for a candidate, a reference and a
    broken arm; --candidate and --broken fill in theirs, and with --attention these are the
    attention and the same with a planted fault. A reference is written where a flag of the command
    is known to ask for low precision. A candidate and a broken arm are tried too, for one update;
    a broken arm that stops in it is written, and told. Exit code 1 if another trial is no training
    that can be recorded, or has no attention to replace. Of what the command prints in its trials
    that of the first one is shown.

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
            your kernel as MODULE:FUNCTION, called as `function(q, k, v, *, causal, scale)`. With
            --template kernel it is in the place of my_kernel.py, which is not written then
        candidate: what is in question as FLAG=VALUE, another value of one flag of the command, as
            lr=0.01 or dtype=fp32; true is a bare switch. Another candidate is added in the file
        broken: FLAG=VALUE of an arm that must be found to be harmed, as ten times the learning rate
    """
    given_arms = {"candidate": candidate, "broken": broken}
    asked = {arm: text for arm, text in given_arms.items() if text}
    if template is not None:
        _check_template(name, to, steps, asked, has_command=bool(words or env))
        return write_template(template, to, name or f"my_{template}", attention)
    name = name or "my_study"
    given, has_seed = with_seed(words or [])
    steps, end = _updates(steps, given)
    _check_command(name, to, steps, given, attention, end)
    _check_beside_attention(attention, asked)
    arms = flags_of_arms(parts_of(given), asked)
    text = partial(study_text, name, given, env or {}, steps, attention=attention, arms=arms)
    from stability.study.foreign import RunFailedError  # heavy from here on

    with tempfile.TemporaryDirectory(prefix="stability-init-") as folder:
        try:
            trials, found = tried(Trials(Path(folder), given, env or {}, attention))
            of_gradient = trials.of_gradient()
            said = "" if has_seed else trials.of_seed()
            why_not = trials.of_reference(text(), found.hashes["init_weights"])
            stopped = trials.of_arms(text(), arms)
        except RunFailedError as error:
            print_line(f"FAILED: {error}")
            return FAILS
    notes = [said, why_not and f"no reference is written: {why_not}"]
    notes += [of_gradient, stopped]
    instead = ""
    if is_lower_precision(parts_of(given), arms.get("candidate", {})):
        notes.append(_OF_PRECISION.format(candidate))
        further = {
            "name": f"{name}_precision",
            "broken": broken,
            "steps": str(steps) if end.startswith(_AS_ASKED) else "",
        }
        instead = _with_lower_baseline(trials, text(), to, further)
    _print_seen(found.resolved, notes)
    make_folders(to.parent)
    is_seeded = has_seed or said == SEEDED
    dtypes = found.resolved.get("dtypes", ())
    written = text(
        is_seeded=is_seeded,
        has_reference=not why_not,
        has_gradient=trials.has_gradient,
        has_loss=_has_loss(found.resolved),
        instead=instead,
        dtypes=dtypes,
    )
    write_text(to, written)
    told = {"env": env or {}, **arms}
    if masked_words(given) != given or masked_values(told) != told:
        print_line(
            f"{to}: holds a password or key as it was given; records do not, and a variable of the "
            "shell is in neither"
        )
    print_line(f"every run ends after {steps} updates, {end}")
    if instead:
        print_line(f"{to}: in it no step can be judged; instead: {instead}")
    else:
        missing = [*_to_fill_in(written), *([_A_MILDER] if stopped else [])]
        missing += [] if _has_loss(found.resolved) else [_A_LOSS]
        _print_next(to, missing, attention, dtypes, may_evaluate=_may_evaluate(found.resolved))
    return HOLDS


def _with_lower_baseline(trials: Trials, text: str, to: Path, further: Mapping[str, str]) -> str:
    """Return the `init` whose command is that of the candidate in the study `text`.

    `further` are its options by name, where they are not empty.
    """
    options = {"to": str(to.with_name(f"{to.stem}_precision.yaml")), **further}
    given = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    given += [word for name in trials.env for word in ("--env", f"{name}={trials.env[name]}")]
    words = [filled_in(word, {"seed": 0}) for word in trials.words_of_arms(text)["candidate"]]
    return shlex.join(["stability", "init", *masked_words([*given, "--", *words])])


def _print_next(
    to: Path,
    missing: Sequence[str],
    attention: str,
    dtypes: Sequence[str] = (),
    *,
    may_evaluate: bool = False,
) -> None:
    """Print what comes next, with the study in the file `to`, which lacks the arms `missing`.

    `dtypes` are those in which the script calls its attention, where they are known: a kernel need
    not be for others. `may_evaluate` is whether too few evaluations for that loss were
    seen, of which a longer run may have more.
    """
    if attention and not attention.startswith("sdpa:"):
        asked = ",".join(_CHECKED[x] for x in dtypes if x in _CHECKED)
        of = f" --dtype {asked}" if asked else ""
        print_line(f"first, its numbers alone: stability check {attention} --quick{of}")
    if attention.partition(":")[0] == "flash":
        print_line(
            f"{attention} is this package's own kernel, on a CPU its twin in PyTorch: of another"
        )
        print_line("  build, as flash-attn's, it says nothing; give that one as MODULE:FUNCTION")
    from attention_kernels.testing.sentences import listed  # heavy: torch

    todo = listed(missing) if missing else ""
    print_line(f"{to}: {f'fill in {todo}, then: ' if todo else ''}stability run {to}")
    if "a candidate" in missing and _A_REFERENCE not in missing:
        print_line("  without a candidate the ladder tells how far the baseline's precision moves")
        print_line("  the weights, and how much the held-out loss differs, beside the reference")
    if _A_REFERENCE in missing:
        print_line("  a reference is the command one precision higher, as FP32 beside BF16 by")
        print_line("  autocast, by one flag of its own, which the script may have to get first;")
        print_line("  without one there is no PASS")
    if _A_LOSS in missing:
        print_line("  a held-out loss comes of a function of yours: `held_out` in the study says")
        print_line("  how; without one there is no PASS")
        if may_evaluate:
            print_line("  none is needed where the script itself evaluates twice or more in a run")
    print_line(f"how long that takes, and what a PASS lacks: stability estimate {to}")
    print_line("explained, step by step: stability docs your_own_training")


def _has_loss(found: Mapping[str, Any]) -> bool:
    """Return whether the trial has seen a held-out loss; one may also be seen in longer runs."""
    from stability.recorder.held_out import NO_LOSS  # heavy

    return not any(note.startswith(NO_LOSS) for note in found["notes"])


def _may_evaluate(found: Mapping[str, Any]) -> bool:
    """Return whether the trial has seen too few evaluations, of which more may come later."""
    from stability.recorder.held_out import NO_LOSS, NONE_SEEN, SEEN_ONCE  # heavy

    too_few = (f"{NO_LOSS}{NONE_SEEN}", f"{NO_LOSS}{SEEN_ONCE}")
    return any(note.startswith(too_few) for note in found["notes"])


def _print_seen(found: Mapping[str, Any], notes: Sequence[str]) -> None:
    """Print what was seen of the training, after the `notes` that are not empty."""
    from stability.recorder.held_out import NO_LOSS, NONE_SEEN, SEEN_ONCE  # heavy

    trial = f"in {TRIAL} updates (later ones are found in the runs)"
    models = ", ".join(found["models"]) or "no module"
    print_line(f"after {TRIAL} updates: {len(found['names'])} weights of {models}")
    seen = list(found["notes"])
    for few in (NONE_SEEN, SEEN_ONCE):
        seen = [note.replace(few, f"{few} {trial}") for note in seen]
    for note in [*notes, *seen]:
        if note:
            lacks = "; no PASS without it" if note.startswith(NO_LOSS) else ""
            print_line(f"  {note}{lacks}")


def _to_fill_in(text: str) -> list[str]:
    """Return the arms that a study has places for alone, and that a verdict needs."""
    arms = {"candidate": "a candidate", "reference": _A_REFERENCE, "broken": "a broken arm"}
    return [said for arm, said in arms.items() if f"\n  # {arm}:\n" in text]


def _check_template(
    name: str, to: Path, steps: int | None, asked: Mapping[str, str], *, has_command: bool
) -> None:
    """ValueError for what makes no sense beside --template; `asked` are arms of a command."""
    for option, text in asked.items():
        raise ValueError(
            f"init: --{option} must be given with a command, got {text!r} with --template, whose "
            "study has its arms; change them in the file"
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
    check_no_fault(attention)
    if not attention:
        return
    from stability.analysis.gradient_evidence import LOOKS_NEEDED  # heavy: numpy

    if steps < LOOKS_NEEDED:
        raise ValueError(
            f"init: steps must be >= {LOOKS_NEEDED} with --attention, got {steps}, {whose}: the "
            f"gradient is judged from {LOOKS_NEEDED} looks on, at most one an update"
        )


def _check_beside_attention(attention: str, asked: Mapping[str, str]) -> None:
    """ValueError for an arm that is `asked` beside an attention, which has both of them."""
    has = {
        "candidate": "the attention is the candidate",
        "broken": "the broken arm is the attention with a planted fault, and of an attention no "
        "other counts",
    }
    for option, text in asked.items() if attention else ():
        raise ValueError(
            f"init: --{option} must be left out with --attention, got {text!r} beside "
            f"{attention!r}: {has[option]}"
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
        return steps, f"{_AS_ASKED}{own and f'; the command has {own}'}"
    if least is None:
        why = "since the command names none that was found"
        return STEPS, f"{why}; --steps before the -- sets others"
    if len({count for _, count in given}) == 1:
        return least, f"the command's own {own}"
    return least, f"the command's own {first}, the smallest of {own}"


def option_help() -> str:
    """Return what the words after the options are."""
    return (
        "--env NAME=VALUE (once for each): a variable that is set for the command\n"
        "-- COMMAND ...: what to run, e.g. -- python train.py --seed 0 --lr 0.1\n"
        "\n"
        "example: stability init --template kernel --attention my_module:my_attention"
    )


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the command, and each `--env`, from the verb's other arguments, as `record` does.

    ValueError also for a candidate or a broken arm that is no FLAG=VALUE.
    """
    rest, further = split_command(words)
    return with_values_joined(rest), further
