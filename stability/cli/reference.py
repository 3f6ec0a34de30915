"""The pages of the reference, made of the code: verbs, keys of the YAML, metrics, Python.

`stability docs` shows them, and `docs/scripts/build_site.py` puts them into the site. None is
written by hand: they are the verbs' own help, the dataclasses with their docstrings, and the tables
that the code which logs has its names from.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
from collections.abc import Mapping
from typing import Any

from stability.analysis import ladder
from stability.cli import main as command_line
from stability.cli.python_reference import python_page
from stability.config import command_study, model, parallel, schema, study
from stability.metrics import parameter_groups
from stability.records import figure_table, metric_names, metric_table
from stability.tracking import tables

__all__ = ["GROUPS", "REFERENCE", "WORDS", "name_tables", "said_by"]

GROUPS = {
    "A study": [study.StudyConfig, study.PolicyConfig],
    "Its base, and what an arm may change": [schema.ArmConfig],
    "model": [model.ModelConfig],
    "attention": [schema.AttentionConfig],
    "data": [schema.DataConfig],
    "held_out": [schema.HeldOutConfig],
    "optimizer": [schema.OptimizerConfig],
    "train": [schema.TrainConfig],
    "seed": [schema.SeedConfig],
    "nudge": [schema.NudgeConfig],
    "parallel": [parallel.ParallelConfig],
    "probe": [schema.ProbeConfig],
    "watch": [schema.WatchConfig],
    "A study of commands": [command_study.CommandConfig, command_study.CommandTrain],
    "probe of an arm of commands": [command_study.CommandProbe],
    "changes of an arm of commands": [command_study.MeantChanges],
}
"""Headings of the reference of YAML keys, and the dataclasses that hold them."""

WORDS = "Words of this project are explained in the [glossary](glossary.md).\n"
"""Opens each page of the reference."""
CAPITALS = (
    "A word in capitals [stands for another](#words-in-capitals); what is in brackets may be left "
    "out. The report has the names of `metrics.jsonl`.\n"
)


def command_line_page() -> str:
    """Return the page of all verbs, by their own help."""
    parts = ["# Command line\n", WORDS, "```text\n" + said_by([]) + "```\n"]
    for verb, (_, line) in command_line.VERBS.items():
        parts.append(f"## stability {verb}\n\n{line[0].upper()}{line[1:]}.\n")
        parts.append("```text\n" + said_by([verb, "--help"]) + "```\n")
    return "\n".join(parts)


def said_by(words: list[str]) -> str:
    """Return what the command line prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        command_line.main(words or ["--help"])
    return said.getvalue()


def keys_page() -> str:
    """Return the page of all keys of a study's YAML, with types, defaults and docstrings."""
    parts = [
        "# YAML keys\n",
        WORDS,
        "Each key of a study, its type, its default, and what it says.\n",
    ]
    for heading, kinds in GROUPS.items():
        parts.append(f"## {heading}\n")
        for kind in kinds:
            said = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
            parts.append(f"{said}\n\n| key | type | default | |\n|---|---|---|---|")
            notes = _notes(kind)
            for field in dataclasses.fields(kind):
                parts.append(
                    f"| `{field.name}` | `{_type_text(field)}` | {_default_text(field)} | "
                    f"{notes.get(field.name, '')} |"
                )
            parts.append("")
    return "\n".join(parts)


def _notes(kind: type) -> dict[str, str]:
    """Return what stands below each field of a dataclass."""
    (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for one, after in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[one.target.id] = _in_cell(" ".join(str(after.value.value).split()))
    return found


def _type_text(field: dataclasses.Field) -> str:
    text = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    return _in_cell(re.sub(r"\b(?:stability|typing|collections)\.[\w.]*\.?\b(?=[A-Z])", "", text))


def _default_text(field: dataclasses.Field) -> str:
    default = _default(field)
    if default is dataclasses.MISSING:
        return "**required**"
    if dataclasses.is_dataclass(default):
        return "its own"
    return f"`{_in_cell(repr(_in_short(default)))}`"


def _default(field: dataclasses.Field) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _in_short(value: Any) -> Any:
    """Return a default as a YAML file would have it: of a dataclass what is not its own default."""
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        return [_in_short(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {
        x.name: getattr(value, x.name)
        for x in dataclasses.fields(value)
        if getattr(value, x.name) != _default(x)
    }


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|")


def metrics_page() -> str:
    """Return the page of the names of all metrics."""
    parts = ["# Metrics\n", WORDS, CAPITALS]
    for section, tables_of in name_tables().items():
        parts.append(f"## {section}\n")
        for pattern, table in tables_of.items():
            parts.append(f"### `{pattern}`\n\n| name | what it is |\n|---|---|")
            parts += [f"| `{name}` | {_in_cell(_label(each))} |" for name, each in table.items()]
            parts.append("")
    return "\n".join(parts)


def _label(metric: Any) -> str:
    """Return what a row of a table of names says; charts show another value of some metrics."""
    label = metric if isinstance(metric, str) else metric.label
    instead = getattr(metric, "complement", "")
    return f"{label.removeprefix('1 - ')}; charts show {instead}" if instead else label


def name_tables() -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return the tables of names by where they are found, and by how a name is made of a row."""
    return {
        "`metrics.jsonl`, and the history of a run in W&B": {
            "METRIC": metric_table.RUN_METRICS,
            "drift/PARAMETER/METRIC": _of_one_parameter(metric_table.DRIFT_METRICS),
            "deviation/LAYER/[SHADOW/][PART/]RESULT/METRIC": metric_table.DEVIATION_METRICS
            | metric_table.DEVIATION_COUNTS,
            "gradient/GROUP/METRIC[_as_trained]": metric_table.GRADIENT_METRICS,
            "watch/METRIC": metric_table.WATCH_METRICS,
            "watch/LAYER/METRIC": metric_table.LAYER_WATCH_METRICS,
            "watch/LAYER/PART/METRIC": metric_table.HEAD_WATCH_METRICS,
            "watch/METRIC/PARAMETER": metric_table.PARAMETER_WATCH_METRICS,
        },
        "What else a line of `metrics.jsonl` has": {"ENTRY": metric_names.ENTRIES},
        "The summary of a run in W&B": {"METRIC": tables.RUN_SUMMARY}
        | _of_ladder()
        | {f"evidence/{level}/METRIC": found for level, found in figure_table.FIGURES.items()},
        "The study's own run in W&B": {
            "METRIC": tables.STUDY_SUMMARY,
            "TABLE": tables.STUDY_TABLES,
            "COLUMN of evidence": tables.EVIDENCE_COLUMNS,
            "COLUMN of deviations": tables.DEVIATION_COLUMNS
            | {name: metric_table.DEVIATION_METRICS[name] for name in tables.SHOWN_DEVIATIONS},
        },
        "Words in capitals": {
            "WORD": metric_names.NAME_PARTS | tables.NAME_PARTS,
            "RESULT": metric_names.COMPARED,
            "GROUP": parameter_groups.PARAMETER_GROUPS,
            "SPREAD": tables.SPREAD,
        },
    }


def _of_one_parameter(drifts: Mapping[str, Any]) -> dict[str, str]:
    """Return what drifts are, whose labels in charts are of all weights."""
    labels = {name: _label(metric) for name, metric in drifts.items()}
    return {
        name: label.replace(" of all weights", "")
        .replace("all weights", "the weights")
        .replace("their", "the weights'")
        for name, label in labels.items()
    }


def _of_ladder() -> dict[str, dict[str, str]]:
    """Return what an arm's row of the ladder has, by the kind of its values."""
    notes, found = _notes(ladder.Row), {}
    behind = {ladder.SeedValues: "[/SPREAD]", ladder.EarlyLast: "/AT[/SPREAD]"}
    for field in dataclasses.fields(ladder.Row):
        pattern = f"ladder/METRIC{behind.get(field.type, '')}"
        found.setdefault(pattern, {})[field.name] = notes.get(field.name, "")
    del found["ladder/METRIC"]["arm"]  # no summary says it: a run has one
    return found


REFERENCE = {
    "cli": command_line_page,
    "keys": keys_page,
    "metrics": metrics_page,
    "python": lambda: python_page(WORDS),
}
"""By name, what makes each page."""
