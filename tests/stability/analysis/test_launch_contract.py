"""What two runs were started with: the same, by design other, unproven, or refused."""

from typing import Any

import pytest

from stability.analysis.launch_contract import launch_lines
from stability.config.masking import masked_values
from stability.records.manifest import Manifest


def run(arguments: str = "train.py --lr 0.5 --wd 0.1", **given: Any) -> Manifest:
    """Return the record of a run that was started with these arguments."""
    launched = {"arguments": arguments.split(), "main": "file", "files": {}, "variables": {}}
    launched |= {"set_on_the_way": []}
    command = given.pop("command", "bash run.sh").split()
    config = given.pop("config", {})
    return Manifest(
        study="study",
        arm="arm",
        seed=0,
        axis="none",
        config={"program": "bash", "flags": {}, "env": {}, **config},  # pyright: ignore
        diff={},
        environment={},
        resolved={"command": command, "launched": {**launched, **given}},
        hashes={},
        state="finished",
        step=2,
        message="",
    )


def found(first: Manifest, second: Manifest, **differences: Any) -> list[tuple[str, str]]:
    """Return how each line that isn't the same is judged, and what it says."""
    paths = {path.replace("__", "."): values for path, values in differences.items()}
    lines = launch_lines(first, second, paths)
    return [(x.sameness, x.says or x.field) for x in lines if x.sameness != "same"]


def file(sha256: str, **known: Any) -> dict[str, Any]:
    """Return what is on record of a file."""
    return {"sha256": sha256, "of": "whole", **known}


def test_two_runs_of_one_command_are_alike_however_a_value_is_joined() -> None:
    assert found(run(), run("train.py --lr=0.5 --wd 0.1")) == []


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        # in jsonargparse, and in what merges settings, the last one holds
        ("--config a.yaml --lr 0.1", "--lr 0.1 --config a.yaml", "config"),
        ("--a 1 --b 2 --a 3", "--a 1 --a 3 --b 2", "b"),
        ("--lr 0.1", "lr=0.1", "lr"),
    ],
)
def test_the_order_and_the_form_of_arguments_are_part_of_them(
    one: str, other: str, name: str
) -> None:
    said = f"the same order of arguments ({name} has another place, or form)"
    assert found(run(f"t.py {one}"), run(f"t.py {other}")) == [("unknown", said)]
    changed = run(f"t.py {other} --new 1")
    assert found(run(f"t.py {one}"), changed, flags__new=(None, "1")) == [("unknown", said)]
    assert found(run(f"t.py {one}"), run(f"t.py --new 1 {one}"), flags__new=(None, "1")) == []


@pytest.mark.parametrize(
    ("declared", "given", "is_told"),
    [
        (("0.001", "0.002"), ("0.001", "0.002"), False),
        ((1e-3, 2e-3), ("0.001", "0.002"), False),
        (("0.001", "0.002"), ("0.001", "9.0"), True),
        (("{out}/a", "{out}/b"), ("/x/a", "/x/b"), False),
        (('{"lr":1}', '{"lr":2}'), ('{"lr":1}', '{"lr":9}'), True),
        (([1, 2], [1, 3]), ("1,2", "1,3"), False),
        ((True, False), ("True", "False"), False),
    ],
)
def test_a_process_must_have_got_what_was_declared(
    declared: tuple[Any, Any], given: tuple[str, str], is_told: bool
) -> None:
    one, other = (run(f"t.py --x {value}") for value in given)
    said = (
        f"the declared values of x ({declared[0]!r} and {declared[1]!r}: the process got "
        f"{given[0]!r} and {given[1]!r})"
    )
    assert found(one, other, flags__x=declared) == ([("unknown", said)] if is_told else [])
    # a flag that stands alone, or is left out
    assert found(run("t.py --x"), run("t.py"), flags__x=(True, None)) == []


def test_a_files_name_that_is_masked_hides_no_line() -> None:
    files = {f"{x}.yaml": file(x, lines=[x, x, x]) for x in "ab"}
    masked = [masked_values(f"{x}.yaml", "secret") for x in "ab"]
    one, two = (run(f"t.py --secret {x}", files=files) for x in masked)
    said = "that a.yaml and b.yaml differ in one thing (3 lines differ)"
    assert found(one, two, flags__secret=tuple(masked)) == [("unknown", said)]


def test_a_flag_is_free_only_where_it_was_declared() -> None:
    other = run("train.py --lr 0.4 --wd 0.1")
    assert found(run(), other, flags__lr=("0.5", "0.4")) == []
    assert found(run(), other) == [("different", "the process's argument lr")]
    said = "the same arguments (lr is '0.5' in one and '0.4' in the other, which was not declared)"
    assert found(run(), other, flags__bf16=(None, True)) == [("unknown", said)]


def test_a_declared_checkpoint_may_be_given_by_its_whole_path() -> None:
    first, second = (run(f"train.py --resume /runs/{x}.pt") for x in ("a/late", "b/late"))
    assert found(first, second, start=("a/late.pt", "b/late.pt")) == []
    refused = [("different", "the process's argument resume")]
    assert found(first, second, start=("a/late.pt", "c/late.pt")) == refused
    assert found(first, second) == refused


def test_a_declared_value_may_be_handed_on_once_under_another_name() -> None:
    other = run("train.py --lr 0.4 --wd 0.1")
    assert found(run(), other, flags__argument_2=("0.5", "0.4")) == []
    assert found(run(), other, env__MY_LR=("0.5", "0.4")) == []
    one, twice = run("train.py --lr 0.5 --wd 0.5"), run("train.py --lr 0.4 --wd 0.4")
    assert len(found(one, twice, flags__argument_2=("0.5", "0.4"))) == 1


def test_a_declared_flag_that_has_reached_its_own_name_excuses_no_other_one() -> None:
    said = "the same arguments (wd is '0.1' in one and '0.2' in the other, which was not declared)"
    for order in ("--lr {0} --wd {0}", "--wd {0} --lr {0}"):
        one, two = (run("train.py " + order.format(value)) for value in ("0.1", "0.2"))
        assert found(one, two, flags__lr=("0.1", "0.2")) == [("unknown", said)]


def test_an_argument_that_one_alone_was_given_is_named() -> None:
    said = found(run(), run("train.py --lr 0.5 --wd 0.1 --bf16"), env__A=("1", "2"))
    assert said == [
        (
            "unknown",
            "the same arguments (bf16 is not given in one and given in the other, which was not "
            "declared)",
        )
    ]


def test_a_program_in_another_folder_is_the_same_program() -> None:
    one, two = run("/a/pkg/train.py --lr 1"), run("/b/pkg/train.py --lr 1")
    assert found(one, two, ref=("1", "2")) == []
    changed = [
        run("run.py --lr 1", later_arguments=[f"/{x}/t.py", "--wd", "1"]) for x in ("a", "b")
    ]
    assert found(*changed, ref=("1", "2")) == []


def test_arguments_that_a_script_has_changed_are_compared_by_their_names() -> None:
    def begun(given: str, later: str = "") -> Manifest:
        return run(f"t.py --lr {given}", later_arguments=f"t.py --lr {later}".split())

    assert found(begun("1", "2"), begun("1", "2")) == []
    assert found(begun("1", "2"), begun("3", "4"), flags__lr=("1", "3")) == []
    assert found(begun("1", "2"), begun("1", "3")) == [("different", "the process's argument lr")]
    alone = run("t.py --lr 1", later_arguments=[])
    assert found(begun("1", "2"), alone) == [("different", "the process's argument lr")]
    # the same change in both lists is one line
    assert len(found(begun("1", "1"), begun("2", "2"), env__MY_LR=("x", "y"))) == 1


def test_another_script_behind_the_same_command_is_no_pair() -> None:
    assert found(run(), run("other.py --lr 0.5 --wd 0.1"))[0][0] == "different"


def test_a_call_is_told_by_its_caller_which_flags_count() -> None:
    own = {"command": "", "config": {"config": {"lr": 0.5}}}
    one = run("train.py --arm a --tag x", **own)
    assert found(one, run("train.py --arm b --tag x", **own)) == []
    assert found(one, run("train.py --arm b --tag y", **own))[0][0] == "unknown"


@pytest.mark.parametrize(
    ("one", "other", "judged"),
    [
        (file("a"), file("a"), []),
        (file("a"), file("b"), ["different"]),
        (file("a"), file("b", written=True), ["unknown"]),
        (file("a", of="ends", stat=[1]), file("a", of="ends", stat=[1]), []),
        (file("a", of="ends", stat=[1]), file("a", of="ends", stat=[2]), ["unknown"]),
        (file("a", of="ends", stat=[1]), file("b", of="ends", stat=[1]), ["different"]),
        (file("", of="unreadable"), file("", of="unreadable"), ["unknown"]),
        (file("", of="unread"), file("", of="unread"), ["unknown"]),
        (file("", of="stat", stat=[1, 2]), file("", of="stat", stat=[1, 2]), []),
        (file("", of="stat", stat=[1, 2]), file("", of="stat", stat=[1, 3]), ["unknown"]),
        (file("", of="stat", stat=[1, 2]), file("a"), ["unknown"]),
    ],
)
def test_a_named_file_is_judged_by_its_content(one: Any, other: Any, judged: list[str]) -> None:
    words = "train.py --config=a.yaml"
    first, second = run(words, files={"a.yaml": one}), run(words, files={"a.yaml": other})
    assert [sameness for sameness, _ in found(first, second)] == judged
    assert found(first, second, ref=("1", "2")) == []


def test_of_a_file_that_was_not_read_that_is_said() -> None:
    words = "train.py --config=a.yaml"
    one, two = (run(words, files={"a.yaml": file("", of="stat", stat=[x])}) for x in (1, 2))
    assert found(one, two) == [("unknown", "the same a.yaml (which was not read as a whole)")]


def test_another_commit_changes_no_file_outside_its_checkout() -> None:
    for axis in ({"ref": ("1", "2")}, {"setup": ("", "make")}):
        for name, judged in (("/data/a.yaml", ["different"]), ("a.yaml", []), ("data/a.yaml", [])):
            one, two = (run(f"t.py --config {name}", files={name: file(x)}) for x in ("a", "b"))
            assert [sameness for sameness, _ in found(one, two, **axis)] == judged


def test_a_file_that_one_run_alone_has_found_is_unproven() -> None:
    words = "train.py --config a.yaml"
    said = found(run(words, files={"a.yaml": file("a")}), run(words))
    assert said == [("unknown", "the same a.yaml (a file that one run alone has found)")]


def test_two_configs_may_differ_in_one_line() -> None:
    lines = ["1", "2", "3"]
    one = run("t.py --config a.yaml", files={"a.yaml": file("a", lines=lines)})
    names = {"flags__config": ("a.yaml", "b.yaml")}
    for other, judged in ((["1", "9", "3"], 0), (["1", "9", "8"], 1), ([*lines, "4", "5"], 1)):
        two = run("t.py --config b.yaml", files={"b.yaml": file("b", lines=other)})
        assert len(found(one, two, **names)) == judged


UNSEEN = "(their lines are not on record)"


@pytest.mark.parametrize(
    ("value", "other", "said"),
    [
        ("one.py", "two.py", ""),
        ("one.py", "long.py", f"that one.py and long.py differ in one thing {UNSEEN}"),
        ("one.py", "missing.yaml", f"that one.py and missing.yaml differ in one thing {UNSEEN}"),
        ("a.bin", "b.bin", ""),
        ("0.1", "0.2", ""),
        (None, "short.args", ""),
        (None, "two.py", "that two.py differ in one thing (2 lines differ)"),
        ("long.py", None, f"that long.py differ in one thing {UNSEEN}"),
        ("0.1", "two.py", "that two.py differ in one thing (2 lines differ)"),
        ("one.py a.yaml", "two.py a.yaml", ""),
        (
            "one.py,a.yaml",
            "two.py,b.yaml",
            "that one.py and a.yaml and two.py and b.yaml differ in one thing (2 lines differ)",
        ),
        ("@one.py", "@b.yaml", "that one.py and b.yaml differ in one thing (2 lines differ)"),
        (
            "my config.yaml",
            "one.py",
            "that my config.yaml and one.py differ in one thing (3 lines differ)",
        ),
    ],
)
def test_of_files_that_a_declared_flag_names_one_line_may_differ(
    value: Any, other: Any, said: str
) -> None:
    texts = {"one.py": "12", "two.py": "13", "a.yaml": "56", "b.yaml": "57", "short.args": "1"}
    files = {name: file(name, lines=[*lines]) for name, lines in texts.items()}
    files |= {"my config.yaml": file("m", lines=["7", "8", "9"])}
    files |= {name: file(name) for name in ("long.py", "a.bin", "b.bin")}
    one, two = run("t.py", files=files), run("t.py", files=files)
    assert found(one, two, flags__x=(value, other)) == ([("unknown", said)] if said else [])


def test_a_variable_is_unproven_unless_it_was_declared() -> None:
    one, two = run(variables={"A": "1", "PATH": "2"}), run(variables={"PATH": "3"})
    said = "the same variables (A, PATH: others, which the script may read)"
    assert found(one, two) == [("unknown", said)]
    assert len(found(one, two, env__A=("x", None))) == 1
    assert found(one, two, env__A=("x", None), python=("", "/other/python")) == []


def test_what_a_launcher_sets_by_its_flags_follows_from_another_program() -> None:
    one, two = run(variables={"A": "1"}), run(variables={"A": "2"}, set_on_the_way=["A"])
    assert found(one, two, program=("accelerate launch t.py", "accelerate launch -x t.py")) == []
    assert len(found(one, two, flags__x=("1", "2"))) == 1
    assert len(found(one, run(variables={"A": "2"}), program=("a.py", "b.py"))) == 1


def test_a_checkpoint_that_all_begin_from_may_be_the_change() -> None:
    one, two = run("train.py --resume a.pt"), run("train.py --resume b.pt")
    assert found(one, two, start=("a.pt", "b.pt")) == []


def test_another_number_of_ranks_is_declared_or_unproven() -> None:
    one, two = run(), run()
    one.resolved["ranks"], two.resolved["ranks"] = 1, 2
    assert found(one, two) == [("different", "the number of ranks")]
    said = "the same number of ranks (1 in one and 2 in the other)"
    assert found(one, two, flags__bf16=(None, True)) == [("unknown", said)]
    assert found(one, two, program=("python t.py", "torchrun t.py")) == []


def test_code_that_is_in_no_file_is_compared_or_unproven() -> None:
    assert found(run(main=""), run(main="")) == [
        ("unknown", "the program, which python was given in no file")
    ]
    assert found(run(main="code 1"), run(main="code 2")) == [("different", "the program")]
    assert found(run(main="code 1"), run(main="code 2"), flags__c=("1", "2")) == []


def test_a_record_that_tells_nothing_of_it_proves_nothing() -> None:
    older = run()
    older.resolved.pop("launched")
    assert found(older, run()) == [("unknown", "what the process was started with")]
    ours = run(config={})
    ours.config.pop("program")  # pyright: ignore
    assert found(ours, ours) == []
