"""The list of mutants fits the kernels as they are, and a survivor is told from a kill."""

from dataclasses import replace

import pytest

from tests.mutants.run import KERNELS, ROOT, Mutant, planted, read_mutants, run_suite


def test_the_list_fits_the_kernels():
    suites, mutants = read_mutants()
    assert len(mutants) >= 60
    assert len({(m.file, m.old, m.new) for m in mutants}) == len(mutants)
    assert all(m.old != m.new for m in mutants)
    assert {m.suite for m in mutants} == set(suites)
    assert all(
        (ROOT / "tests/kernels" / test).is_file() for suite in suites.values() for test in suite
    )
    assert {m.file.split("/")[0] for m in mutants} >= {"twin", "triton", "rounding.py"}


def test_a_mistake_that_fits_no_longer_is_named(tmp_path):
    path = tmp_path / "list.toml"
    entry = "[suites]\na = []\n[[mutants]]\nfile = 'rounding.py'\nwhy = 'w'\nnew = ''\n"
    entry += "suite = '{}'\nold = '{}'\n"
    path.write_text(entry.format("a", "no such text"))
    with pytest.raises(
        ValueError, match=r"w: `old` must occur once in rounding.py, occurs 0 times"
    ):
        read_mutants(path)
    path.write_text(entry.format("b", "round_last_bits"))
    with pytest.raises(ValueError, match="no suite 'b'"):
        read_mutants(path)


def test_only_the_copy_has_the_mistake():
    _, mutants = read_mutants()
    before = {path: path.read_text() for path in KERNELS.rglob("*.py")}
    with planted(mutants[0]) as folder:
        copies = {path: folder / KERNELS.name / path.relative_to(KERNELS) for path in before}
        changed = [path for path, copy in copies.items() if copy.read_text() != before[path]]
        assert changed == [KERNELS / mutants[0].file]
    assert not folder.exists()
    assert before == {path: path.read_text() for path in KERNELS.rglob("*.py")}


@pytest.mark.slow
def test_the_tests_run_on_the_copy_and_a_survivor_passes():
    _, mutants = read_mutants()
    ties = next(m for m in mutants if m.why == "ties go away from zero")
    assert run_suite(["test_rounding.py"], ties)[0] == 1
    harmless = replace(ties, new=f"({ties.old})")
    assert isinstance(harmless, Mutant)
    assert run_suite(["test_rounding.py"], harmless)[0] == 0
