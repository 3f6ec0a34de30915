"""`stability doctor`: shows what this machine has and which attentions run on it, or why not.

It changes nothing on the machine or in torch's settings. What it times in a second or two is a
first impression (`make bench` and `make gpu` measure). What runs here, and how fast, is its end.
"""

from typing import TYPE_CHECKING, Any

from stability import __version__
from stability.cli.abilities import abilities, speeds
from stability.cli.output import HOLDS, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["doctor"]


def doctor(json: bool = False) -> int:
    """Show versions, hardware, engines, formats and attentions, then what runs here and how fast.

    Args:
        json: print JSON instead of tables
    """
    found = _examine()
    if json:
        print_json(found)
    else:
        _print(found)
    return HOLDS


def _examine() -> dict[str, Any]:
    """Return what `--json` prints; engines, formats and attentions are those of one device."""
    import torch  # heavy

    from attention_kernels.formats import FORMATS
    from attention_kernels.machine import (
        engines,
        hardware,
        native_formats,
        precision_switches,
        versions,
    )
    from attention_kernels.peers.registry import peers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # a CUDA machine has a CPU as well; all but the hardware is shown for one device, the GPU if any
    chips = ["cpu", "cuda"] if device == "cuda" else ["cpu"]
    native = native_formats(device)
    return {
        "device": device,
        "versions": {"stability": __version__} | versions(),
        "hardware": {chip: hardware(chip) for chip in chips},
        "switches": precision_switches(),
        "engines": [engine._asdict() for engine in engines(device)],
        "formats": {name: native.get(name, "") for name in FORMATS},
        "attentions": [*_our_own(), *(peer._asdict() for peer in peers(device))],
        "abilities": [each._asdict() for each in abilities(device, torch.cuda.device_count())],
        "speeds_ms": speeds(device),
    }


def _our_own() -> list[dict[str, Any]]:
    """Return a row for each profile of our own attentions; all of them run on any machine."""
    from attention_kernels.profiles import BASELINE_PROFILES, PROFILES  # heavy

    names = [*(f"flash:{name}" for name in PROFILES)]
    names += [*(f"baseline:{name}" for name in BASELINE_PROFILES), "golden"]
    own = {"version": __version__, "available": True, "reason": ""}
    return [{"name": name} | own for name in names]


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console  # heavy
    from rich.text import Text

    console = Console()
    console.print()
    _facts(console, "versions", {n: v or "not there" for n, v in found["versions"].items()})
    for chip, facts in found["hardware"].items():
        _facts(console, chip, facts)
    if found["device"] == "cpu":
        _facts(console, "cuda", {"name": "no CUDA device"})
    _facts(console, "switches", found["switches"])
    _facts(console, "engines", {e["name"]: e["how"] for e in found["engines"]})
    by_unit = {name: unit or "emulated" for name, unit in found["formats"].items()}
    _facts(console, f"formats on {found['device']}", by_unit)
    console.print(Text(f"attentions on {found['device']}", style="bold"))
    console.print(_attentions(found["attentions"]), highlight=False)
    console.print()
    console.print(Text("what runs here", style="bold"))
    console.print(_abilities(found["abilities"]), highlight=False)
    console.print()
    times = {
        name: took if isinstance(took, str) else f"{took:.3g} ms"
        for name, took in found["speeds_ms"].items()
    }
    _facts(console, "how fast, the fastest of a few (`stability estimate` times a study)", times)


def _facts(console: "Console", title: str, facts: dict[str, Any]) -> None:
    """Print a bold title and, below it, a line for each name and its value."""
    from rich.text import Text  # heavy

    grid = _grid()
    for name, value in facts.items():
        grid.add_row(Text(f"  {name}", style="dim"), Text(str(value)))
    console.print(Text(title, style="bold"))
    console.print(grid, highlight=False)
    console.print()


def _attentions(rows: list[dict[str, Any]]) -> "Table":
    """Lay out a line for each family of our profiles, then a line for each other attention."""
    from rich.text import Text  # heavy

    grid = _grid(columns=4)
    own = {"flash": [], "baseline": []}
    for row in rows:
        family, _, profile = row["name"].partition(":")
        if family in own:
            own[family].append(profile)
    for family, profiles in own.items():
        grid.add_row(f"  {family}:PROFILE", Text("yes", "green"), "", ", ".join(profiles))
    for row in rows:
        if row["name"].partition(":")[0] not in own:
            runs = Text("yes", "green") if row["available"] else Text("no", "red")
            grid.add_row(f"  {row['name']}", runs, row["version"], Text(row["reason"]))
    return grid


def _abilities(rows: list[dict[str, Any]]) -> "Table":
    from rich.text import Text  # heavy

    grid = _grid(columns=3)
    for row in rows:
        runs = Text("yes", "green") if row["available"] else Text("no", "red")
        grid.add_row(f"  {row['name']}", runs, Text(row["how"]))
    return grid


def _grid(columns: int = 2) -> "Table":
    from rich.table import Table  # heavy

    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(columns - 1):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid
