"""The instrument in the process of a recorded training: `--probe` and `--gradient-every`."""

import re
import sys
from pathlib import Path

import pytest

from stability.analysis.gradient_evidence import gradient_evidence
from stability.analysis.operator_evidence import operator_evidence
from stability.analysis.study_records import read_study
from stability.config.study import PolicyConfig
from stability.records.events import GRADIENT_IN_PART
from stability.records.metric_log import read_metrics
from stability.records.metric_names import deviation_name, gradient_name
from stability.records.witness import read_witness
from tests.stability.recorder.recording import SCRIPTS, Recording, bits_of, run_alone, words

CANDIDATE = "flash:all_bf16"
PROBE = ("--probe", CANDIDATE, "--every", "4")


def values(study: Recording, arm: str, name: str) -> dict[int, float]:
    """Return a metric's values by step."""
    found = read_metrics(study.paths(arm).metrics)[name]
    return dict(zip(found.steps, found.values, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "looks"),
    [
        (["--bf16"], [0, 4, 8]),
        # the model is called first while torch runs the hooks of a step
        (["--bf16", "--closure"], [0, 4, 8]),
        # it is known which model trains once the first update has begun
        (["--bf16", "--late-optimizer"], [4, 8]),
    ],
)
def test_a_probe_measures_in_the_script_and_changes_no_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], looks: list[int]
) -> None:
    study = Recording(tmp_path, words("evaluates.py", "--kind", "tuple", *flags))
    alone = run_alone([*study.command, "--seed", "0"])
    assert study.record("baseline", options=(*PROBE, "--gradient-every", "6")) == 0
    assert bits_of(capsys.readouterr().out) == alone
    for result in ("out", "dq", "dk", "dv"):
        ratios = values(study, "baseline", deviation_name("model", result, "error_ratio"))
        assert list(ratios) == looks
        assert min(ratios.values()) >= 1.0
    looked = values(study, "baseline", gradient_name("all", "ratio"))
    assert list(looked) == [6, 12]
    assert min(looked.values()) > 1.0, "the candidate is the one that errs further"
    assert study.batches("baseline"), "what the instrument calls is no batch"
    assert len(study.losses("baseline")) == 12


@pytest.mark.slow
def test_an_attention_that_is_swapped_in_is_judged_on_two_levels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("evaluates.py", "--kind", "tuple", "--bf16"))
    probe = ("--probe", CANDIDATE, "--every", "1", "--gradient-every", "1")
    assert study.record("baseline", options=probe) == 0
    swapped = ("--attention", CANDIDATE, *probe[2:], "--check-observer", "true")
    assert study.record("narrow", options=swapped) == 0
    assert study.manifest("narrow").observer["equal"], "unprobed it ends in the same bits"
    # its own candidate beside the script's attention, and as a candidate beside the baseline's
    name = deviation_name("model", "dq", "error_ratio")
    # under gradients of out that the narrow forward pass has changed a little
    assert values(study, "narrow", name)[0] == pytest.approx(
        values(study, "baseline", name)[0], rel=0.1
    )
    ratio = gradient_name("all", "ratio")
    assert values(study, "narrow", ratio)[1] > 1.0
    recorded = read_study(study.folder)
    arm = next(arm for arm in recorded.candidates if arm.name == "narrow")
    operator = operator_evidence(recorded, arm, PolicyConfig())
    gradient = gradient_evidence(recorded, arm, PolicyConfig())
    assert operator.state != "not measured", operator.sentence
    assert gradient.state != "not measured", gradient.sentence
    assert study.record("unprobed", options=("--attention", CANDIDATE)) == 0
    bits = {a: study.manifest(a).hashes["final_weights"] for a in ("narrow", "unprobed")}
    assert bits["narrow"] == bits["unprobed"]
    executed = [read_witness(study.paths(arm).witness).stretches for arm in ("narrow", "unprobed")]
    assert executed[0][0]["executed"] == executed[1][0]["executed"], "what looks is no training"


@pytest.mark.long
def test_two_ranks_are_probed_on_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("evaluates.py", "--kind", "tuple", ranks=2))
    alone = run_alone([*study.command, "--seed", "0"])
    assert study.record("baseline", options=(*PROBE, "--gradient-every", "6")) == 0
    assert bits_of(capsys.readouterr().out) == alone
    assert list(values(study, "baseline", gradient_name("all", "ratio"))) == [6, 12]


CROSS_ENTROPY = "    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "edit"),
    [
        ([], ("", "")),
        (["--closure"], ("", "")),
        # the next pass, where a look is made, begins inside of hooks for saved tensors
        (
            [],
            (
                CROSS_ENTROPY,
                "    from torch.utils.checkpoint import checkpoint\n"
                "    found = checkpoint(model, x, use_reentrant=False)\n"
                "    return F.cross_entropy(found.flatten(0, 1), y.flatten())\n",
            ),
        ),
        # the last pass before the step is none that a loss is made of
        ([], ("        loss.backward()\n", "        loss.backward()\n        model(batch)\n")),
    ],
    ids=["plain", "closure", "checkpoint", "a pass between"],
)
def test_a_model_that_returns_no_loss_is_looked_at_under_the_scripts_own_gradient(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    edit: tuple[str, str],
) -> None:
    source = (SCRIPTS / "evaluates.py").read_text()
    assert edit[0] in source
    (tmp_path / "train.py").write_text(source.replace(*edit))
    study = Recording(tmp_path, [sys.executable, str(tmp_path / "train.py"), "--bf16", *flags])
    alone = run_alone([*study.command, "--seed", "0"])
    probe = ("--probe", CANDIDATE, "--every", "1", "--gradient-every", "1")
    assert study.record("baseline", options=probe) == 0
    assert bits_of(capsys.readouterr().out) == alone, "looking changes no bit"
    assert study.record("narrow", options=("--attention", CANDIDATE, *probe[2:])) == 0
    looked = values(study, "narrow", gradient_name("all", "ratio"))
    assert list(looked) == list(range(1, 13))
    assert min(looked.values()) > 1.0, "the candidate is the one that errs further"
    assert max(values(study, "narrow", gradient_name("all", "baseline_error")).values()) < 2**-7
    recorded = read_study(study.folder)
    arm = next(arm for arm in recorded.candidates if arm.name == "narrow")
    gradient = gradient_evidence(recorded, arm, PolicyConfig())
    assert gradient.state != "not measured", gradient.sentence
    assert gradient.sentence.endswith(f" S{GRADIENT_IN_PART[1:]}.")


@pytest.mark.slow
def test_a_gradient_that_can_not_be_looked_at_is_told_at_the_first_look(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (SCRIPTS / "evaluates.py").read_text()
    source = source.replace("        h = self.embed(x)\n", "        h = self.h = self.embed(x)\n")
    source = source.replace("loss.backward()\n", "(loss + own.h.mean()).backward()\n")
    (tmp_path / "train.py").write_text(source)
    study = Recording(tmp_path, [sys.executable, str(tmp_path / "train.py")])
    assert study.record("baseline", options=(*PROBE, "--gradient-every", "2")) == 1
    captured = capfd.readouterr()
    said = re.sub(r"\s+", " ", captured.out + captured.err)
    assert "probe.gradient_every of the arm, or --gradient-every of `stability record`: " in said
    assert (
        "or all of its own that the loss is made of; of Model: something that was not returned is "
        "a part of the loss; mend that, or leave"
    ) in said
    assert "Traceback" not in said
    assert "exit code" not in said


@pytest.mark.slow
def test_a_probe_that_can_not_be_imported_is_told_in_one_line(tmp_path: Path, capfd) -> None:
    study = Recording(tmp_path, words("attends.py"))
    assert study.record("baseline", options=("--probe", "nowhere:attend")) == 1
    said = " ".join(capfd.readouterr().out.split())
    assert "Traceback" not in said
    assert "got 'nowhere:attend'; ModuleNotFoundError: No module named 'nowhere'" in said
    assert "No module named 'nowhere'" in study.manifest("baseline").message


@pytest.mark.slow
def test_a_script_without_the_package_is_told_before_it_trains(tmp_path: Path, capfd) -> None:
    study = Recording(tmp_path, [sys.executable, "-c", MISSING])
    assert study.record("baseline", options=PROBE) == 1
    captured = capfd.readouterr()
    said = re.sub(r"\s+", " ", captured.out + captured.err)
    assert "the script's environment must have stability, which is not found" in said
    assert "it ran" not in said


MISSING = """
import importlib.util, sys
find = importlib.util.find_spec
hidden = lambda name, *rest: None if name == 'stability' else find(name, *rest)
importlib.util.find_spec = hidden
import torch
print('it ran')
"""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--gradient-every", "2"), "probe: a candidate must be given where gradient_every is"),
        (("--probe", "flash:fa9"), "fa9"),
        ((*PROBE[:2], "--every", "-1"), "probe: every must be >= 0, got -1"),
    ],
)
def test_a_probe_that_can_not_be_is_refused_before_the_command_starts(
    options: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("evaluates.py"))
    assert study.record("baseline", options=options) == 2
    assert sentence in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not study.folder.exists()
