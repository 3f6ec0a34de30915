"""One cell of the matrix: a family under one implementation, watched and not, and what came of it.

    python -m tests.stability.intercept.families.matrix

writes the whole matrix into `docs/families.md`; `test_matrix` holds it to what is measured.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from stability import shadow
from stability.analysis.locate import Located, locate
from stability.analysis.noise import below_the_noise
from stability.analysis.probe_records import read_probe
from stability.intercept.coverage import LayerCoverage
from stability.records.metric_names import deviation_name
from tests.stability.intercept.families.families import FAMILIES, Family, loss_of
from tests.stability.intercept.families.independent import recording
from tests.stability.intercept.families.planted import FAULTS, Planted

__all__ = [
    "DTYPES",
    "Faults",
    "cell_of_faults",
    "cells_of_look",
    "look",
    "planted",
    "rows_in_docs",
    "train",
]

LOOKS = 12
DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16"}


def train(
    model: nn.Module,
    family: Family,
    dtype: torch.dtype = torch.float32,
    after: Callable[[], object] = lambda: None,
    steps: int = LOOKS,
) -> list[Tensor]:
    """Train for some steps, in BF16 by autocast; return the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = loss_of(model, family.inputs(step))
        loss.backward()
        optimizer.step()
        after()
    return [x.detach().clone() for x in model.state_dict().values()]


def are_equal(plain: list[Tensor], watched: list[Tensor]) -> bool:
    """Whether two trainings ended in the same bits."""
    return all(torch.equal(x, y) for x, y in zip(plain, watched, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """What was said of the planted faults in one dtype."""

    equal_bits: bool
    layer: str
    """The attention that the candidates are wrong in."""
    head: int
    found: dict[str, list[Located]]
    """The places that were named, by fault."""
    below_the_noise: tuple[str, ...]
    """The faults of which it is said instead how large an error would have been named."""


def planted(family: Family, implementation: str, dtype: torch.dtype) -> Faults:
    """Train with and without `shadow`, its candidates wrong in the last attention's last head."""
    plain = train(family.build(implementation), family, dtype)
    model = family.build(implementation)
    head = family.heads - 1
    candidates = [Planted(name, fault, head) for name, fault in FAULTS[dtype].items()]

    def end_step() -> None:
        probe.step()
        for candidate in candidates:
            candidate.begin_step()

    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "probe"
        with shadow(model, [*candidates], heads=True, records=records) as probe:
            weights = train(model, family, dtype, end_step)
        metrics = read_probe(records).metrics
    places = locate(metrics)
    measured = {name.split("/")[1] for name in metrics if name.startswith("deviation/")}
    unsure = below_the_noise(metrics, named={place.shadow for place in places})
    return Faults(
        equal_bits=are_equal(plain, weights),
        layer=[layer for layer in probe.layers if layer in measured][-1],
        head=head,
        found={
            name: [place for place in places if place.shadow == _as_metric(name)]
            for name in FAULTS[dtype]
        },
        below_the_noise=tuple(
            name
            for name in FAULTS[dtype]
            if any(line.startswith(f"{_as_metric(name)}: below the noise") for line in unsure)
        ),
    )


def _as_metric(name: str) -> str:
    return name.replace(".", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One look at a training step."""

    equal_bits: bool
    coverage: tuple[LayerCoverage, ...]
    metrics: dict[str, float] = field(repr=False)
    difference: float
    """The largest difference of a figure from its recomputation, NaN if there is none."""
    figures: int
    """How many figures were recomputed."""
    missing: tuple[str, ...]
    """Calls that were made, and of which nothing was measured."""


def look(family: Family, implementation: str) -> Look:
    """Look once, beside an independent recording of the same calls in an unwatched model."""
    plain = family.build(implementation)
    with recording(plain) as calls:
        loss_of(plain, family.inputs(0)).backward()
    model = family.build(implementation)
    coverage: tuple[LayerCoverage, ...] = ()
    metrics: dict[str, float] = {}
    try:
        with shadow(model, "flash:golden") as probe:
            loss_of(model, family.inputs(0)).backward()
            try:
                probe.step()
                metrics = probe.metrics
            finally:
                coverage = probe.coverage
    except ValueError as error:
        if "is seen" not in str(error):
            raise
    recomputed = {
        deviation_name(call.layer, what, "golden_baseline_rel_fro"): value
        for call in calls
        for what, value in call.relative_errors().items()
    }
    differences = [abs(metrics[name] - x) for name, x in recomputed.items() if name in metrics]
    grads = zip(plain.parameters(), model.parameters(), strict=True)
    return Look(
        equal_bits=all(x.grad is None or torch.equal(x.grad, y.grad) for x, y in grads),
        coverage=coverage,
        metrics=metrics,
        # a NaN among them is one of the whole
        difference=float(torch.tensor(differences).amax()) if differences else float("nan"),
        figures=len(differences),
        missing=tuple({name.split("/")[1]: 0 for name in recomputed if name not in metrics}),
    )


DOCS = Path(__file__).parents[4] / "docs" / "families.md"
_BEGIN, _END = "<!-- the matrix -->\n", "<!-- the end of the matrix -->\n"


def rows_in_docs() -> dict[tuple[str, str], list[str]]:
    """Return the rows' cells as the docs have them, by family and implementation."""
    table = DOCS.read_text().split(_BEGIN)[1].split(_END)[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    return {(row[0], row[2]): row for row in rows if row}


def cells_of_look(family: Family, implementation: str, seen: Look) -> list[str]:
    """Return the first cells of a row; that of the figures is empty where there are none."""
    counts = dict.fromkeys(("seen", "seen in part", "not seen"), 0)
    for one in seen.coverage:
        counts[one.state] += 1
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    figures = f"{seen.figures}, {seen.difference:.0e}" if seen.figures else ""
    return [family.name, family.what, implementation, states, figures]


def cell_of_faults(found: Faults) -> str:
    """Return which faults were named, and which lie below the noise."""
    named = [fault for fault, places in found.found.items() if places]
    rest = [f"{fault}: below the noise" for fault in found.below_the_noise]
    return "; ".join(["all three" if len(named) == 3 else ", ".join(named), *rest])


def _row(family: Family, implementation: str) -> str:
    seen = look(family, implementation)
    cells = cells_of_look(family, implementation, seen)
    for dtype in DTYPES:
        found = planted(family, implementation, dtype) if seen.figures else None
        cells.append(cell_of_faults(found) if found else "")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure the whole matrix, and write it between its marks in the docs."""
    head = "| family | has | implementation | attentions | figures, largest difference |"
    head += " faults named in FP32 | in BF16 |\n" + "|---" * 7 + "|\n"
    rows = [
        _row(family, implementation)
        for family in FAMILIES.values()
        for implementation in family.implementations
        if implementation != "flex_attention"
    ]
    before, rest = DOCS.read_text().split(_BEGIN)
    after = rest.split(_END)[1]
    DOCS.write_text(before + _BEGIN + head + "\n".join(rows) + "\n" + _END + after)


if __name__ == "__main__":
    main()
