"""What a reader sees: rows of speed and of cost, and which requirements are met."""

from typing import Any, NamedTuple

__all__ = ["Requirement", "print_costs", "print_requirements", "print_speeds"]

Row = dict[str, Any]


class Requirement(NamedTuple):
    """A measured number and what it has to be."""

    claim: str
    measured: float
    limit: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        """Whether the number is within the limit; NaN is not."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    def to_dict(self) -> Row:
        """Return what the results file stores."""
        return self._asdict() | {"met": self.met}


def print_speeds(title: str, rows: list[Row]) -> None:
    """Print one problem's attentions: milliseconds and TFLOPS, forward and backward."""
    print(f"\n{title}")
    print(f"  {'':18}{'forward ms':>12}{'TFLOPS':>9}{'backward ms':>13}{'TFLOPS':>9}")
    for row in rows:
        if "refused" in row:
            print(f"  {row['name']:18}{'not here: ':>12}{row['refused']}")
            continue
        ahead = f"{1e3 * row['forward_s']:12.3f}{row['forward_tflops']:9.3g}"
        back = f"{'forward only':>22}"
        if row["backward_s"] is not None:
            back = f"{1e3 * row['backward_s']:13.3f}{row['backward_tflops']:9.3g}"
        print(f"  {row['name']:18}{ahead}{back}")


def print_costs(title: str, rows: list[Row]) -> None:
    """Print variants of the fast path: how many times as long each takes, or why it doesn't run."""
    print(f"\n{title}")
    print(f"  {'':26}{'forward':>9}{'backward':>10}   (1.00 is the fast path)")
    for row in rows:
        if "refused" in row:
            print(f"  {row['name']:26}{'not here: ':>10}{row['refused']}")
        else:
            print(f"  {row['name']:26}{row['forward_cost']:9.2f}{row['backward_cost']:10.2f}")


def print_requirements(requirements: list[Requirement]) -> None:
    """Print each requirement with its number and whether it is met."""
    print("\nrequirements")
    for requirement in requirements:
        sign = "<=" if requirement.at_most else ">="
        verdict = "met " if requirement.met else "MISS"
        number = f"{requirement.measured:.3g} {sign} {requirement.limit:.3g}"
        print(f"  {verdict}  {number:16} {requirement.claim}")
