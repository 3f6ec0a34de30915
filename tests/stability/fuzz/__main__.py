"""Runs trials from a first seed to a last one: `python -m tests.stability.fuzz 0 2000 FOLDER`.

Prints each complaint as it is found, and at the end what was tried. The records are made once for
a folder: a run of other sources is refused to go on, so after a change of the code take a new one.
"""

import random
import shutil
import sys
import time
from pathlib import Path

from tests.stability.fuzz.records import Copy, make_records
from tests.stability.fuzz.trials import Fuzzer, Report


def _main(first: int, last: int, folder: Path) -> int:
    source = folder / "source"
    made = source / "made"  # a process that is stopped before leaves a part of the records
    if not made.is_file():
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        text = source / "words.txt"
        lines = Path(random.__file__).read_text(encoding="utf-8").splitlines()
        text.write_text("\n".join(line.strip() for line in lines if line.strip()))
        make_records(source, text)
        made.touch()
    work = folder / f"work-{first}"
    shutil.rmtree(work, ignore_errors=True)
    fuzzer = Fuzzer(Copy(source / "runs", work), verbs=4)
    total, began = Report(), time.monotonic()
    for line in fuzzer.whole().found:
        sys.stderr.write(f"{line}\n")
    told = 0
    for seed in range(first, last):
        fuzzer.trial(seed, total)
        for line in total.found[told:]:
            sys.stdout.write(f"{line}\n")
        told = len(total.found)
        if seed % 20 == 0:
            sys.stderr.write(f"{seed} {total.records} {time.monotonic() - began:.0f} s\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"seeds {first} to {last - 1}: {total.records} records damaged, {total.calls} calls, "
        f"{total.compared} with their numbers compared, {told} complaints, "
        f"{time.monotonic() - began:.0f} s\n"
    )
    return bool(told)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
