"""What `stability init --template NAME` writes: the files of a first study, and what comes next."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stability.cli.output import HOLDS, print_line
from stability.config import shipped
from stability.records.atomic_files import make_folders, write_text

__all__ = ["Template", "check_no_fault", "write_template"]

Template = Literal["kernel", "precision", "script", "layouts", "checkpoints"]
_PAGES: Mapping[Template, str] = {
    "kernel": "my_kernel",
    "precision": "study",
    "script": "your_own_training",
    "layouts": "layouts",
    "checkpoints": "adopt",
}
"""The page of the documentation that goes on from each template."""
_OWN = '{implementation: "my_kernel:attend"'
"""How the attention in question begins in the template's study."""
_OF_OWN = " As it comes, my_kernel.py is right, and passes."


@dataclass(frozen=True, slots=True)
class _Files:
    """Where the files of a template come from, by the names that they get, and what to do next."""

    sources: dict[str, Path]
    next: tuple[str, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)
    """What stands in the study's YAML, and what is written in its place; its own name always is."""
    is_next_here: bool = False
    """Whether the next commands are of the current folder, and not of the files'."""


def write_template(template: Template, to: Path, name: str, attention: str = "") -> int:
    """Write the files of a template into the folder of `to`, the YAML file of the study `name`.

    With an `attention` the study of the template `kernel` is of that one, and no kernel is written.
    ValueError if a file is there already, or the attention can't be; then none is written.
    """
    if attention and template != "kernel":
        raise ValueError(
            "init: attention must be given with a command or with --template kernel, got "
            f"{attention!r} with --template {template}"
        )
    files = _own_attention(attention, to, name) if attention else _files(template, to, name)
    for file in files.sources:
        if (to.parent / file).exists():
            other = "folder" if len(files.sources) > 1 else "file"
            raise ValueError(
                f"init: {to.parent / file}: must not be there yet; choose another {other} by --to"
            )
    make_folders(to.parent)
    for file, source in files.sources.items():
        text = source.read_text(encoding="utf-8")
        own = text.replace(f"name: my_{template}\n", f"name: {name}\n", 1)
        replaced = {"study.yaml": shlex.quote(to.name), **files.replaced} if file == to.name else {}
        for told, instead in replaced.items():
            own = own.replace(told, instead)
        write_text(to.parent / file, own)
    print_line(f"written: {', '.join(str(to.parent / file) for file in files.sources)}")
    if to.parent != Path() and not files.is_next_here:
        print_line(f"next, in {to.parent}:")
    else:
        print_line("next:")
    for line in files.next:
        print_line(f"  {line}")
    print_line(f"explained, step by step: stability docs {_PAGES[template]}")
    return HOLDS


def check_no_fault(attention: str) -> None:
    """ValueError for an attention in question that has a planted fault already."""
    if "+" in attention:
        raise ValueError(
            f"init: attention must be given without a planted fault, got {attention!r}: the study "
            "has an arm with one beside it"
        )


def _own_attention(attention: str, to: Path, name: str) -> _Files:
    """Return the study of the template `kernel`, of an attention that is there already.

    It is imported from the current folder, as `stability check` does, so the next commands are of
    this folder, wherever the study lies. ValueError if it can't be, or is the baseline's.
    """
    written = shlex.quote(str(to))
    return _Files(
        {to.name: shipped.configs() / "templates" / "kernel.yaml"},
        (
            f"stability check {attention} --quick --dtype bf16",
            f"stability estimate {written}   # how long the next takes here",
            f"stability run {written}",
            f"stability verdict runs/{name}",
        ),
        {_OWN: _in_yaml(attention), _OF_OWN: "", "study.yaml": written},
        is_next_here=True,
    )


def _in_yaml(attention: str) -> str:
    """Return how an arm's attention begins in YAML; ValueError unless it can be the candidate."""
    check_no_fault(attention)
    import torch  # heavy

    from stability.probe.attention_registry import attention_from_text, resolve_attention

    config = attention_from_text(attention)
    resolved = resolve_attention(config, torch.device("cpu"))
    if resolved.name == resolve_attention("baseline", torch.device("cpu")).name:
        raise ValueError(
            f"init: attention must be another one than the baseline's, got {attention!r}: the arm "
            "in question would change nothing"
        )
    profile = f", profile: {json.dumps(config.profile)}" if config.profile else ""
    return f"{{implementation: {json.dumps(config.implementation)}{profile}"


def _files(template: Template, to: Path, name: str) -> _Files:
    templates, examples = shipped.configs() / "templates", shipped.examples()
    study = shlex.quote(to.name)
    run = f"stability run {study}"
    if template == "kernel":
        kernel = shipped.experiments() / "own_kernel" / "own_kernel.py"
        return _Files(
            {"my_kernel.py": kernel, to.name: templates / "kernel.yaml"},
            (
                "stability check my_kernel:attend --quick --dtype bf16   # put your kernel there",
                f"stability estimate {study}   # how long the next takes here",
                run,
                f"stability verdict runs/{name}",
            ),
        )
    if template == "script":
        return _Files(
            {"train.py": examples / "gpt.py", to.name: templates / "script.yaml"},
            (run, f"stability verdict runs/{name}"),
        )
    if template == "checkpoints":
        series = "baseline=checkpoints/baseline lr_x2=checkpoints/lr_x2"
        return _Files(
            {"save_checkpoints.py": examples / "save_checkpoints.py"},
            (
                "python save_checkpoints.py   # or checkpoints of your own",
                f"stability adopt {series} --study {name} --change lr_x2=lr",
                f"stability show runs/{name}",
            ),
        )
    return _Files(
        {to.name: templates / f"{template}.yaml"},
        (f"stability estimate {study}", run, f"stability verdict runs/{name}"),
    )
