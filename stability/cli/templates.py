"""What `stability init --template NAME` writes: the files of a first study, and what comes next."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stability.cli.output import HOLDS, print_line
from stability.config import shipped
from stability.records.atomic_files import make_folders, write_text

__all__ = ["Template", "write_template"]

Template = Literal["kernel", "precision", "script", "layouts", "checkpoints"]


@dataclass(frozen=True, slots=True)
class _Files:
    """Where the files of a template come from, by the names that they get, and what to do next."""

    sources: dict[str, Path]
    next: tuple[str, ...]


def write_template(template: Template, to: Path, name: str) -> int:
    """Write the files of a template into the folder of `to`, the YAML file of the study `name`.

    ValueError if one of them is there already; then none is written.
    """
    files = _files(template, to, name)
    for file in files.sources:
        if (to.parent / file).exists():
            raise ValueError(
                f"init: {to.parent / file}: must not be there yet; choose another folder by --to"
            )
    make_folders(to.parent)
    for file, source in files.sources.items():
        text = source.read_text(encoding="utf-8")
        own = text.replace(f"name: my_{template}\n", f"name: {name}\n", 1)
        write_text(to.parent / file, own)
    print_line(f"written: {', '.join(str(to.parent / file) for file in files.sources)}")
    if to.parent != Path():
        print_line(f"next, in {to.parent}:")
    else:
        print_line("next:")
    for line in files.next:
        print_line(f"  {line}")
    return HOLDS


def _files(template: Template, to: Path, name: str) -> _Files:
    templates, examples = shipped.configs() / "templates", shipped.examples()
    run = f"stability run {to.name}"
    if template == "kernel":
        kernel = shipped.experiments() / "own_kernel" / "own_kernel.py"
        return _Files(
            {"my_kernel.py": kernel, to.name: templates / "kernel.yaml"},
            (
                "stability check my_kernel:attend --quick   # put your kernel into my_kernel.py",
                f"stability estimate {to.name}   # how long the next takes here",
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
        (f"stability estimate {to.name}", run, f"stability verdict runs/{name}"),
    )
