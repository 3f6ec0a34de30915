"""The YAML that `stability init` writes of a command: its base, its arms and places for others.

Leaves out whether the command trains, and whether its reference is one (`init`), and what may be
asked for as an arm (`flag_arms`).
"""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from stability.cli.command_parts import CommandParts, parts_of
from stability.config.commands import GRADIENT_NEEDS
from stability.config.load import RESERVED, parse_value

__all__ = ["reference_flags", "study_text"]

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
    probe: {{candidate: {name}, every: {every}, gradient_every: {of_gradient}}}
"""
_NO_GRADIENT = f"""\
  # no PASS as it is, since the whole model's gradient is not looked at: `gradient_every: {{every}}`
  # does, and for that {GRADIENT_NEEDS}
"""
_PLANTED = """\
  # one with a planted fault, which must be found to be harmed: for that half the looks are enough
  broken:
    attention: {name}+out_gain_1pct
    probe: {{candidate: {candidate}, every: {every}, gradient_every: {of_gradient}}}
"""
_HELD_OUT = """\
  # there is no PASS without a held-out loss; of a script that evaluates none name a function that
  # does: `def loss(model):` in losses.py beside it, which returns the mean loss on text that is
  # never trained on, and is called in evaluation mode, without gradients and autocast; step 7 of
  # `stability docs your_own_training` has one
  # held_out: losses:loss
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
_GIVEN_CANDIDATE = """\
  # what is in question: another value of one flag. More candidates are arms beside it: of another
  # flag, a variable (env), commit (ref) or python
"""
_LOWER = """\
  # of a lower precision than the base, beside which no step can be judged: no PASS as it is. What
  # answers whether it matters is a study of the command with that flag, without this candidate:
  #   {instead}
"""
_GIVEN_BROKEN = """\
  # one that must be found to be harmed, or a PASS is worth nothing
"""
_OF_RATIO = """\
# where the script's own attention is no FlashAttention (PyTorch's SDPA mostly is one), the dq of a
# FlashAttention may err up to 4 times as far, since it takes delta from the rounded output; the
# default is 2. Take this in before the first run to allow that; a PASS then says so:
# policy: {max_error_ratio: 4.0}
"""
_ONE_SEED = """\
# a verdict needs 3 seeds, and the command was given none that it takes: put {seed} into it, as in
# `command: python train.py --seed {seed} {flags}`, and make these [0, 1, 2]
"""


class _Dumper(yaml.SafeDumper):
    """Quotes what would be read as something else."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    try:
        is_kept = parse_value(text) == text
    except ValueError:  # no YAML, as *.bin
        is_kept = False
    style = None if is_kept else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)


def study_text(
    name: str,
    words: Sequence[str],
    env: dict[str, str],
    steps: int,
    *,
    is_seeded: bool = True,
    attention: str = "",
    has_reference: bool = True,
    has_gradient: bool = True,
    has_loss: bool = True,
    arms: Mapping[str, Mapping[str, Any]] | None = None,
    instead: str = "",
    dtypes: Sequence[str] = (),
) -> str:
    """Return the YAML of a study of the command `words`.

    `is_seeded`: whether seeds differ; `attention`: what is in question, if it is one;
    `has_reference`: whether a reference is written where a flag is known; `has_gradient`: whether
    the gradient of the whole model can be looked at; `has_loss`: whether the script was seen to
    evaluate held-out text, else there is a place for a function that does; `arms`: the flags of a
    candidate and of a broken arm, where they are given; `instead`: the `init` to be given in place
    of this one, where the candidate can't be judged, being of a lower precision than the base;
    `dtypes`: in which the script calls its attention, where that was seen.
    """
    parts = parts_of(words)
    seeds = "[0, 1, 2]" if is_seeded else f"[0]\n{_ONE_SEED}"
    base = {
        "command": parts.command,
        "flags": parts.flags,
        **({"env": env} if env else {}),
        "train": {"steps": steps},
    }
    said = yaml.dump(
        {"base": base}, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=1000
    )
    reference = reference_flags(parts.flags) if has_reference else {}
    looks = max(1, steps // _LOOKS)
    swapped = _swapped(attention, looks, has_gradient=has_gradient) if attention else ""
    asked, broken = (swapped, "") if swapped else _asked_and_broken(parts, arms or {})
    if instead:
        asked = _LOWER.format(instead=" ".join(instead.splitlines())) + asked
    return f"""name: {name}
question: Does the candidate matter?

{said}{"" if has_loss else _HELD_OUT}
arms:
  # the base is the baseline: the low precision, as BF16, whose own error a verdict measures by;
  # with FP32 as the baseline a nudge is as far as that error, and no step can be judged
{asked}{_REFERENCE}{_reference(reference)}{broken}  rerun: {{}}
  nudge:
    nudge: {{ulps: 1}}

seeds: {seeds.rstrip()}
{_OF_RATIO if _may_err_wider(attention, dtypes) else ""}"""


def _may_err_wider(attention: str, dtypes: Sequence[str]) -> bool:
    """Whether an attention may round its output to less than FP32, and so err further in dq.

    PyTorch's own are left out: the script's is one of them.
    """
    return bool(attention) and not attention.startswith("sdpa:") and "float32" not in dtypes


def _asked_and_broken(
    parts: CommandParts, arms: Mapping[str, Mapping[str, Any]]
) -> tuple[str, str]:
    """Return the arm in question and the broken one, each as it is given, or a place for it."""
    asked = _CANDIDATE.format(switch=_OF_SWITCHES if parts.place == "{flags}" else "")
    if "candidate" in arms:
        asked = _GIVEN_CANDIDATE + _arm("candidate", arms["candidate"])
    broken = _BROKEN
    if "broken" in arms:
        broken = _GIVEN_BROKEN + _arm("broken", arms["broken"], role="broken")
    return asked, broken if arms else broken + _OF_ATTENTION


def _swapped(attention: str, every: int, *, has_gradient: bool) -> str:
    """Return the arm of an attention that is looked at, and the same with a planted fault."""
    name = attention.rpartition(":")[2]
    taken = ("baseline", "broken", "reference", "rerun", "nudge")
    # a function may be called as another arm is, or as YAML's null
    is_name = re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name) and parse_value(name) == name
    arm = name if is_name and name.lower() not in (*taken, *RESERVED) else "candidate"
    of_gradient = every if has_gradient else 0
    looks = {"every": every, "of_gradient": of_gradient}
    said = _SWAPPED.format(arm=arm, name=attention, **looks)
    said = said if has_gradient else _NO_GRADIENT.format(every=every) + said
    # no fault can be planted on PyTorch's own
    planted = "flash:fa2" if attention.startswith("sdpa:") else attention
    rarer = {name: 2 * each for name, each in looks.items()}
    return said + _PLANTED.format(name=planted, candidate=attention, **rarer)


def reference_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one flag that asks for a higher precision, with its value, where that is known.

    Empty where no flag, or more than one, is known to ask for low precision.
    """
    known: dict[str, Any] = {}
    for name, x in flags.items():
        wider = _WIDER.get(name.rpartition(".")[2].replace("-", "_"), {})
        if name in _SWITCHES and str(x) in _OFF:
            # a switch is given or not; a text stays one
            known[name] = False if x is True else _OFF[str(x)]
        elif isinstance(x, str) and x in wider:
            known[name] = wider[x]
    return known if len(known) == 1 else {}


def _reference(flags: Mapping[str, Any]) -> str:
    """Return the arm of the reference with its `flags`; a place for it where there are none."""
    if flags:
        return _arm("reference", flags, role="reference")
    lines = ["reference:", "  role: reference", "  flags: {a-precision: a-higher-one}"]
    return "".join(f"  # {line}\n" for line in lines)


def _arm(name: str, flags: Mapping[str, Any], *, role: str = "") -> str:
    """Return the arm of a change of flags."""
    said = yaml.dump(
        dict(flags), Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=sys.maxsize
    )
    given = f"    role: {role}\n" if role else ""
    return f"  {name}:\n{given}    flags: {said}"
