"""`stability docs`: the pages of the documentation, which come with this package."""

import difflib
import posixpath
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from stability.cli.output import HOLDS, print_line
from stability.config import shipped

__all__ = ["docs"]

_WIDEST = 100
"""Columns of a page in a wider terminal: longer lines are hard to read."""
_REFERENCE = {
    "cli": "Command line",
    "keys": "YAML keys",
    "metrics": "Metrics",
    "python": "Python",
}
"""The pages that are made of the code, and their titles."""
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def docs(page: str | None = None) -> int:
    """Show a page of the documentation; without one list them all.

    In a terminal a page is formatted; into a file or a pipe it goes as Markdown.

    Args:
        page: its name in the list, e.g. my_kernel
    """
    origins = {name: origin for pages in _sections().values() for name, origin in pages.items()}
    if page is None:
        _print_list()
        return HOLDS
    name = _name_of(page, origins)
    if name in origins:
        text, origin = _place(origins[name]).read_text(encoding="utf-8"), origins[name]
    else:
        from stability.cli.reference import REFERENCE  # heavy

        text, origin = REFERENCE[name](), f"docs/{name}.md"
    _print_page(text, origin, {origin: name for name, origin in origins.items()})
    return HOLDS


def _sections() -> dict[str, dict[str, str]]:
    """Return by section and name what the pages that are here are called in a clone.

    A clone alone has some more.
    """
    listed = yaml.safe_load((shipped.docs() / "contents.yaml").read_text(encoding="utf-8"))
    here = {
        section: {
            name.removesuffix(".md"): origin
            for name, origin in pages.items()
            if _place(origin).is_file()
        }
        for section, pages in listed.items()
    }
    return {section: pages for section, pages in here.items() if pages}


def _place(origin: str) -> Path:
    """Return where a file of the clone lies here."""
    if origin == "kernels/README.md":
        return shipped.kernels() / "README.md"
    here = shipped.experiments() if origin.startswith("experiments/") else shipped.docs()
    return here.parent / origin


def _name_of(page: str, origins: Mapping[str, str]) -> str:
    """Return the name of a page that may be asked for by its file, too; ValueError for no page."""
    asked = page.lower().removesuffix(".md")
    known = {name: name for name in (*origins, *_REFERENCE)}
    known |= {origin.lower().removesuffix(".md"): name for name, origin in origins.items()}
    if asked in known:
        return known[asked]
    near = difflib.get_close_matches(asked, [*origins, *_REFERENCE], n=3, cutoff=0.4)
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    raise ValueError(f"docs: there is no page {page!r}{nearest}; `stability docs` lists all")


def _print_list() -> None:
    print_line("usage: stability docs PAGE")
    titles = {
        section: {
            name: _place(origin).read_text(encoding="utf-8") for name, origin in pages.items()
        }
        for section, pages in _sections().items()
    }
    for section, pages in {**titles, "Reference": _REFERENCE}.items():
        print_line(f"\n{section}")
        for name, text in pages.items():
            title = text.splitlines()[0].lstrip("# ")
            print_line(f"  {name:18} {title}")
    print_line(f"\nThese pages are in {shipped.docs()}")
    print_line(f"the studies that they name in {shipped.configs()}")
    print_line(f"the scripts that they name in {shipped.examples()}")


def _print_page(text: str, origin: str, names: Mapping[str, str]) -> None:
    """Print a page that a clone has at `origin`; `names` are those of all pages by theirs."""
    is_read_here = sys.stdout.isatty()

    def linked(link: re.Match[str]) -> str:
        """Return a link to a page with its name, one to another file with where that is."""
        words, target = link[1], link[2]
        if "://" in target or (not target and not is_read_here):
            return link[0]
        goes_to = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if name := names.get(goes_to):
            if not is_read_here:
                return f"[{words}]({name}.md{link[3] or ''})"
            is_said = name == "glossary" or name in words
            return words if is_said else f"{words} (page {name})"
        is_here = target and _place(goes_to).exists()
        return f"{words} ({_place(goes_to)})" if is_here else words

    text = _LINK.sub(linked, text)
    if not is_read_here:
        sys.stdout.write(text)
        return
    from stability.cli.page_text import print_page  # heavy

    print_page(text, _WIDEST)
    if _place(origin).is_file():
        print_line(f"\nThis page is {_place(origin)}", whole=True)
