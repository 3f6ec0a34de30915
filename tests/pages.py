"""Reads the pages of the documentation as their readers do: blocks, commands, studies in short."""

import functools
import importlib
import re
import runpy
from pathlib import Path

import yaml

from stability.cli import main as command_line

__all__ = [
    "BEYOND_THIS_MACHINE",
    "ROOT",
    "TAKEN",
    "blocks_for",
    "blocks_of",
    "code_of",
    "commands_of",
    "in_short",
    "in_words",
    "parsed",
    "prose_of",
    "single_commands",
    "site_pages",
    "spans_of",
]

ROOT = Path(__file__).parent.parent

BEYOND_THIS_MACHINE = {
    "make demo": "several minutes; a study in short takes its place",
    "make test": "runs this test",
    "make install": "a virtual environment from the package index; test_wheel.py has the wheel's",
    "make experiments": "half an hour",
    "source .venv/bin/activate": "the environment of the test takes its place",
    "pip install": "the package index; that the extra exists is asked",
    "ray start": "a cluster: tests/clusters/test_ray.py starts one, as test_slurm.py does a Slurm",
    "stability run study.yaml --executor slurm": "the same; the real parser takes the line",
    "stability run study.yaml --executor ray": "the same",
    "wandb": "an account, or a terminal of its own; that the verb exists is asked",
}
"""Commands of fenced blocks, by what they begin with, that no test runs, and why."""


def site_pages():
    """Return the files that are pages of the site, in its order, README first."""
    sections = runpy.run_path(str(ROOT / "docs" / "scripts" / "build_site.py"))["PAGES"]
    return [origin for pages in sections.values() for origin in pages.values()]


def blocks_of(text):
    """Return the fenced blocks of a page: language and content."""
    return re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)


TAKEN = {}
"""By page and block (language, content), the tests that have said to go through it."""


def blocks_for(test, page, *languages, having=""):
    """Return the blocks of a page that `test` (FILE::NAME) goes through, in the page's order.

    They are those in `languages` in which the pattern `having` is found, as `blocks_of` has them.
    Asked for when a file of tests is imported, so that `test_pages` knows of all of them.
    """
    blocks = blocks_of((ROOT / page).read_text(encoding="utf-8"))
    found = [each for each in blocks if each[0] in languages and re.search(having, each[1])]
    for each in found:
        TAKEN.setdefault((page, *each), set()).add(test)
    return found


def prose_of(text):
    """Return a page without its fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def spans_of(text):
    """Return what stands between backticks in a page's prose, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose_of(text))]


def commands_of(blocks):
    """Return the commands of a page's shell blocks, without comments."""
    return [
        line.split(" #")[0].strip()
        for language, block in blocks
        if language in ("sh", "bash")
        for line in block.splitlines()
        if line.strip() and not line.startswith("#")
    ]


def single_commands(text):
    """Yield the commands of a page's blocks, each by itself, a loop's as its first turn has it."""
    for line in commands_of(blocks_of(text)):
        for command in re.split(r"&&|;", line.replace("$seed", "0")):
            command = re.sub(r"^do( |$)", "", command.strip())
            if command and command not in ("done", "for seed in 0 1"):
                yield command


def parsed(words):
    """Return what the real parser makes of `stability WORDS`, without doing it.

    SystemExit for words that it does not take.
    """
    verb = words[0]
    if verb not in command_line.VERBS:
        command_line.main(words)
    module = importlib.import_module(command_line.VERBS[verb][0])
    command = getattr(module, verb)
    taken = {}

    @functools.wraps(command)
    def take(**given):
        taken.update(given)
        return 0

    setattr(module, verb, take)
    try:
        assert command_line.main(words) == 0
    finally:
        setattr(module, verb, command)
    return taken


def in_short(text):
    """Return a template's study with one seed, six steps, and a small model where it names one."""
    content = yaml.safe_load(text)
    base = content["base"]
    base["train"].update(steps=6, snapshot_steps=[2, 4])
    if "model" in base:
        base["model"] = {"depth": 1, "width": 32, "heads": 1, "context": 16, "vocab_size": 256}
        base["train"].update(batch_size=2, checkpoint_every=3)
        content["early_step"] = 2
    for arm in content["arms"].values():
        arm.update({"until": 4} if "until" in arm else {})
    content["seeds"], content["policy"] = [0], {**content.get("policy", {}), "step": 4}
    return yaml.safe_dump(content)


def in_words(answer):
    """Return the words of an answer that is printed, without its figures and breaks of lines.

    Figures are of one machine and number of threads, and how wide the terminal is says where lines
    are broken.
    """
    text = re.sub(r"[-+]?\d[\d.]*(e[-+]\d+)?", "0", answer)
    return " ".join(re.sub("─+", "─", text).split())


def code_of(words):
    """Return the exit code of a command, given as its words after `stability`."""
    try:
        return command_line.main(words)
    except SystemExit as stop:
        return stop.code
