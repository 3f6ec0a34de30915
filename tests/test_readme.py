"""Commands, examples and pictures of README and the pages named here; the doors lead somewhere.

`test_pages` lists every page of the site, and the test that goes through it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest
import uvicorn
import yaml

from stability.cli.main import main
from tests.pages import blocks_for, code_of, commands_of, in_short, in_words

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NAMES = [
    "attention_library",
    "instrument",
    "layouts",
    "look",
    "quickstart",
    "study",
    "trust",
    "verdict",
    "policy",
    "read_a_report",
]
FILES = [*(f"docs/{name}.md" for name in NAMES), "experiments/README.md"]
HERE = "test_readme.py::"


def blocks_in(language, test):
    """Return the blocks of these pages in a language that a test of this file goes through."""
    return [block for file in FILES for block in blocks_for(HERE + test, file, language)]


COMMANDS = commands_of(blocks_in("sh", "test_stability_command_runs"))
PYTHON = [block for _, block in blocks_in("python", "test_python_example_runs")]
DOORS = [
    commands_of([block])
    for block in blocks_for(
        HERE + "test_a_door_leads_to_an_answer", "README.md", "sh", having="stability init"
    )
]
OF_README = {command for door in DOORS for command in door}
# those of README are the doors', which are gone through one after another
STABILITY = [
    x for x in dict.fromkeys(COMMANDS) if x.startswith("stability ") and x not in OF_README
]
ANSWERS = [
    block
    for page in ("README.md", "docs/quickstart.md")
    for _, block in blocks_for(
        HERE + "test_the_answer_is_one_text", page, "text", having="as it must"
    )
]
((_, BIASES),) = blocks_for(
    HERE + "test_the_table_of_a_page_is_what_its_command_prints",
    "docs/attention_library.md",
    "text",
)
TRAINS = re.compile(
    "--check-observer|--seeds|--over points|stable_fig3|--arm flash_all_bf16|verdict|runs/short"
    "|--arm bf16|stability fork|stability experiment"
)
"""What takes several seconds more, and runs what another command has run in part."""


def test_readme_is_read_at_a_sitting():
    assert len(README.splitlines()) <= 160
    assert [len(door) for door in DOORS] == [4, 4, 4]


def test_the_answer_is_one_text():
    """The demo's: in README and on the page that reads it, docs/quickstart.md."""
    shown, again = ANSWERS
    assert shown == again


def test_first_screen_has_the_question_the_picture_and_the_two_commands():
    first = "\n".join(README.splitlines()[:45])
    for part in ("make demo", "make test", "![", "?"):
        assert part in first


LINKS = sorted(
    (str(path.relative_to(ROOT)), link)
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
    for link in re.findall(r"\]\(([^):]+)\)", path.read_text(encoding="utf-8"))
)


def _anchors(text):
    """Return what the headings of a page are linked by."""
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    own = set(re.findall(r'<a id="([^"]+)">', text))
    return own | {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_linked_file_and_heading_exist(page, link):
    name, _, anchor = link.partition("#")
    target = (ROOT / page).parent / name if name else ROOT / page
    assert target.exists()
    assert not anchor or anchor in _anchors(target.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A folder laid out like the repository, with a quickstart that takes seconds."""
    folder = tmp_path_factory.mktemp("readme")
    content = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    content["base"]["model"] = {"depth": 1, "width": 16, "heads": 1, "context": 16}
    content["base"]["train"].update(steps=2, batch_size=2, snapshot_steps=[1], accelerator="cpu")
    content["base"]["train"].update(checkpoint_every=1, keep_checkpoints=0)
    content["seeds"] = [0]
    content["early_step"] = content["policy"]["step"] = 1
    for arm in content["arms"].values():
        arm.update({"until": 1} if "until" in arm else {})
    (folder / "configs").mkdir()
    (folder / "configs" / "quickstart.yaml").write_text(yaml.safe_dump(content))
    shutil.copytree(ROOT / "examples", folder / "examples")
    script = yaml.safe_load((folder / "examples" / "study.yaml").read_text())
    script["base"]["flags"]["steps"] = script["base"]["train"]["steps"] = script["early_step"] = 2
    script["seeds"], script["arms"] = [0], {"bf16": script["arms"]["bf16"]}
    (folder / "examples" / "study.yaml").write_text(yaml.safe_dump(script))
    shutil.copytree(ROOT / "configs" / "transformers", folder / "configs" / "transformers")
    shutil.copy(ROOT / "README.md", folder)
    return folder


@pytest.mark.parametrize("verb", sorted({c.split()[1] for c in COMMANDS if c.startswith("wandb ")}))
def test_wandb_has_the_verb(verb, tmp_path):
    wandb = Path(sys.executable).with_name("wandb")
    asked = [wandb, verb, "--help"]
    assert subprocess.run(asked, capture_output=True, check=True, cwd=tmp_path).stdout


@pytest.fixture
def alone(monkeypatch):
    """No browser, no server that stays, no W&B account; `python` is the one with torch."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setattr(webbrowser, "open", lambda _address: True)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_args, **_kwargs: None)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")


@pytest.mark.parametrize(
    "command",
    # those that train are slow, and so are all but a few of the rest
    [
        pytest.param(c, marks=pytest.mark.slow) if TRAINS.search(c) or index % 6 else c
        for index, c in enumerate(STABILITY)
    ],
)
def test_stability_command_runs(command, quick, monkeypatch, capfd, alone):
    monkeypatch.chdir(quick)
    words = shlex.split(command)[1:]
    for out in ("runs", "runs/short"):  # each command by itself, whatever ran before it
        mentioned = any(f"{word}/".startswith(f"{out}/quickstart/") for word in words)
        mentioned |= words == ["dashboard", out]
        seeds = ["--seeds", "3"] if words[0] == "verdict" else []
        if mentioned and (seeds or not (quick / out / "quickstart").exists()):
            whole = ["run", "configs/quickstart.yaml", "--wandb", "disabled", "--out", out]
            assert main([*whole, *seeds]) == 0
    if "runs/mine" in words and not (quick / "runs" / "mine").exists():
        for block in (block for block in PYTHON if "runs/mine" in block):
            exec(compile(block, "a page", "exec"), {})
    shrunk = [
        re.sub(r"^\d+$", "2", w) if words[i - 1] in ("--train.steps", "--seeds") else w
        for i, w in enumerate(words)
    ]
    if words[0] == "experiment":
        shrunk += ["--size", "quick"] if words[1:] else []
    if words[0] in ("fork", "bisect"):
        shrunk[shrunk.index("--at") + 1] = "1"
    if words[0] == "deviate" and "--layer" in words:
        shrunk[words.index("--layer") + 1] = "0"
    if words[0] == "workspace" or "online" in words:
        assert code_of(shrunk) == 2
        assert "account" in capfd.readouterr().err
        return
    # any verdict will do
    assert code_of(shrunk) in ((0, 1, 3, 4) if words[0] == "verdict" else (0,))
    assert capfd.readouterr().out


@pytest.mark.slow
def test_the_table_of_a_page_is_what_its_command_prints(monkeypatch, capsys):
    """Of docs/attention_library.md, whose last digits may be others elsewhere."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["deviate", "--preset", "tie_bias"]) == 0
    printed = _biases(capsys.readouterr().out)
    shown = _biases(BIASES)
    assert len(shown) == 4
    for case, numbers in shown.items():
        assert printed[case] == pytest.approx(numbers, abs=0.005)


def _biases(table):
    """Return by profile and sign of the values: bias, standard error, mean |e|."""
    rows = re.findall(r"^(\S.*?) +twin +(\w+) +(\S+) +(\S+) +(\S+)$", table, flags=re.MULTILINE)
    return {(profile, sign): [*map(float, numbers)] for profile, sign, *numbers in rows}


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door[0].split()[3])
def test_a_door_leads_to_an_answer(door, tmp_path, monkeypatch, capsys, alone):
    """As README says it, one command after another, with a study of fewer steps.

    Of checkpoints `python save_checkpoints.py` makes them, as it stands there.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    said = ""
    for command in door:
        words = shlex.split(command)
        if words[0] == "cd":
            monkeypatch.chdir(Path.cwd() / words[1])
        elif words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], check=True)
        else:
            code = code_of(words[1:])
            assert code in ((0, 1, 3, 4) if words[1] == "verdict" else (0,)), command
            printed = capsys.readouterr().out
            assert printed, command
            said += printed
        for path in tmp_path.rglob("study.yaml") if words[1] == "init" else ():
            path.write_text(in_short(path.read_text()))
    answer = (
        "what changed .*lr_x2" if "checkpoints" in door[0] else "PASS|FAIL|INCONCLUSIVE|NO ASSAY"
    )
    assert re.search(answer, said, flags=re.DOTALL)


# torch's, of a Trainer on a machine without a GPU
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize("block", PYTHON)
def test_python_example_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "a page", "exec"), {})


def _ladder(said):
    """Return what the first ladder of a text shows of each arm, in order, less what it changed."""
    lines = iter(said.splitlines())
    for line in lines:
        if re.match(r"arm +what changed +", line):
            break
    next(lines)
    found = {}
    for line in lines:
        if not line.strip():
            break
        if not line.startswith(" "):
            arm, _, *cells = re.split(r"\s{2,}", line.strip())
            found[arm] = cells
    return found


def _number(cell):
    found = re.fullmatch(r"(\d[\d.]*(?:e[+-]\d+)?)x?", cell)
    return float(found[1]) if found else None


LADDERS = {
    study: blocks_for(
        HERE + "test_a_ladder_is_what_its_study_prints", page, "text", "", having="what changed"
    )
    for study, page in {
        "configs/quickstart.yaml": "docs/quickstart.md",
        "configs/lr_vs_bf16.yaml": "docs/study.md",
        "examples/study.yaml": "docs/your_own_training.md",
    }.items()
}


def _words(text):
    """Return the words of an answer, without its figures.

    Elsewhere a cell near its limit may turn, as one of flash_all_bf16 has, by docs/quickstart.md:
    what is said of that arm below the first line is left out.
    """
    text = re.sub(r"^flash_all_bf16.*?(?=^broken)", "", text, flags=re.DOTALL | re.MULTILINE)
    return in_words(text)


def test_an_answer_is_compared_in_its_words():
    shown = ANSWERS[0]
    other = shown.replace("E 1.01", "E 1.02").replace("   E 1.13", "  E 1.134")
    turned = other.replace("undecided         HARMED  undecided", "HARMED  HARMED  undecided")
    wrong = other.replace("all 11\nplanted faults were found", "all 11\nplanted faults were seen")
    assert len({shown, other, turned, wrong}) == 4
    assert _words(shown) in _words(f"question\n{turned} ladder")
    assert _words(shown) not in _words(wrong)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # of Inductor
@pytest.mark.parametrize("study", LADDERS)
def test_a_ladder_is_what_its_study_prints(study, tmp_path, monkeypatch, capsys, alone):
    """Elsewhere the last digits differ, and what lies near to the last bits by a factor."""
    ((_, block),) = LADDERS[study]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", str(max(map(len, block.splitlines()))))
    assert main(["run", study, "--wandb", "disabled", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    (tmp_path / "said.txt").write_text(said)
    if study == "configs/quickstart.yaml":  # the demo's, whose answer is README's
        assert _words(ANSWERS[0]) in _words(said)
    found, shown = _ladder(said), _ladder(block)
    assert list(found) == list(shown)
    for name, cells in shown.items():
        numbers = [_number(cell) for cell in cells]
        near = [x if x is None else pytest.approx(x, rel=0.5) for x in numbers]
        assert [_number(cell) for cell in found[name]] == near, name
