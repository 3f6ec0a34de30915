"""Builds the documentation as a site: pages of this repository, and a reference made of the code.

The reference is never written by hand: the verbs' own help, the keys of the YAML with their
docstrings, the table of metrics, and the public names of both packages by mkdocstrings. What a page
links to outside of the site has to be a file of the repository; every link and heading is checked,
and one that leads nowhere is an error. `make docs` runs this, offline:

    python docs/scripts/build_site.py [FOLDER]     # build/site by default
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from stability.analysis import ladder
from stability.cli import main as command_line
from stability.config import command_study, model, parallel, schema, study
from stability.metrics import parameter_groups
from stability.records import figure_table, metric_names, metric_table
from stability.tracking import tables

ROOT = Path(__file__).parents[2]

PAGES = yaml.safe_load((ROOT / "docs" / "contents.yaml").read_text(encoding="utf-8"))
"""By section, the pages of the site and the files that they are."""

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

PUBLIC = ("stability", "attention_kernels")
WORDS = "Words of this project are explained in the [glossary](glossary.md).\n"
"""Opens each page of the reference."""
CAPITALS = (
    "A word in capitals [stands for another](#words-in-capitals); what is in brackets may be left "
    "out. The report has the names of `metrics.jsonl`.\n"
)

SHOWN = {
    "show_source": False,
    "show_root_heading": True,
    "show_root_full_path": False,
    "heading_level": 3,
    # hooks that a trainer calls, and nobody else
    "filters": ["!^_", "!^on_", "!^before_", "!^after_", "!state_dict$"],
}
STYLE = ".md-typeset td:first-child code { white-space: nowrap }\n"
"""The name of a key is not broken."""


def build(folder: Path) -> Path:
    """Write the pages and the site below `folder`; return the site's folder.

    ValueError for a link that leads nowhere; CalledProcessError where the generator warns.
    """
    source, site = folder / "pages", folder / "html"
    for old in (source, site):
        shutil.rmtree(old, ignore_errors=True)
    source.mkdir(parents=True)
    homes = {ROOT / origin: name for pages in PAGES.values() for name, origin in pages.items()}
    for origin, name in homes.items():
        text = _linked(origin.read_text(encoding="utf-8"), origin, homes, source)
        (source / name).write_text(text, encoding="utf-8")
    reference = {
        "Command line": ("cli.md", command_line_page()),
        "YAML keys": ("keys.md", keys_page()),
        "Metrics": ("metrics.md", metrics_page()),
        "Python": ("python.md", python_page()),
    }
    for name, text in reference.values():
        (source / name).write_text(text, encoding="utf-8")
    (source / "own.css").write_text(STYLE, encoding="utf-8")
    navigation = [{section: [*pages]} for section, pages in PAGES.items()]
    navigation.append({"Reference": [{title: name} for title, (name, _) in reference.items()]})
    config = _config(navigation, source, site)
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    generator = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(generator, cwd=folder, check=True)
    broken = broken_links(site)
    if broken:
        raise ValueError("links that lead nowhere: " + "; ".join(broken))
    return site


def _config(navigation: list, source: Path, site: Path) -> dict:
    python = {"paths": [str(ROOT), str(ROOT / "kernels")], "options": SHOWN}
    return {
        "site_name": "training-stability",
        "docs_dir": source.name,
        "site_dir": site.name,
        "use_directory_urls": False,
        "nav": navigation,
        "extra_css": ["own.css"],
        # nothing is fetched from elsewhere, neither while it is built nor while it is read
        "theme": {
            "font": False,
            "features": ["navigation.sections", "navigation.top", "content.code.copy"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "plugins": ["search", {"mkdocstrings": {"handlers": {"python": python}}}],
        "markdown_extensions": [
            "attr_list",
            "fenced_code",
            "pymdownx.superfences",
            "tables",
            "toc",
        ],
    }


def _linked(text: str, origin: Path, homes: dict[Path, str], source: Path) -> str:
    """Return a page whose links lead to pages of the site, or to copies of what they named."""

    def linked(match: re.Match[str]) -> str:
        before, target = match.group(1), match.group(2)
        if "://" in target or target.startswith("#"):
            return match.group(0)
        name, mark, anchor = target.partition("#")
        path = (origin.parent / name).resolve()
        if not path.exists():
            raise ValueError(f"{origin}: {target}: leads nowhere")
        if path in homes:
            return f"{before}({homes[path]}{mark}{anchor})"
        if path.is_dir():
            return before.removeprefix("[").removesuffix("]")
        copy = source / "files" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        return f"{before}(files/{path.relative_to(ROOT)})"

    return re.sub(r"(\[[^\]]*\])\(([^)\s]+)\)", linked, text)


def command_line_page() -> str:
    """Return the page of all verbs, by their own help."""
    parts = ["# Command line\n", WORDS, "```text\n" + _said([]) + "```\n"]
    for verb, (_, line) in command_line.VERBS.items():
        parts.append(f"## stability {verb}\n\n{line[0].upper()}{line[1:]}.\n")
        parts.append("```text\n" + _said([verb, "--help"]) + "```\n")
    return "\n".join(parts)


def _said(words: list[str]) -> str:
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
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and is_text:
            found[one.target.id] = _in_cell(" ".join(str(after.value.value).split()))
    return found


def _type_text(field: dataclasses.Field) -> str:
    text = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    return _in_cell(re.sub(r"\b(?:stability|typing|collections)\.[\w.]*\.?\b(?=[A-Z])", "", text))


def _default_text(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{_in_cell(repr(field.default))}`"
    return "its own" if field.default_factory is not dataclasses.MISSING else "**given**"


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
            "drift/PARAMETER/METRIC": metric_table.DRIFT_METRICS,
            "deviation/LAYER/[SHADOW/][PART/]RESULT/METRIC": metric_table.DEVIATION_METRICS
            | metric_table.DEVIATION_COUNTS,
            "gradient/GROUP/METRIC[_as_trained]": metric_table.GRADIENT_METRICS,
            "watch/METRIC": metric_table.WATCH_METRICS,
            "watch/LAYER/METRIC": metric_table.LAYER_WATCH_METRICS,
            "watch/LAYER/PART/METRIC": metric_table.HEAD_WATCH_METRICS,
            "watch/METRIC/PARAMETER": metric_table.PARAMETER_WATCH_METRICS,
        },
        "`metrics.jsonl` alone": {"ENTRY": metric_names.ENTRIES},
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


def _of_ladder() -> dict[str, dict[str, str]]:
    """Return what an arm's row of the ladder has, by the kind of its values."""
    notes, found = _notes(ladder.Row), {}
    behind = {ladder.SeedValues: "[/SPREAD]", ladder.EarlyLast: "/AT[/SPREAD]"}
    for field in dataclasses.fields(ladder.Row):
        pattern = f"ladder/METRIC{behind.get(field.type, '')}"
        found.setdefault(pattern, {})[field.name] = notes.get(field.name, "")
    del found["ladder/METRIC"]["arm"]  # no summary says it: a run has one
    return found


def python_page() -> str:
    """Return the page of both packages' public names, for mkdocstrings to fill in."""
    parts = ["# Python\n", WORDS]
    for package in PUBLIC:
        module = __import__(package)
        parts.append(f"## {package}\n")
        for name in module.__all__:
            home = module._HOMES.get(name, package)
            full = home if home.startswith(package) else f"{package}.{home}"
            parts.append(f"::: {full}.{name}\n")
    return "\n".join(parts)


class _Links(HTMLParser):
    """Gathers what a page links to and what it can be linked by."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take `href`, `src`, `id` and `name`."""
        given = {name: value for name, value in attrs if value is not None}
        self.targets += [given[name] for name in ("href", "src") if name in given]
        self.anchors |= {given[name] for name in ("id", "name") if name in given}


def broken_links(site: Path) -> list[str]:
    """Return the links of a site's pages that lead to no file, or to no anchor of it."""
    pages = {}
    for path in site.rglob("*.html"):
        pages[path.resolve()] = _Links()
        pages[path.resolve()].feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            found = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = found / "index.html" if found.is_dir() else found
            is_there = found.exists() and (
                not parts.fragment or found not in pages or parts.fragment in pages[found].anchors
            )
            # the generator's own page for what is missing has links from the root of a host
            if not is_there and path.name != "404.html":
                broken.append(f"{path.name}: {target}")
    return broken


if __name__ == "__main__":
    build(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "site")
