"""The help of each verb: for people, within 80 columns, with an example that is right."""

import contextlib
import re
import shlex

import pytest

from stability.cli.help_text import EXAMPLES
from stability.cli.main import VERBS, main
from tests.pages import parsed


@pytest.fixture
def help_of(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def read(verb):
        with pytest.raises(SystemExit, match="0"):
            main([verb, "--help"])
        return capsys.readouterr().out

    return read


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_for_people_and_fits(verb, help_of):
    text = help_of(verb)
    lines = text.rstrip().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == f"example: {EXAMPLES[verb]}"
    for word in (
        "type:",
        "<class",
        "Optional[",
        "Literal[",
        "Path'",
        "{true,false}",
        "null",
        "_TEXT",
        "True",
        "False",
    ):
        assert word not in text, word
    assert text.startswith(f"usage: stability {verb}")
    # options as they are typed
    assert not re.findall(r"^  --\S*_\S*", text, flags=re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_an_example_is_of_its_verb_and_taken_by_its_parser(verb):
    name, *words = shlex.split(EXAMPLES[verb])
    assert (name, words[0]) == ("stability", verb)
    assert words[1:] or verb == "doctor"
    taken = parsed(words)
    assert taken or verb == "doctor"


def test_help_may_be_asked_for_by_a_word(capsys):
    for words in (["help"], ["help", "show"]):
        said = []
        for asked in (words, [*words[1:], "--help"]):
            with contextlib.suppress(SystemExit):
                assert main(asked) == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1] != ""


def test_the_list_of_verbs_and_exit_codes_fits(capsys):
    assert main(["--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_what_may_be_given_as_a_plain_word_is_in_the_usage(help_of):
    assert help_of("show").startswith("usage: stability show FOLDER [ARM] [options]\n")
    # --arm of a verdict is no plain word
    assert help_of("verdict").startswith("usage: stability verdict STUDY [options]\n")


def test_what_an_option_takes_is_said_by_a_word_or_its_choices(help_of):
    text = help_of("run")
    for line in (
        "--keep {all,reference,last,none}",
        "--jobs N ",
        "--out PATH ",
        "--only TEXT ",
        "--check-observer ",
    ):
        assert line in text
    assert "(default: runs)" in text
    assert "(default: 0)" not in text


def test_of_a_switch_that_is_on_the_help_says_how_it_is_turned_off(help_of):
    said = " ".join(help_of("record").split())
    assert "deterministic algorithms; on, unless --deterministic false" in said
    assert parsed(["record", "--deterministic", "false"])["deterministic"] is False
    assert "--check-observer false" not in said, "it is off"


def test_a_list_that_goes_on_ends_in_its_dots(help_of):
    assert "error_ratio, gain, ..." in " ".join(help_of("figure").split())
