"""`stability check` answers in a line and an exit code, and what it looked at in JSON."""

import json
import re
from pathlib import Path

import pytest
import torch

from attention_kernels.testing.cells import DTYPES, QUICK, not_looked_at
from attention_kernels.testing.check import CheckReport, Finding
from stability.cli.check import _print
from stability.cli.main import main
from tests.stability.cli.test_output import Terminal
from tests.stability.recorder.recording import Recording, words


@pytest.fixture
def my_kernels(tmp_path, monkeypatch):
    """A folder with a module of attentions, in which the command is called."""
    (tmp_path / "my_kernels_for_check.py").write_text(
        "import os\n"
        "from math import fabs as rihgts\n"
        "from attention_kernels import baseline_attention\n"
        "def right(q, k, v, *, causal, scale=None):\n"
        "    print('tuning')\n"
        "    os.write(1, b'from C')\n"
        "    return baseline_attention(q, k, v, causal=causal, scale=scale)\n"
        "def unready(q, k, v, *, causal, scale=None):\n"
        "    raise NotImplementedError('no CPU')\n"
        "def leaves(q, k, v, *, causal, scale=None):\n"
        "    raise SystemExit(0)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")


def test_a_right_attention_of_ones_own_holds(my_kernels, capfd):
    words = ["check", "my_kernels_for_check:right", "--quick", "--dtype", "bf16", "--json"]
    assert main(words) == 0
    report = json.loads(capfd.readouterr().out)  # the kernel's own lines are not in it
    assert report["passed"]
    assert report["cells"] == len({row["cell"] for row in report["statistics"]})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        # what it has imported comes after its own
        ("rihgt", "nearest: right"),
        ("baseline_atention", "nearest: baseline_attention"),
        ("xyz", "it has leaves, right, unready"),
    ],
)
def test_a_misspelt_function_is_told_of_those_that_its_module_defines(
    my_kernels, capsys, name, said
):
    with pytest.raises(SystemExit):
        main(["check", f"my_kernels_for_check:{name}"])
    assert capsys.readouterr().err == (
        f"stability: attention must be a function that my_kernels_for_check has, got {name!r}; "
        f"{said}\n"
    )


def test_of_how_far_a_result_errs_one_line_is_printed_and_none_that_is_said_above(capsys):
    told = [
        ("diagnosis", "out", "dv errs 6 times; nothing known explains it"),
        ("range", "out", "out errs up to 9 times in ranges"),
        ("row", "out", "out errs up to 8 times in row 3"),
        ("gain", "out", "out is 1.5 times what it should be"),
        ("error ratio", "out", "out errs 7 times"),
        ("range", "dk", "dk errs up to 5 times in ranges"),
        ("error ratio", "dv", "dv errs 6 times"),
    ]
    findings = [Finding(what=x, noun=of, sentence=said, dtypes=("bf16",)) for x, of, said in told]
    _print(CheckReport(name="mine", dtypes=("bf16",), cells=1, findings=tuple(findings)))
    assert capsys.readouterr().out.splitlines() == [
        "mine FAILS at bf16: dv errs 6 times; nothing known explains it",
        "  bf16: out errs up to 8 times in row 3",
        "  bf16: out is 1.5 times what it should be",
        "  bf16: dk errs up to 5 times in ranges",
    ]


def test_what_follows_from_a_mistake_is_one_line_where_all_does(capsys):
    def found(what, noun, sentence, dtypes, follows=None):
        return Finding(what=what, noun=noun, sentence=sentence, dtypes=dtypes, follows=follows)

    both, findings = ("bf16", "fp32"), []
    findings.append(found("diagnosis", "mask", "the mask is off", both))
    findings.append(found("row", "out", "out errs", both, follows=True))
    findings.append(found("gain", "dv", "not explained by that: dv is off", ("fp32",), False))
    _print(CheckReport(name="mine", dtypes=both, cells=2, findings=tuple(findings)))
    assert capsys.readouterr().out.splitlines() == [
        "mine FAILS at bf16, fp32: the mask is off",
        "  fp32: not explained by that: dv is off",
        "  bf16: all else that is too large follows from that",
    ]

    findings.append(found("gain", "dq", "perhaps not explained by that: dq is off", ("bf16",)))
    _print(CheckReport(name="mine", dtypes=both, cells=2, findings=tuple(findings)))
    assert "all else" not in capsys.readouterr().out


def test_what_the_inputs_are_that_a_finding_names_is_told_once(capsys):
    report = CheckReport(
        name="mine",
        dtypes=("bf16",),
        cells=2,
        findings=tuple(
            Finding(what="gain", noun=noun, sentence=f"{noun} is off, {on}", dtypes=("bf16",))
            for noun, on in (
                ("out", "on 'rare rows' inputs"),
                ("dq", "only on 'rare rows' inputs"),
                ("dk", "on the given inputs"),
            )
        ),
    )
    _print(report)
    assert capsys.readouterr().out.splitlines()[3:] == [
        "  'rare rows' inputs: 3 rows of q in 100 times 10, 3 keys in 100 times 3"
    ]


def test_what_autocast_changes_is_printed_beside_the_answer(capsys):
    said = "Under autocast, as in a bf16-mixed study, it gives other bits (out)"
    _print(CheckReport(name="mine", dtypes=("bf16",), cells=1, autocast=said))
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {said}"]


def test_what_was_not_looked_at_stands_below_the_answer_and_fits_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", terminal)
    left_out = not_looked_at(QUICK)
    _print(CheckReport(name="mine", dtypes=("bf16",), cells=1, not_looked_at=left_out))
    answer, *lines = terminal.getvalue().splitlines()
    assert "not looked at" not in answer
    assert len([line for line in lines if line.startswith("  not looked at: ")]) == 2
    assert len(lines) <= 6
    assert max(map(len, lines)) <= 80


def test_what_a_failing_attention_was_not_tried_on_is_not_told(capsys):
    off = Finding(what="gain", noun="out", sentence="out is off", dtypes=("bf16",))
    report = CheckReport(name="mine", dtypes=("bf16",), cells=1, findings=(off,))
    report.not_looked_at = not_looked_at(QUICK)
    _print(report)
    assert capsys.readouterr().out == f"{report.answer}\n" == "mine FAILS at bf16: out is off\n"


def test_the_columns_of_the_table_are_told_below_it(capsys):
    _print(_passed_with(1.0))
    said = capsys.readouterr().out
    assert "of 10 in bf16 in the worst single row" in said
    assert "The angle, in radians, is that between a result and the right one" in said
    assert "LSE" not in said


def test_a_ratio_of_the_lse_above_the_limit_is_explained_unless_it_is_a_finding(capsys):
    report = _passed_with(3.0, "lse")
    _print(report)
    assert "Of lse the largest ratio is above 2, surely so in no cell." in capsys.readouterr().out
    report.findings = (Finding(what="gain", noun="lse", sentence="lse is off", dtypes=("bf16",)),)
    _print(report)
    assert "Of lse" not in capsys.readouterr().out
    # found as another mistake, which no finding of the LSE alone is
    report.findings = (Finding(what="key", noun="key", sentence="missed", dtypes=("bf16",)),)
    _print(report)
    assert "Of lse" not in capsys.readouterr().out


def _passed_with(ratio, result="dq"):
    row = {
        "dtype": "bf16",
        "law": "normal",
        "cell": "one",
        "result": result,
        "error_ratio": [1.0, ratio],
        "error_ratio_error": [0.125, 0.5],
        "worst_row": 3.0,
        "gain": [0.0],
        "bias_ulp": [1.114],
        "angle": [0.0],
    }
    return CheckReport(name="mine", dtypes=("bf16",), cells=1, statistics=[row])


def test_beside_a_figure_stands_its_scatter_and_below_it_how_much_of_it_fails(capsys):
    report = _passed_with(3.62)
    judged = {"dtype": "bf16", "result": "dq", "value": 0.031, "error": 0.02, "limit": 0.05}
    report.biases = [judged]
    _print(report)
    said = capsys.readouterr().out
    (row,) = (line.split() for line in said.splitlines() if line.startswith("bf16 "))
    assert (row[2], row[5]) == ("3.62+-0.50", "+0.031+-0.020"), "not the 1.114 of a single cell"
    assert (
        "After +- stands one standard error: only what is surely beyond its limit fails, an error "
        "ratio or a gain by 5 of them"
    ) in said
    assert "a bias of 0.05 ULP. The angle" in said
    report.biases = [judged | {"limit": 0.13}]
    _print(report)
    said = capsys.readouterr().out
    assert "0.05 ULP (twice plain attention's own where that is more: 0.13 of dq in bf16)" in said


def test_a_ratio_above_2_is_told_to_say_little_of_a_study(capsys):
    _print(_passed_with(3.62))
    said = capsys.readouterr().out
    assert "on a mean over the study's own inputs, which may be smaller or larger." in said
    _print(_passed_with(1.5))
    assert "smaller or larger" not in capsys.readouterr().out


def test_the_help_says_how_a_kernel_refuses_what_it_does_not_support(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "and v, as out, another head_dim;" in said
    assert "what it does not support it may refuse by NotImplementedError" in said


def test_in_a_terminal_it_fits_and_no_word_or_figure_is_cut(monkeypatch):
    name = "my_own_kernels.of_the_second_kind:attend_by_tiles_with_a_name_that_is_long"
    why = f"{name} takes{' rows-of-a-mask-mod-or-of-two-thousand-keys' * 6} and a head_dim of 64"
    figures = {
        "error_ratio": [11856900.0],
        "error_ratio_error": [8384000.0],
        "worst_row": 13199766.8,
    }
    figures |= {"gain": [1e-3], "bias_ulp": [-2079.267], "angle": [1.1e-2]}
    of = [(dtype, x) for dtype in DTYPES for x in ("out", "lse", "dq", "dk", "dv")]
    rows = [{"dtype": dtype, "result": x, "law": "normal", **figures} for dtype, x in of]
    bias = {"value": -55454.693, "error": 3961.5, "limit": 0.05}
    report = CheckReport(
        name=name,
        dtypes=("bf16", "fp16", "fp32"),
        cells=25,
        findings=(Finding(what="gain", noun="out", sentence=why, dtypes=("bf16", "fp16")),),
        unsupported={why: ["one"]},
        statistics=rows,
        biases=[{"dtype": dtype, "result": x, **bias} for dtype, x in of if x != "lse"],
    )
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", terminal)
    _print(report)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) > 20
    assert not any(line.endswith("-") for line in lines), "a name is broken at its hyphen"
    shown = ["1.2e+07+-8e+06", "1.3e+07", "+1.0e-03", "-5.5e+04+-4e+03", "1.1e-02"]
    unjudged = [*shown[:3], "-", shown[4]]
    found = [line.split()[-5:] for line in lines if line.startswith("fp16 ")]
    assert found == [shown, unjudged, *[shown] * 3]


@pytest.mark.slow
def test_a_planted_fault_fails_in_words(capsys):
    assert main(["check", "baseline", "--quick", "--dtype", "fp32", "--fault", "dk_gain"]) == 1
    said = capsys.readouterr().out
    assert "dk is 1.005" in said.splitlines()[0]
    assert "error ratio" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("words", [["--device", "cuda"], []])
def test_a_gpu_is_asked_for_by_name_or_because_there_is_one(words, my_kernels, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="2"):
        main(["check", "my_kernels_for_check:right", "--quick", *words])
    said = "stability: device must be one that this machine computes on, got 'cuda'"
    assert said in capsys.readouterr().err


def test_an_attention_that_supports_nothing_cannot_be_judged(my_kernels, capsys):
    words = ["check", "my_kernels_for_check:unready", "--quick", "--dtype", "bf16"]
    assert main(words) == 2
    said = capsys.readouterr().out
    assert "nothing was looked at: no CPU" in said
    assert f"unsupported in {len(QUICK)} cells: no CPU" in said


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "is_told"), [("flash:fa2", True), ("baseline", False)])
def test_what_passes_and_will_be_undecided_in_a_verdict_is_told(attention, is_told, capsys):
    assert main(["check", attention, "--quick", "--dtype", "bf16"]) == 0
    assert ("Of dq the largest ratio is above 2" in capsys.readouterr().out) == is_told


def test_of_a_command_no_inputs_can_be_had(tmp_path, capsys):
    study = Recording(tmp_path, words("plain.py", "--steps", "2"))
    assert study.record("baseline") == 0
    run = str(study.paths("baseline").root)
    with pytest.raises(SystemExit) as stop:
        main(["check", "baseline", "--quick", "--from", run])
    assert stop.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"must be one that `stability run` trained by our own trainer, got '{run}'" in said
    assert "plain.py`: only that script can build the model" in said
    assert "check the attention without a run" in said


@pytest.mark.slow
def test_inputs_of_a_recorded_run_are_checked(trained_run, capsys):
    words = ["check", "baseline", "--quick", "--dtype", "fp32", "--json"]
    assert main([*words, "--from", str(trained_run)]) == 0
    laws = {row["law"] for row in json.loads(capsys.readouterr().out)["statistics"]}
    assert "given inputs" in laws


def test_a_kernel_that_ends_the_process_fails_in_words(my_kernels, capsys):
    assert main(["check", "my_kernels_for_check:leaves", "--quick", "--dtype", "bf16"]) == 1
    assert "raises SystemExit: 0, in every cell" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('no GPU here\\nsecond')", "RuntimeError: no GPU here second"),
    ],
)
def test_a_module_that_does_not_import_is_wrong_input_in_one_line(
    source, said, tmp_path, monkeypatch, capsys
):
    name = f"module_that_raises_{said.partition(':')[0].lower()}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        main(["check", f"{name}:f", "--quick", "--dtype", "bf16"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_dot_in_place_of_the_colon_is_told(my_kernels, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["check", "my_kernels_for_check.right", "--quick"])
    said = capsys.readouterr().err
    assert said.startswith("stability: attention must be registered or MODULE:FUNCTION, got 'my_k")
    assert said.endswith("; did you mean my_kernels_for_check:right\n")


def test_a_dtype_is_given_once(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["check", "baseline", "--dtype", "bf16,bf16"])
    assert stop.value.code == 2
    assert "dtype must name each once, got 'bf16,bf16'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--layer", "--step"])
def test_a_layer_or_a_step_needs_a_run(option, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["check", "baseline", "--quick", "--dtype", "bf16", option, "0"])
    assert stop.value.code == 2
    assert "got no --from RUN" in capsys.readouterr().err


def test_from_needs_a_run():
    with pytest.raises(SystemExit) as stop:
        main(["check", "baseline", "--from"])
    assert stop.value.code == 2


def test_a_kernel_that_is_not_there_is_told_before_a_run_is_trained_anew(
    my_kernels, monkeypatch, tmp_path, capsys
):
    def trained(folder, step):
        raise AssertionError(f"{folder} is trained anew")

    run = tmp_path / "runs" / "tiny" / "mine" / "seed-0"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    monkeypatch.setattr("stability.cli.check.with_snapshot", trained)
    words = ["--quick", "--dtype", "bf16", "--from", str(run)]
    with pytest.raises(SystemExit, match="2"):
        main(["check", "my_kernels_for_check:rihgt", *words])
    assert "rihgt" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="is trained anew"):
        main(["check", "my_kernels_for_check:right", *words])


def test_the_help_and_the_tutorial_say_how_long_the_full_check_takes(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--help"])
    tutorial = Path(__file__).parents[3] / "docs" / "my_kernel.md"
    for said in (capsys.readouterr().out, tutorial.read_text(encoding="utf-8")):
        said = " ".join(said.split())
        assert "two to three times as long" in said
        assert "takes minutes" not in said
        assert "take minutes" not in said


def test_the_help_says_that_a_dropped_run_is_trained_anew(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "of a study with `keep: none` it is trained anew first" in said
