"""A program that trains a study and is killed, again and again, at random points; for `test_kills`.

`python -m tests.stability.study.killing STUDY OUT SEED KILLS` trains `STUDY` into `OUT/0`, with
SIGKILL at a drawn point, then the same command again, until it has ended; then into `OUT/1`, until
there were KILLS kills. It prints, as JSON, the points and the folders. Each attempt is a process of
its own, forked from one that has imported everything and computed nothing.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

from stability.callbacks.progress import ProgressCallback
from stability.config.load import load_study
from stability.records import file_operations
from stability.records.metric_log import MetricLog
from stability.study.run_study import run_study
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver

PHASES = ("half written", "before the rename", "after the rename")
FILES = ("safetensors", "ckpt", "manifest.json")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Say when something has happened `left` times."""

    def __init__(self, left: int) -> None:
        self.left = left

    def is_over(self) -> bool:
        self.left -= 1
        return self.left == 0


def kill_in_file(suffix: str, phase: str, count: int) -> None:
    """Die while the `count`-th file with that suffix is written."""
    counter, rename = Countdown(count), file_operations.rename

    def deadly(source, target):
        due = target.name.endswith(suffix) and counter.is_over()
        if due and phase == "half written":
            os.truncate(source, source.stat().st_size // 2)
        if due and phase != "after the rename":
            die()
        rename(source, target)
        if due:
            die()

    file_operations.rename = deadly


def kill_in_line(count: int) -> None:
    """Die in the middle of the `count`-th line of a metric log."""
    counter, append = Countdown(count), MetricLog.append

    def deadly(self, *arguments, **keywords):
        if not counter.is_over():
            return append(self, *arguments, **keywords)
        before = self.position()
        append(self, *arguments, **keywords)
        after = self.position()
        os.truncate(self._path, (before + after) // 2)
        return die()

    MetricLog.append = deadly


def kill_at_step(count: int) -> None:
    """Die after the `count`-th update, whatever the arm."""
    counter, end = Countdown(count), ProgressCallback.on_train_batch_end

    def deadly(self, *arguments):
        end(self, *arguments)
        if counter.is_over():
            die()

    ProgressCallback.on_train_batch_end = deadly


class KillBetween(SilentObserver):
    """Die between two runs."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.counter = Countdown(count)

    def run_ended(self, arm, seed, state, message):
        super().run_ended(arm, seed, state, message)
        if self.counter.is_over():
            die()


COUNTS = {"line": 60, "step": 25, "between": 3, "safetensors": 10, "ckpt": 5, "manifest.json": 12}
"""How late a point of each kind may come, about as often as it happens in a study."""


def draw(dice: random.Random, deck: list[str]) -> list:
    """Return a point of a kind from `deck`, which is refilled when it is empty."""
    if not deck:
        deck += dice.sample(list(COUNTS), len(COUNTS))
    kind = deck.pop()
    count = dice.randint(1, COUNTS[kind])
    return ["file", kind, dice.choice(PHASES), count] if kind in FILES else [kind, count]


def attempt(study: Path, out: Path, point: list) -> None:
    """Train, and die at `point` if it is reached."""
    kind, *rest = point
    observer = KillBetween(*rest) if kind == "between" else SilentObserver()
    if kind != "between":
        {"file": kill_in_file, "line": kill_in_line, "step": kill_at_step}[kind](*rest)
    options = TrainOptions(wandb_mode="disabled")
    run_study(load_study(study), out, options=options, observer=observer, isolated=False)
    failed = [ended for ended in observer.ended if ended[2] != "finished"]
    if failed:
        raise SystemExit(f"{point}: {failed}")


def forked(study: Path, out: Path, point: list) -> bool:
    """Attempt in a new process; return whether it was killed. SystemExit if it failed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            attempt(study, out, point)
            code = 0
        except BaseException as error:
            sys.stderr.write(f"{point}: {error!r}\n")
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit(f"after {point} it failed")
    return False


def main(study: Path, out: Path, seed: int, kills: int) -> None:
    dice, deck, points, folder = random.Random(seed), [], [], 0
    while len(points) < kills:
        point = draw(dice, deck)
        if forked(study, out / str(folder), point):
            points.append(point)
        else:
            folder += 1
    while forked(study, out / str(folder), ["step", 10**9]):
        pass
    sys.stdout.write(json.dumps({"points": points, "folders": folder + 1}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
