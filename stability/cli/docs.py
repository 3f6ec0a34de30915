"""`stability docs`: the pages of the documentation, which come with this package."""

import difflib
import re
import sys
from pathlib import Path

import yaml

from stability.cli.output import HOLDS, print_line
from stability.config import shipped

__all__ = ["docs"]

_WIDEST = 100
"""Columns of a page in a wider terminal: longer lines are hard to read."""
_REFERENCE = {"cli": "Command line", "keys": "YAML keys", "metrics": "Metrics"}
"""The pages that are made of the code, and their titles."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def docs(page: str | None = None) -> int:
    """Show a page of the documentation; without one list them all.

    In a terminal a page is formatted; into a file or a pipe it goes as Markdown.

    Args:
        page: its name in the list, e.g. my_kernel
    """
    pages = {name: path for section in _sections().values() for name, path in section.items()}
    if page is None:
        _print_list()
        return HOLDS
    name = page.removesuffix(".md").rpartition("/")[2]
    if name in pages:
        _print_page(pages[name].read_text(encoding="utf-8"), pages[name])
    elif name in _REFERENCE:
        from stability.cli.reference import REFERENCE  # heavy

        _print_page(REFERENCE[name](), shipped.docs() / f"{name}.md")
    else:
        known = [*pages, *_REFERENCE]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
        raise ValueError(
            f"docs: no page {page!r}; nearest: {', '.join(near)}. `stability docs` lists all"
        )
    return HOLDS


def _sections() -> dict[str, dict[str, Path]]:
    """Return the pages that are here by section and name; what a clone alone has is left out."""
    listed = yaml.safe_load((shipped.docs() / "contents.yaml").read_text(encoding="utf-8"))
    sections = {}
    for section, origins in listed.items():
        paths = {name.removesuffix(".md"): _place(origin) for name, origin in origins.items()}
        sections[section] = {name: path for name, path in paths.items() if path.is_file()}
    return {section: paths for section, paths in sections.items() if paths}


def _place(origin: str) -> Path:
    """Return where a file of the clone lies here."""
    here = shipped.experiments() if origin.startswith("experiments/") else shipped.docs()
    return here.parent / origin


def _print_list() -> None:
    print_line("usage: stability docs PAGE")
    titles = {
        section: {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
        for section, paths in _sections().items()
    }
    for section, pages in {**titles, "Reference": _REFERENCE}.items():
        print_line(f"\n{section}")
        for name, text in pages.items():
            title = text.splitlines()[0].lstrip("# ")
            print_line(f"  {name:18} {title}")
    print_line(f"\nThese pages are in {shipped.docs()}")
    print_line(f"the studies that they name in {shipped.configs()}")
    print_line(f"the scripts that they name in {shipped.examples()}")


def _print_page(text: str, path: Path) -> None:
    """Print a page that is, or would be, at `path`, from where its links lead."""
    if not sys.stdout.isatty():
        sys.stdout.write(_LINK.sub(lambda link: _as_markdown(link, path.parent), text))
        return
    from stability.cli.page_text import print_page  # heavy

    print_page(_LINK.sub(lambda link: _in_words(link, path.parent), text), _WIDEST)
    if path.is_file():
        print_line(f"\nThis page is {path}", whole=True)


def _as_markdown(link: re.Match[str], folder: Path) -> str:
    """Return a link within the page, or to one that is here, as it is, any other as `_in_words`."""
    target = link[3]
    is_page = not target or (target.endswith(".md") and (folder / target).is_file())
    return link[0] if is_page else _in_words(link, folder)


def _in_words(link: re.Match[str], folder: Path) -> str:
    """Return a link's words, with where it leads unless they say that, or it is the glossary."""
    words, target = link[2], link[3]
    if "://" in target:
        return link[0]
    file = (folder / target).resolve()
    if not target or file.name == "glossary.md" or not file.exists():
        return words
    if file.suffix == ".md":
        return words if file.stem in words else f"{words} ({file.name})"
    return f"{words} ({file})"
