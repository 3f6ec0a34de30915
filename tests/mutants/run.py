"""Plant each kept mistake in a copy of the kernels, and see whether their tests find it.

    PYTHONPATH=.:kernels python tests/mutants/run.py            # or: make mutants
    PYTHONPATH=.:kernels python tests/mutants/run.py -k delta   # those that a word picks

A mutant is killed where a test fails, and survives where all pass, the fast tests of its suite and
then the slow ones. First the suites run without a mistake: a test that fails there would kill every
mutant. Exit code 1 if one survives, 2 if a suite fails without a mistake or a mutant keeps the
tests from running at all.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels/attention_kernels"
LIST = Path(__file__).with_name("kernels.toml")
PASSED, FAILED, NO_TESTS = 0, 1, 5
"""Exit codes of pytest."""
FAST, SLOW = "not slow and not long and not gpu", "slow and not long and not gpu"
"""Which tests of a suite are run."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake: in `file`, below the kernels, `old` occurs once and becomes `new`."""

    file: str
    suite: str
    why: str
    old: str
    new: str


def read_mutants(path: Path = LIST) -> tuple[dict[str, list[str]], list[Mutant]]:
    """Return the suites, by name the files of tests, and the mutants.

    ValueError for a suite that is not listed, and for an `old` that does not occur exactly once:
    the kernels have changed, and the list has to follow.
    """
    content = tomllib.loads(path.read_text())
    mutants = [Mutant(**each) for each in content["mutants"]]
    for mutant in mutants:
        if mutant.suite not in content["suites"]:
            raise ValueError(f"{path.name}: {mutant.why}: no suite {mutant.suite!r}")
        found = (KERNELS / mutant.file).read_text().count(mutant.old)
        if found != 1:
            raise ValueError(
                f"{path.name}: {mutant.why}: `old` must occur once in {mutant.file}, occurs "
                f"{found} times: {mutant.old!r}"
            )
    return content["suites"], mutants


@contextmanager
def planted(mutant: Mutant | None) -> Iterator[Path]:
    """Give a folder with a copy of the kernels that has the mistake, or none."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name) / KERNELS.name
        shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            file = copy / mutant.file
            file.write_text(file.read_text().replace(mutant.old, mutant.new))
        yield Path(name)


class CannotTellError(Exception):
    """The tests say nothing about a mutant: they fail without it, or do not run with it."""


def run_suite(tests: Sequence[str], mutant: Mutant | None, marked: str = FAST) -> tuple[int, str]:
    """Return pytest's exit code for these files of tests, and the last lines it has written."""
    files = [str(ROOT / "tests/kernels" / test) for test in tests]
    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-showlocals", "--tb=no"]
    options += [f"--confcutdir={ROOT / 'tests/kernels'}", "-m", marked]
    with planted(mutant) as folder:
        found = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    return found.returncode, "\n".join(found.stdout.splitlines()[-3:])


def survivors(
    suites: Mapping[str, Sequence[str]],
    mutants: Sequence[Mutant],
    pool: ThreadPoolExecutor,
    marked: str,
    run: Callable[..., tuple[int, str]] = run_suite,
) -> list[Mutant]:
    """Return the mutants that live through the tests marked so, and print what became of each.

    A suite that has no such test lets every mutant live. CannotTellError where the tests of one
    fail without a mistake, or do not run with one.
    """
    used = sorted({mutant.suite for mutant in mutants})
    bare = pool.map(lambda name: run(suites[name], None, marked), used)
    for suite, (code, said) in zip(used, bare, strict=True):
        if code not in (PASSED, NO_TESTS):
            raise CannotTellError(f"{suite} fails without a mistake:\n{said}")
    left = []
    found = pool.map(lambda mutant: run(suites[mutant.suite], mutant, marked), mutants)
    for mutant, (code, said) in zip(mutants, found, strict=True):
        if code not in (PASSED, FAILED, NO_TESTS):
            raise CannotTellError(f"{mutant.file}: {mutant.why}: the tests do not run:\n{said}")
        if code != FAILED:
            left.append(mutant)
        print("killed  " if code == FAILED else "LIVES   ", mutant.file, mutant.why, flush=True)
    return left


def main() -> int:
    """Run it and return the exit code."""
    parser = argparse.ArgumentParser(description="Mutants of the kernels and the twin")
    parser.add_argument("-k", default="", help="a word of the file, suite or sentence")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="how many at once")
    options = parser.parse_args()
    suites, mutants = read_mutants()
    mutants = [m for m in mutants if options.k in f"{m.file} {m.suite} {m.why}"]
    start, left = time.perf_counter(), mutants
    with ThreadPoolExecutor(options.j) as pool:
        for name, marked in (("fast", FAST), ("slow", SLOW)):
            print(f"{len(left)} mutants, {name} tests:", flush=True)
            try:
                left = survivors(suites, left, pool, marked)
            except CannotTellError as error:
                print(error)
                return 2
    for mutant in left:
        print("SURVIVED", mutant.file, mutant.why)
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(mutants) - len(left)} of {len(mutants)} mutants killed in {minutes:.0f} minutes")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
