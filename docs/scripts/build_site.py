"""Builds the documentation as a site: pages of this repository, and a reference made of the code.

The reference is never written by hand: the verbs' own help, the keys of the YAML with their
docstrings, the table of metrics, and the public names of both packages by mkdocstrings. What a page
links to outside of the site has to be a file of the repository; every link and heading is checked,
and one that leads nowhere is an error. `make docs` runs this, offline:

    python docs/scripts/build_site.py [FOLDER]     # build/site by default
"""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

from stability.cli.python_reference import PUBLIC
from stability.cli.reference import REFERENCE, WORDS

ROOT = Path(__file__).parents[2]

PAGES = yaml.safe_load((ROOT / "docs" / "contents.yaml").read_text(encoding="utf-8"))
"""By section, the pages of the site and the files that they are."""

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
    reference = {**REFERENCE, "python": python_page}
    for name, page in reference.items():
        (source / f"{name}.md").write_text(page(), encoding="utf-8")
    (source / "own.css").write_text(STYLE, encoding="utf-8")
    navigation = [{section: [*pages]} for section, pages in PAGES.items()]
    navigation.append({"Reference": [f"{name}.md" for name in reference]})
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
