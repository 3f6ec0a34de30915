"""What the entry point makes of words that are missing, and of what the system refuses."""

import errno
import os

import pytest

from stability.cli.help_text import EXAMPLES
from stability.cli.main import main


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command line and returns its one line of refusal."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        return capsys.readouterr().err.removeprefix("stability: ").removesuffix("\n")

    return run


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("show", "show: folder (the folder of a study, e.g. runs/quickstart, or of a probe) must"),
        ("report", "report: folder (the folder of a study, e.g. runs/quickstart, or of a probe) m"),
        ("run", "run: study (the study's YAML file) must"),
        ("verify", "verify: first (a study's folder, or the file that `stability export` makes of"),
        ("compare", "compare: a (the candidate) and b (the reference, whose size and spread the "),
        ("check", "check: attention (MODULE:FUNCTION of (q, k, v, *, causal, scale=None), or a n"),
    ],
)
def test_a_verb_without_its_words_says_what_they_are_and_gives_an_example(refused, verb, said):
    line = refused(verb)
    assert line.startswith(said)
    assert line.endswith(f" must be given, as in `{EXAMPLES[verb]}`")


def test_what_is_given_is_not_asked_for_again(refused):
    assert refused("compare", "one").startswith("compare: b (the reference,")


def test_an_option_without_a_value_is_named_as_it_is_typed(refused):
    assert refused("estimate", "study.yaml", "--keep") == "--keep needs a value"
    assert refused("dashboard", "--allow_host") == "--allow-host needs a value"


def _failing(monkeypatch, error):
    def show(folder: str) -> int:
        raise error

    monkeypatch.setattr("stability.cli.show.show", show)


@pytest.mark.parametrize(
    ("code", "file", "said"),
    [
        (errno.ENOTDIR, "file/study/.x.tmp", "file: must be a folder, is a file; name another one"),
        (
            errno.EACCES,
            "there/.x.1234.tmp",
            "there: must be open to you, got Permission denied; name another one, or ask its owner",
        ),
        (
            errno.EACCES,
            "file",  # it is open, and the folder lets no other take its place
            "HERE: must be open to you, got Permission denied; name another one, or ask its owner",
        ),
        (errno.ENOENT, "there/x.csv", "there/x.csv: No such file or directory"),
        (errno.EIO, None, "show: Input/output error"),
    ],
)
def test_what_the_system_refuses_is_told_of_the_users_own_path(
    refused, tmp_path, monkeypatch, code, file, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    _failing(monkeypatch, OSError(code, os.strerror(code), file))
    assert refused("show", "x") == said.replace("HERE", str(tmp_path))


def test_a_file_that_is_a_number_of_the_systems_is_told_without_it(refused, monkeypatch):
    _failing(monkeypatch, OSError(errno.EBADF, os.strerror(errno.EBADF), 99))
    assert refused("show", "x") == "show: Bad file descriptor"


def test_a_sentence_of_ours_about_a_missing_file_stays_as_it_is(refused, monkeypatch):
    _failing(monkeypatch, FileNotFoundError("text.txt: must be a text"))
    assert refused("show", "x") == "text.txt: must be a text"
