"""`stability docs`: every page that came along is listed, and shown with links that lead on."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stability.cli import docs as verb
from stability.cli.main import main
from stability.cli.reference import REFERENCE
from stability.config import shipped
from tests.pages import ROOT, blocks_of, prose_of, site_pages

ORIGINS = {name: origin for part in verb._sections().values() for name, origin in part.items()}
PAGES = {name: ROOT / origin for name, origin in ORIGINS.items()}


def test_every_page_of_the_site_is_listed_by_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    said = capsys.readouterr().out
    assert [*ORIGINS.values()] == site_pages()
    assert "  my_kernel          Tutorial: a kernel of my own, from `check` to `verdict`\n" in said
    assert all(len(line) <= 80 for line in said.partition("\nThese pages are in")[0].splitlines())


@pytest.mark.parametrize("name", ["my_kernel", "MY_KERNEL.md", "docs/my_kernel.md"])
def test_a_page_is_found_as_a_reader_may_name_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", name]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# Tutorial: a kernel of my own")
    # a page by its link, another file by where it lies
    assert "[study.md](study.md)" in said
    assert f"kernel_check.yml ({shipped.examples() / 'ci' / 'kernel_check.yml'})" in said


@pytest.mark.parametrize("name", PAGES)
def test_a_piped_page_has_all_of_its_words_and_no_link_into_nothing(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", name]) == 0
    said = capsys.readouterr().out
    whole = PAGES[name].read_text(encoding="utf-8")
    assert blocks_of(said) == blocks_of(whole)
    printed, written = (re.findall(r"^#+ .*", prose_of(x), re.MULTILINE) for x in (said, whole))
    assert printed == written
    for target in re.findall(r"\]\(([\w./-]+\.\w+)", said):
        assert target.removesuffix(".md") in PAGES, target


@pytest.mark.parametrize(
    ("asked", "title"),
    [("README", "training-stability"), ("kernels/README.md", "The numerics contract")],
)
def test_a_page_that_a_clone_has_elsewhere_is_found_by_its_file_and_named_in_links(
    asked: str, title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["docs", asked])
    assert capsys.readouterr().out.startswith(f"# {title}\n")
    main(["docs", "attention_library"])
    assert "[kernels/README.md](kernels.md)" in capsys.readouterr().out


def test_an_unknown_page_is_told_its_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["docs", "my_kernels"])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "there is no page 'my_kernels'; nearest: my_kernel, " in said
    assert "`stability docs` lists all" in said


def test_what_a_clone_alone_has_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # as the wheel has it: pages below the package, beside no README
    for name in ("contents.yaml", "study.md"):
        (tmp_path / "docs" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "docs" / name).write_bytes((ROOT / "docs" / name).read_bytes())
    monkeypatch.setattr(shipped, "docs", lambda: tmp_path / "docs")
    main(["docs"])
    listed = re.findall(r"^  (\w+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert listed == ["study", "kernels", "experiments", "cli", "keys", "metrics", "python"]
    assert "](your_own_training.md)" in (tmp_path / "docs" / "study.md").read_text()
    main(["docs", "study"])
    assert "](your_own_training.md" not in capsys.readouterr().out, "that page is not here"


def in_terminal(columns: int, *words: str) -> str:
    """Return what the command prints in a terminal of so many columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "stability.cli.main", *words], stdout=theirs, env=environment
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # closed at the other end
            break
        said += read
        if not read:
            break
    assert process.wait() == 0
    os.close(ours)
    return said.decode()


def test_in_a_terminal_a_page_is_formatted_and_no_command_is_broken() -> None:
    said = in_terminal(80, "docs", "my_kernel")
    plain = re.sub(r" +\n", "\n", re.sub(r"\x1b\[[0-9;]*m", "", said).replace("\r\n", "\n"))
    assert "```" not in plain
    assert "](" not in plain
    assert "glossary" not in plain
    assert "What each level measures (page verdict)" in " ".join(plain.split())
    # a line of code goes on past the edge, so that it is copied as one
    check = "stability check my_kernel:attend_without_tail --quick --dtype bf16   # exit code 1"
    assert f"\n{check}\n" in plain
    assert plain.rstrip().endswith(f"This page is {ROOT / 'docs' / 'my_kernel.md'}")
    # neither black, nor white, nor a background: they are unseen in half of all terminals
    colours = {code for each in re.findall(r"\x1b\[([0-9;]*)m", said) for code in each.split(";")}
    assert not colours & {"30", "37", "40", "47", "90", "97", "38", "48"}


def words_of(text: str) -> str:
    return re.sub(r"[\W_]", "", text)


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("name", ["families", "kernels", "measured", "verdict"])
def test_no_cell_of_a_table_is_cut(name: str, columns: int) -> None:
    """However narrow its column is, a word goes on in the next line."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", in_terminal(columns, "docs", name))
    assert plain.count("…") == PAGES[name].read_text(encoding="utf-8").count("…")
    cells = re.findall(r"`([\w/.-]+)` +\|", PAGES[name].read_text(encoding="utf-8"))
    alone = {words_of(cell) for cell in cells if len(cell) < columns // 8}
    assert {cell for cell in alone if cell not in words_of(plain)} == set()


@pytest.mark.parametrize("name", ["cli", "keys", "metrics"])
def test_the_reference_is_made_when_it_is_asked_for(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", name]) == 0
    said = capsys.readouterr().out
    assert said == REFERENCE[name]()
    main(["docs"])
    title = said.splitlines()[0].lstrip("# ")
    assert f"  {name:18} {title}\n" in capsys.readouterr().out
