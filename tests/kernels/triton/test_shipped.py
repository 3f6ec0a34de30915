"""Every profile as shipped takes what was measured, and what does not fit is refused.

`shipped.json` holds what the kernels of each case take of a chip, as `shipped` measured it with one
version of Triton; another version compiles otherwise, and is held to nothing here. A sample, in
which each pair of choices occurs, is compiled in each run, all by the long tests.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from attention_kernels import PROFILES
from attention_kernels.triton.ahead import SHARED_MEMORY, TENSOR_MEMORY
from tests.kernels.triton.shipped import CASES, FIGURES, GROUPS, HEAD_DIMS, PACKED, Case

MEASURED = json.loads(FIGURES.read_text())
KERNELS: dict[str, Any] = MEASURED["cases"]
README = (Path(__file__).parents[3] / "kernels/README.md").read_text(encoding="utf-8")


def sampled(profile):
    """Return three cases of a profile; of all profiles together each pair of choices occurs."""
    archs, place = tuple(SHARED_MEMORY), tuple(PROFILES).index(profile)
    return [
        Case(
            profile,
            HEAD_DIMS[row],
            archs[(row + place) % 3],
            GROUPS[(row + 2 * place) % 3],
            PACKED[(row + place // 3) % 2],
        )
        for row in range(3)
    ]


def others():
    """Return the cases that are not sampled, by what is compiled in one process."""
    found: dict[str, list[Case]] = {}
    for case in CASES.values():
        if case not in sampled(case.profile):
            found.setdefault(f"{case.profile}-{case.head_dim}-{case.arch}", []).append(case)
    return [pytest.param(cases, id=name) for name, cases in found.items()]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_sample_of_each_profile_as_shipped_takes_what_was_measured(profile):
    assert_as_measured(sampled(profile))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("cases", others())
def test_every_profile_as_shipped_takes_what_was_measured(cases):
    assert_as_measured(cases)


def assert_as_measured(cases):
    """Compile the cases anew and compare all that they take with the figures."""
    if triton.__version__ != MEASURED["triton"]:
        pytest.skip(f"nothing was measured with Triton {triton.__version__}")
    script = Path(__file__).with_name("shipped.py")
    variables = _as_shipped() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script, *map(str, cases)],
        env=variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == {str(case): KERNELS[str(case)] for case in cases}


def _as_shipped():
    """The variables of this process, less those by which Triton or ptxas compile otherwise."""
    otherwise = ("TRITON_", "PTXAS_", "DISABLE_PTXAS_OPT")
    return {name: value for name, value in os.environ.items() if not name.startswith(otherwise)}


def test_what_is_measured_does_not_hang_on_variables_of_the_compiler(monkeypatch):
    others = ("TRITON_DEFAULT_FP_FUSION", "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT")
    for name in (*others, "MY_TRITON_IS_KEPT"):
        monkeypatch.setenv(name, "1")
    kept = _as_shipped()
    assert not {*others} & kept.keys()
    assert kept["MY_TRITON_IS_KEPT"] == "1"


def test_every_profile_is_measured_for_every_chip_usual_head_dim_group_and_packing():
    assert set(KERNELS) == set(CASES)
    assert set(CASES.values()) == {*itertools.product(PROFILES, *CHOICES.values())}


CHOICES = {"head_dim": HEAD_DIMS, "arch": tuple(SHARED_MEMORY), "group": GROUPS, "packed": PACKED}


def test_each_pair_of_choices_is_sampled():
    sample = [case for profile in PROFILES for case in sampled(profile)]
    choices = {"profile": tuple(PROFILES), **CHOICES}
    for one, other in itertools.combinations(choices, 2):
        found = {(getattr(case, one), getattr(case, other)) for case in sample}
        assert found == set(itertools.product(choices[one], choices[other])), (one, other)


@pytest.mark.parametrize("case", KERNELS)
def test_what_does_not_fit_is_just_what_is_refused(case):
    profile, arch = CASES[case].profile, CASES[case].arch
    tiling = PROFILES[profile].tiling
    assert len(KERNELS[case]) >= 3, "forward, dq, dk and dv"
    for name, takes in KERNELS[case].items():
        limits = {"shared": SHARED_MEMORY[arch], "tensor_memory": TENSOR_MEMORY}
        passed = [memory for memory, limit in limits.items() if takes[memory] > limit]
        assert takes["fits"] == (not passed), name
        assert (takes["refused"] is None) == (not passed), name
        if passed:
            memory = passed[0]
            said = f"{memory.replace('_', ' ')}(?: memory)?: {takes[memory]} needed"
            blocks = f"got block_q={tiling.block_q}, block_k={tiling.block_k}"
            assert re.search(rf"{blocks} \({said}, {limits[memory]} there\)", takes["refused"])


def rows_of(header):
    """Return the cells of the README's table that begins so, by the first of each row."""
    _, _, table = README.partition(f"| {header} |")
    lines = itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()[1:])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells[1:]}


def unfit(case):
    """Return what of a case does not fit: the forward, the backward, both, or nothing."""
    names = {True: "forward", False: "backward"}
    passed = [names["forward" in name] for name, x in KERNELS[case].items() if not x["fits"]]
    return " and ".join(dict.fromkeys(passed))


def unfit_in_all(profile, head_dim, arch):
    """Return what does not fit, whichever the group and the packing, which change nothing of it."""
    of = [
        str(Case(profile, head_dim, arch, group, packed)) for group in GROUPS for packed in PACKED
    ]
    (passed,) = {unfit(key) for key in of}
    return passed


def test_the_readme_says_which_profile_does_not_fit_where():
    expected: dict[str, list[str]] = {}
    for profile in PROFILES:
        for arch in SHARED_MEMORY:
            passed = {dim: unfit_in_all(profile, dim, arch) for dim in HEAD_DIMS}
            said = ", ".join(f"{dim}: {what}" for dim, what in passed.items() if what)
            expected.setdefault(f"`{profile}`", []).append(said)
    expected = {profile: cells for profile, cells in expected.items() if any(cells)}
    assert rows_of("does not fit | sm_80 | sm_90 | sm_100") == expected
