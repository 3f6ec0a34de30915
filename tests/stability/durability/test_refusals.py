"""Whatever the system refuses: one line says so, and the same command ends in the same bits.

Each operation of `records.file_operations` in a small study is refused once, or from then on, with
each of the errors that a disk, a quota, a mount or a process's limit gives. A write is refused half
done. What can't be recovered from is not in here: a disk that says it wrote and did not.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from stability.config.load import load_study
from stability.config.study import StudyConfig
from stability.records import file_operations
from tests.conftest import run_quietly, write_tiny
from tests.sampling import one_in, others_long
from tests.stability.study.recorded_bits import recorded_bits

CODES = (errno.ENOSPC, errno.EIO, errno.ENOLCK, errno.EROFS, errno.EMFILE)
FILES = ("protocol.json", "study.json", "distances/seed-0.json")


def _edit(content):
    content |= {"arms": {"rerun": {}}, "seeds": [0], "yardstick": "", "early_step": 1}
    content["base"]["train"] |= {"steps": 2, "snapshot_steps": [1], "checkpoint_every": 1}
    content["base"]["train"] |= {"keep_checkpoints": 1}
    content["base"]["probe"] = {"every": 0}


@contextmanager
def refusing(at: int, code: int, *, once: bool) -> Iterator[list[str]]:
    """Refuse the operation number `at`, counted from 0, and, unless `once`, all after it.

    Gives the names of the operations.
    """
    seen: list[str] = []
    real = {name: getattr(file_operations, name) for name in file_operations.__all__}

    def spoilt(name: str) -> Callable:
        def operation(*arguments):
            seen.append(name)
            number = len(seen) - 1
            if number < at or (once and number > at):
                return real[name](*arguments)
            if name == "fill":
                real[name](*arguments)
                os.truncate(arguments[0], arguments[0].stat().st_size // 2)
            elif name == "write":
                real[name](arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(code, os.strerror(code))

        return operation

    # a lease's beat comes by the clock, so that it would count at another place each time, and what
    # it meets is not told: the next change of a file looks for itself
    names = [name for name in real if name not in ("allowed_by", "touch")]
    with mock.patch.multiple(file_operations, **{name: spoilt(name) for name in names}):
        yield seen


@pytest.fixture(scope="module")
def study(tmp_path_factory, text_file) -> tuple[StudyConfig, Path, list[str]]:
    """The study, the folder of its undisturbed records, and the operations that made them."""
    folder = tmp_path_factory.mktemp("refusals")
    config = load_study(write_tiny(folder, text_file, _edit))
    with refusing(10**9, errno.EIO, once=True) as seen:
        run_quietly(config, folder / "whole")
    return config, folder / "whole" / "tiny", seen


def _check(study: tuple[StudyConfig, Path, list[str]], out: Path, at: int, code: int, once: bool):
    config, whole, names = study
    case = (at, names[at], errno.errorcode[code], "once" if once else "from then on")
    with refusing(at, code, once=once):
        try:
            ended = run_quietly(config, out).ended
            said = [message for *_, state, message in ended if state == "failed"]
            # a temporary file that can't be deleted stays, and harms nobody
            assert said or {state for *_, state, _ in ended} == {"finished"}, (case, ended)
        except OSError as error:
            said = [str(error)]
    for line in said:
        assert "\n" not in line, (case, line)
        reason = "the disk is full" if code == errno.ENOSPC else os.strerror(code)
        assert reason in line, (case, line)
        assert str(out) in line, (case, line)
    again = run_quietly(config, out).ended
    assert {state for *_, state, _ in again} == {"finished"}, (case, again)
    assert recorded_bits(out / "tiny") == recorded_bits(whole), case
    for name in FILES:
        assert (out / "tiny" / name).read_bytes() == (whole / name).read_bytes(), (case, name)


def _cases(names: list[str]) -> list[tuple[int, int, bool]]:
    """Return each operation with each error, once or from then on in turn."""
    pairs = [(at, code) for at in range(len(names)) for code in CODES]
    return [(at, code, bool((at + index) % 2)) for index, (at, code) in enumerate(pairs)]


@pytest.mark.parametrize("kind", one_in(3, ["write", "lock", "rename"]))
def test_a_refusal_is_told_in_a_line_and_the_same_command_ends_in_the_bits(study, tmp_path, kind):
    dice = random.Random(kind)
    cases = [case for case in _cases(study[2]) if study[2][case[0]] == kind]
    _check(study, tmp_path / "runs", *dice.choice(cases))


@pytest.mark.slow
@pytest.mark.parametrize("seed", others_long(range(8), slow=range(3)))
def test_refusals_that_are_drawn_change_no_bit(study, tmp_path, seed):
    for number, case in enumerate(random.Random(seed).sample(_cases(study[2]), 4)):
        _check(study, tmp_path / str(number), *case)


@pytest.mark.long
@pytest.mark.parametrize("code", CODES, ids=lambda code: errno.errorcode[code])
def test_no_refusal_changes_a_bit(study, tmp_path, code):
    for number, case in enumerate(case for case in _cases(study[2]) if case[1] == code):
        _check(study, tmp_path / str(number), *case)
        shutil.rmtree(tmp_path / str(number))
