"""The list of mutants fits the kernels as they are, and a survivor is told from a kill."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.mutants import run as mutants_run
from tests.mutants.run import (
    FAST,
    KERNELS,
    ROOT,
    SLOW,
    CannotTellError,
    Mutant,
    planted,
    read_mutants,
    run_suite,
    survivors,
)


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


def made_up(codes):
    """A `run_suite` that gives these exit codes by the sentence of the mutant, and "" for none."""
    asked = []

    def run(tests, mutant, marked=FAST):
        why = mutant.why if mutant else ""
        asked.append((why, marked))
        return codes.get((why, marked), 0), "what pytest said"

    return run, asked


def mutant(why):
    return Mutant(file="rounding.py", suite="s", why=why, old="a", new="b")


def test_the_slow_tests_try_what_the_fast_ones_let_live(monkeypatch, capsys):
    mutants = [mutant(why) for why in ("fast kills", "slow kills", "lives")]
    run, asked = made_up({("fast kills", FAST): 1, ("slow kills", SLOW): 1})
    monkeypatch.setattr(mutants_run, "read_mutants", lambda: ({"s": ["t.py"]}, mutants))
    monkeypatch.setattr(survivors, "__defaults__", (run,))
    monkeypatch.setattr("sys.argv", ["run.py", "-j", "1"])
    assert mutants_run.main() == 1
    assert asked == [
        *(("", FAST), ("fast kills", FAST), ("slow kills", FAST), ("lives", FAST)),
        *(("", SLOW), ("slow kills", SLOW), ("lives", SLOW)),
    ]
    said = capsys.readouterr().out
    assert "SURVIVED rounding.py lives\n2 of 3 mutants killed" in said
    assert said.count("SURVIVED") == 1


def test_a_suite_without_slow_tests_lets_a_mutant_live_and_a_broken_one_says_nothing():
    with ThreadPoolExecutor(1) as pool:
        none = made_up({("", SLOW): 5, ("m", SLOW): 5})[0]
        assert survivors({"s": []}, [mutant("m")], pool, SLOW, none) == [mutant("m")]
        broken = made_up({("", SLOW): 1})[0]
        with pytest.raises(CannotTellError, match="s fails without a mistake:\nwhat pytest said"):
            survivors({"s": []}, [mutant("m")], pool, SLOW, broken)
        stuck = made_up({("m", FAST): 2})[0]
        with pytest.raises(CannotTellError, match=r"rounding.py: m: the tests do not run:\nwhat"):
            survivors({"s": []}, [mutant("m")], pool, FAST, stuck)


@pytest.mark.slow
def test_the_tests_run_on_the_copy_and_a_survivor_passes():
    _, mutants = read_mutants()
    ties = next(m for m in mutants if m.why == "ties go away from zero")
    assert run_suite(["test_rounding.py"], ties)[0] == 1
    harmless = replace(ties, new=f"({ties.old})")
    assert isinstance(harmless, Mutant)
    assert run_suite(["test_rounding.py"], harmless)[0] == 0
