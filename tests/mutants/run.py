"""Plant each kept mistake in a copy of the kernels, and see whether their tests find it.

    PYTHONPATH=.:kernels python tests/mutants/run.py            # or: make mutants
    PYTHONPATH=.:kernels python tests/mutants/run.py -k delta   # those that a word picks

A mutant is killed where a test fails, and survives where all pass. First the suites run without a
mistake: a test that fails there would kill every mutant. Exit code 1 if one survives, 2 if a suite
fails without a mistake or a mutant keeps the tests from running at all.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels/attention_kernels"
LIST = Path(__file__).with_name("kernels.toml")
PASSED, FAILED = 0, 1


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


def run_suite(tests: Sequence[str], mutant: Mutant | None) -> tuple[int, str]:
    """Return pytest's exit code for these files of tests, and the last lines it has written."""
    files = [str(ROOT / "tests/kernels" / test) for test in tests]
    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-showlocals", "--tb=no"]
    options += [f"--confcutdir={ROOT / 'tests/kernels'}", "-m", "not slow and not long and not gpu"]
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


def main() -> int:
    """Run it and return the exit code."""
    parser = argparse.ArgumentParser(description="Mutants of the kernels and the twin")
    parser.add_argument("-k", default="", help="a word of the file, suite or sentence")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="how many at once")
    options = parser.parse_args()
    suites, mutants = read_mutants()
    mutants = [m for m in mutants if options.k in f"{m.file} {m.suite} {m.why}"]
    start, survived = time.perf_counter(), 0
    with ThreadPoolExecutor(options.j) as pool:
        used = sorted({mutant.suite for mutant in mutants})
        for suite, (code, said) in zip(
            used, pool.map(lambda name: run_suite(suites[name], None), used), strict=True
        ):
            if code != PASSED:
                print(f"{suite} fails without a mistake:\n{said}")
                return 2
        found = pool.map(lambda mutant: run_suite(suites[mutant.suite], mutant), mutants)
        for mutant, (code, said) in zip(mutants, found, strict=True):
            if code not in (PASSED, FAILED):
                print(f"{mutant.file}: {mutant.why}: the tests do not run:\n{said}")
                return 2
            survived += code == PASSED
            print("SURVIVED" if code == PASSED else "killed  ", mutant.file, mutant.why, flush=True)
    minutes = (time.perf_counter() - start) / 60
    print(f"{len(mutants) - survived} of {len(mutants)} mutants killed in {minutes:.0f} minutes")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
