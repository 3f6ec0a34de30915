"""No page is forgotten, and no command, option or value on one is made up.

Each block of each page has the test that goes through it, which has asked for it by `blocks_for`;
`BLOCKS` counts them. Of what is written within sentences, the verbs and options are given to the
real parser here, and the values of a study to the real loader.
"""

import dataclasses
import importlib
import inspect
import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import yaml

from stability.cli.main import VERBS
from stability.cli.reference import said_by
from stability.cli.templates import Template
from stability.config.arms import expand
from stability.config.command_study import load_command_study
from stability.config.convert import ConfigError
from stability.config.load import load_study
from stability.config.schema import ArmConfig
from stability.config.study import StudyConfig
from tests.pages import (
    BEYOND_THIS_MACHINE,
    ROOT,
    TAKEN,
    blocks_for,
    blocks_of,
    parsed,
    prose_of,
    single_commands,
    site_pages,
    spans_of,
)

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in site_pages()}

BLOCKS = {
    "README.md": {"sh": 4, "text": 1},
    "docs/quickstart.md": {"text": 2},
    "docs/my_kernel.md": {"sh": 6},
    "docs/your_own_training.md": {"sh": 9, "yaml": 2, "python": 2, "": 3},
    "docs/hugging_face.md": {"sh": 2, "python": 1, "text": 1},
    "docs/slurm.md": {"sh": 1},
    "docs/read_a_report.md": {"sh": 1},
    "docs/policy.md": {"sh": 1, "yaml": 1},
    "docs/adopt.md": {"sh": 2},
    "docs/extend.md": {"sh": 1, "python": 4, "toml": 1, "yaml": 1, "diff": 2},
    "docs/study.md": {"sh": 1, "": 1, "yaml": 1},
    "docs/look.md": {"sh": 2},
    "docs/instrument.md": {"sh": 1, "python": 3},
    "docs/layouts.md": {"yaml": 1},
    "docs/executors.md": {"sh": 4},
    "docs/attention_library.md": {"sh": 1, "python": 1, "text": 1},
    "docs/verdict.md": {"sh": 2},
    "docs/trust.md": {"sh": 1},
    "docs/script_proof.md": {"": 1},
    "docs/architecture.md": {"text": 1},
    "kernels/README.md": {"python": 3},
    "experiments/README.md": {"sh": 2},
    "CONTRIBUTING.md": {"sh": 1},
}
"""By page, how many blocks of each language are gone through. Who adds a block looks that its test
does with it what a reader would, and counts it here."""

A_COMMAND = "test_pages.py::test_a_command_is_one_that_its_program_takes"
# what sets up a clone is of no other test: that one takes the commands of all pages
blocks_for(A_COMMAND, "README.md", "sh", having="^make demo")
blocks_for(A_COMMAND, "CONTRIBUTING.md", "sh")
ARMS_OF = {"docs/layouts.md": "layouts.yaml", "docs/study.md": "quickstart.yaml"}
ARMS_SHOWN = [
    (study, block)
    for page, study in ARMS_OF.items()
    for _, block in blocks_for("test_pages.py::test_arms_of_a_page_are_a_studys", page, "yaml")
]


def _all_taken():
    """Return `TAKEN` once every file of tests that asks for blocks has done so."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "blocks_for(" in path.read_text(encoding="utf-8"):
            names = path.relative_to(ROOT).with_suffix("").parts
            importlib.import_module(".".join(names))
    return TAKEN


def test_every_block_of_every_page_is_counted():
    counts = {page: Counter(kind for kind, _ in blocks_of(text)) for page, text in TEXTS.items()}
    assert {page: count for page, count in counts.items() if count} == BLOCKS


def test_every_block_of_every_page_has_a_test_that_goes_through_it():
    there = {(page, *block) for page, text in TEXTS.items() for block in blocks_of(text)}
    assert there - _all_taken().keys() == set()


def test_those_tests_are_there():
    for test in set().union(*_all_taken().values()):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_every_page_of_the_repository_is_of_the_site():
    roots = (ROOT, ROOT / "docs", ROOT / "configs", ROOT / "experiments", ROOT / "kernels")
    there = {str(path.relative_to(ROOT)) for root in roots for path in root.glob("*.md")}
    assert there == set(TEXTS)


SCRIPTS = {
    "save_checkpoints.py": "test_readme.py",  # beside a door, which is gone through
    "experiments/find_own_kernel.py": "experiments/test_find_own_kernel.py",
}
"""By script that a page has Python run, the test that runs it."""
FENCED = sorted(
    {(page, command) for page, text in TEXTS.items() for command in single_commands(text)}
)


@pytest.mark.parametrize(("page", "command"), FENCED)
def test_a_command_is_one_that_its_program_takes(page, command):
    program, *rest = shlex.split(command)
    if program == "stability":
        assert _is_taken(rest)
    elif program == "make":
        assert rest[0] in _targets()
    elif command.startswith("pip install"):
        assert _extras(command) <= _known_extras()
    elif program == "python":
        assert Path(rest[0]).name in (ROOT / "tests" / SCRIPTS[rest[0]]).read_text()
    else:
        assert command.startswith((*BEYOND_THIS_MACHINE,)), "no test knows this kind of command"


def test_what_is_beyond_this_machine_is_on_a_page():
    written = [command for _, command in FENCED]
    unused = [x for x in BEYOND_THIS_MACHINE if not any(each.startswith(x) for each in written)]
    assert unused == []


def _targets():
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))


def _extras(text):
    return {
        name
        for names in re.findall(r"training-stability\[([\w,]+)\]", text)
        for name in names.split(",")
    }


def _known_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def _each(words):
    """Return the words for each choice of `init --template kernel | precision`."""
    first = words.index("|") if "|" in words else len(words)
    choices = [words[first - 1], *words[first + 1 :: 2]]
    return [[*words[: first - 1], choice] for choice in choices]


def _is_taken(words):
    """Whether the real parser takes `stability WORDS`; letters that stand for a number are one."""
    words = ["1" if re.fullmatch("[KN]", word) else word for word in words]
    try:
        taken = parsed(words)
    except SystemExit as stop:  # of --help, or because it takes them not
        return stop.code == 0
    _check_values(words[0], taken)
    return True


def _check_values(verb, taken):
    """What the verb itself would refuse of a value, and its parser does not."""
    if verb == "init" and taken.get("template"):
        assert taken["template"] in get_args(Template)
    if verb == "experiment" and taken["name"] not in (None, "all"):
        assert (ROOT / "experiments" / f"{taken['name']}.py").is_file()
    of_base = {
        key: value
        for key, value in (taken.get("overrides") or {}).items()
        if not key.startswith(("slurm.", "ray."))
    }
    if of_base:
        load_study(ROOT / "configs" / "quickstart.yaml", of_base)


PROGRAMS = ("stability", "make", "pip", "python")
SPOKEN = sorted(
    {
        (page, span)
        for page, text in TEXTS.items()
        for span in spans_of(text)
        if span.split()[0] in PROGRAMS and " " in span
    }
)


@pytest.mark.parametrize(("page", "span"), SPOKEN)
def test_a_command_within_a_sentence_is_real(page, span):
    program, *rest = shlex.split(span)
    if program == "stability":
        assert rest[0] in VERBS
        assert len(rest) == 1 or all(map(_is_taken, _each(rest)))
    elif program == "make":
        assert rest[0] in _targets()
    elif program == "pip":
        assert rest[0] in ("install", "wheel")
        assert _extras(span) <= _known_extras()
    elif rest[0] == "-m":
        assert (ROOT / f"{rest[1].replace('.', '/')}.py").is_file()


FOREIGN = {
    "--": "what follows it is the command of a reader",
    "--bf16": "a flag of examples/train.py",
    "--lr": "the same",
    "--compile": "the same",
    "--output_dir": "of Hugging Face's scripts",
    "--config": "a flag of some script",
    "--api-key": "the same",
    "--threads": "the same",
    "--ckpt-format": "Megatron's",
    "--requeue": "sbatch's",
}
OPTIONS = sorted(
    {
        (page, span)
        for page, text in TEXTS.items()
        for span in spans_of(text)
        if span.startswith("--") and re.split("[ =]", span)[0] not in FOREIGN
    }
)


@pytest.fixture(scope="module")
def helps():
    """What `stability VERB --help` says, by verb."""
    return {verb: said_by([verb, "--help"]) for verb in VERBS}


@pytest.mark.parametrize(("page", "span"), OPTIONS)
def test_an_option_within_a_sentence_is_a_verbs(page, span, helps):
    words = shlex.split(span)
    name = re.split("[ =]", span)[0]
    spelt = "|".join((name, _under(name)))
    verbs = [verb for verb, text in helps.items() if re.search(rf"({spelt})(?![\w-])", text)]
    if "." in name or name.removeprefix("--") in ARM_FIELDS:
        verbs.append("run")
    assert verbs, f"no verb has {name}"
    for each in _each(words) if len(words) > 1 else ():
        assert any(_takes(verb, each) for verb in verbs)


def _takes(verb, words):
    try:
        return _is_taken([verb, *_needed(verb), *words])
    except ConfigError:  # this verb takes other values by this name
        return False


def _under(name):
    return f"--{name[2:].replace('-', '_')}"


def _needed(verb):
    """Return words for what a verb has to be given."""
    command = getattr(importlib.import_module(VERBS[verb][0]), verb)
    parameters = inspect.signature(command).parameters.values()
    return ["x" for each in parameters if each.default is each.empty]


ARM_FIELDS = {field.name for field in dataclasses.fields(ArmConfig)}
STUDY_FIELDS = {field.name for field in dataclasses.fields(StudyConfig)}
OF_A_MODEL = {
    "options": {"preset": "demo", "builder": "llama"},
    "weights": {"hf": str(ROOT / "configs" / "transformers" / "llama-tiny")},
}
OF_AN_ARM = {"role", "until", "change"}
GROUPS = {
    field.name: {each.name for each in dataclasses.fields(field.type)}
    for field in dataclasses.fields(ArmConfig)
    if dataclasses.is_dataclass(field.type)
}
VALUES = sorted(
    {
        (page, span)
        for page, text in TEXTS.items()
        for span in spans_of(text)
        if re.match(r"[a-z_.]+: \S", span) and "..." not in span
    }
)
NO_VALUES = {
    "bf16: true": "a flag of examples/train.py",
    "ref: A": "a commit, of a study of commands",
    "probe: {every, gradient_every}": "two keys, without values",
    "keep: all | reference | last | none": "each of them is a choice",
}


def _study(name, place):
    """Write the study of this name with one arm, and return its mapping and its file."""
    content = yaml.safe_load((ROOT / "configs" / name).read_text())
    content["arms"] = {"baseline": {}, "asked": {}}
    content["yardstick"] = ""
    content["policy"] = {}
    return content, place / "study.yaml"


@pytest.mark.parametrize(("page", "span"), [x for x in VALUES if x[1] not in NO_VALUES])
def test_a_value_within_a_sentence_is_one_of_a_study(page, span, tmp_path):
    key, text = span.split(": ", 1)
    text = text.replace("FOLDER", str(ROOT / "configs" / "transformers" / "llama-tiny"))
    value = yaml.safe_load("20" if text == "K" else text)
    content, path = _study("quickstart.yaml", tmp_path)
    head, *inner = key.split(".")
    value = {inner[0]: value} if inner else value
    if head in OF_A_MODEL:
        content["base"]["model"] = {**OF_A_MODEL[head], head: value}
    elif head == "model":
        content["base"]["model"] = value
    elif span == "role: broken":
        content["arms"]["asked"] = {"attention": {"fault": "out_gain_1pct"}, head: value}
    elif head in ARM_FIELDS | OF_AN_ARM:
        content["arms"]["asked"] = {head: value}
    elif head in STUDY_FIELDS:
        content[head] = value
    else:
        (group,) = (name for name, fields in GROUPS.items() if head in fields)
        content["base"][group] = {**_mapping(content["base"].get(group)), head: value}
    _expand(content, path)


def _mapping(value):
    return value if isinstance(value, dict) else {}


def _expand(content, path):
    path.write_text(yaml.safe_dump(content))
    assert expand(load_study(path))


def test_arms_of_a_page_are_a_studys(tmp_path):
    """Of docs/layouts.md and docs/study.md."""
    for study, block in ARMS_SHOWN:
        content, path = _study(study, tmp_path)
        content |= yaml.safe_load(block)
        path.write_text(yaml.safe_dump(content))
        assert {arm.name for arm in expand(load_study(path))} == {"baseline", *content["arms"]}


def test_a_value_of_a_commands_base_is_one(tmp_path):
    """Of the table of docs/your_own_training.md."""
    text = prose_of(TEXTS["docs/your_own_training.md"])
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, flags=re.MULTILINE)
    values = [(key, span) for key, cell in rows for span in re.findall(r"`(\{\w+: .*?\})`", cell)]
    assert {key for key, _ in values} >= {"probe", "nudge", "changes", "train"}
    for key, span in values:
        content = yaml.safe_load((ROOT / "examples" / "study.yaml").read_text())
        del content["early_step"]
        value = yaml.safe_load(span)
        (content["arms"]["lr_x2"] if key == "changes" else content["base"])[key] = value
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content))
        assert load_command_study(path, {})
