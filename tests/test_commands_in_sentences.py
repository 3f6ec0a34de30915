"""A command within a sentence is run here, or is the same as one that is, or it is said why not.

`test_pages` gives the words of each to the real parser. What stands for a name of the reader's
(`STUDY`, `MODULE:FUNCTION`, `...`) is any here.
"""

import os
import re
import shlex
import shutil
import sys
import webbrowser
from pathlib import Path

import pytest
import torch
import uvicorn
import yaml
from torch import nn

from stability.cli.main import VERBS
from tests.pages import (
    BEYOND_THIS_MACHINE,
    ROOT,
    code_of,
    in_short,
    single_commands,
    site_pages,
    spans_of,
)

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in site_pages()}

RUN_HERE = (
    "stability init -- python train.py",
    "stability init --attention flash:fa2 -- python gpt.py --bf16",
    "stability init --candidate lr=0.2 --broken lr=1 -- python train.py",
    "stability init --template kernel --attention myattn:my_attention --to mine.yaml",
    "stability init --template layouts",
    "stability adopt baseline=a/ candidate=b/",
    "stability run study.yaml --seeds 5",
    "stability status runs/study",
    "stability report runs/mine --wandb offline",
    "stability dashboard runs --allow-host localhost:9000",
    "stability export runs/quickstart",
    "stability docs",
    "stability verify quickstart.bundle.tar.gz",
)
"""In this order, in one folder."""

SEEN_TO = {
    "stability demo": "minutes; a long test of test_readme.py runs its study",
    "stability run configs/quickstart.yaml": "the same",
    "stability run configs/lr_vs_bf16.yaml": "the same",
    "stability run examples/study.yaml": "the same",
    "stability run examples/verdict.yaml": "minutes; test_foreign_assay.py, with an arm more",
    "stability verdict runs/swapped": "its verdict, asked for there",
    "stability run configs/layouts.yaml": "20 minutes; test_configs.py loads it, and "
    "test_layouts.py trains such arms",
    "stability experiment fa3_table3": "tests/experiments runs each",
    "python -m tests.stability.intercept.families.matrix": "minutes; test_families.py tries some",
    "python -m tests.kernels.scripts.published_numbers": "a minute; test_published_code.py holds "
    "the bounds",
    "pip wheel": "test_wheel.py builds it",
    "pip install": "the package index; test_wheel.py has the wheel's",
    "make demo": "several minutes; a study in short takes its place",
    "make test": "runs this test",
    "make test-slow": "runs this test",
    "make lint": ".ci/run has it",
    "make docs": "test_site.py builds the site",
    "make test-clusters": "a Slurm or a Ray; .ci/run has it where they are",
    "make mutants": "hours",
    "make gpu": "a GPU",
    "make bench": "an hour, on a quiet machine",
    "make experiments": "half an hour",
    "make screenshots": "a browser; test_screenshots.py tries its parts",
    "make release-check": "a quarter of an hour; test_release_check.py tries its parts",
}
"""What no test runs as it stands: its beginning, and where it is seen to or why it is not."""

PROGRAMS = ("stability", "make", "pip", "python")
SPOKEN = sorted(
    {
        " ".join(shlex.split(span))
        for text in TEXTS.values()
        for span in spans_of(text)
        if span.split()[0] in PROGRAMS and " " in span
    }
)
RUN = {
    " ".join(shlex.split(command, comments=True))
    for text in TEXTS.values()
    for command in single_commands(text)
    if not command.startswith((*BEYOND_THIS_MACHINE,))
} | {*RUN_HERE}

OF_THE_READER = r"(runs/)?[A-Z]+([.:=][A-Za-z]+)?"
"""A word that stands for one of the reader's: a study, an arm, a function, a flag."""


def _each(span):
    """Return the span for each choice of `init --template kernel | precision`."""
    begins, *others = span.split(" | ")
    return [begins, *(f"{begins.rpartition(' ')[0]} {other}" for other in others)]


def _pattern(span):
    """Return what a command that is the same as that of a sentence has to match.

    One that only names a verb, or a word of the reader's, may have more words.
    """
    words = span.split()
    more = "( .*)?"
    is_whole, pattern = len(words) > 2, ""
    for word in words:
        if word in ("...", "COMMAND"):
            pattern += more
        elif re.fullmatch(OF_THE_READER, word):
            pattern += r" \S+"
            is_whole = False
        else:
            pattern += " " + re.escape(word)
    return pattern.strip() + ("" if is_whole else more)


def _is_seen_to(span):
    return any(span == each or span.startswith(f"{each} ") for each in SEEN_TO)


@pytest.mark.parametrize("span", SPOKEN)
def test_a_command_within_a_sentence_is_run_or_it_is_said_why_not(span):
    if not _is_seen_to(span):
        for each in _each(span):
            assert any(re.fullmatch(_pattern(each), command) for command in RUN), each


def test_what_is_seen_to_elsewhere_is_in_a_sentence():
    spoken = {each for each in SEEN_TO for span in SPOKEN if f"{span} ".startswith(f"{each} ")}
    assert spoken == SEEN_TO.keys()


OPTIONS = sorted(
    {
        tuple(span.split()[:2])
        for text in TEXTS.values()
        for span in spans_of(text)
        if re.match(r"\w+ --\w", span) and span.split()[0] in VERBS
    }
)


@pytest.mark.parametrize(("verb", "option"), OPTIONS)
def test_an_option_that_is_named_with_its_verb_is_of_it(verb, option, capsys):
    assert code_of([verb, "--help"]) == 0
    assert re.search(rf"{option}(?![\w-])", capsys.readouterr().out)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The reader's folder: scripts, checkpoints, a kernel and a study in short; no browser."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setattr(webbrowser, "open", lambda _address: True)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_args, **_kwargs: None)
    for script in ("train.py", "gpt.py"):
        shutil.copy(ROOT / "examples" / script, tmp_path)
    kernel = "from torch.nn.functional import scaled_dot_product_attention as sdpa\n\n\n"
    kernel += "def my_attention(q, k, v, *, causal, scale=None):\n"
    kernel += "    return sdpa(q, k, v, is_causal=causal, scale=scale)\n"
    (tmp_path / "myattn.py").write_text(kernel)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for step in (0, 10):
            torch.manual_seed(step)
            torch.save(nn.Linear(3, 2).state_dict(), tmp_path / folder / f"step-{step}.pt")
    return tmp_path


def _study(place, name):
    """Write a study of one arm, of five updates."""
    study = yaml.safe_load(in_short((ROOT / "configs/templates/precision.yaml").read_text()))
    study |= {"name": name, "yardstick": "", "policy": {}}
    study["arms"] = {"nudge": study["arms"]["nudge"]}
    (place / "study.yaml").write_text(yaml.safe_dump(study))


@pytest.mark.slow
def test_commands_of_sentences_run(place, capfd):
    for command in RUN_HERE:
        words = shlex.split(command)
        if words[1] == "init":
            (place / "study.yaml").unlink(missing_ok=True)
        elif words[1] == "run":
            _study(place, "quickstart")
        assert code_of(words[1:]) == 0, (command, capfd.readouterr())
        assert capfd.readouterr().out, command
        if words[1] == "export":  # it is taken elsewhere
            shutil.move(place / "runs" / "quickstart.bundle.tar.gz", place)
        if words[1] == "run":  # the pages call it by three names
            for name in ("study", "mine"):
                (place / "runs" / name).symlink_to("quickstart")
    assert (place / "mine.yaml").exists()
