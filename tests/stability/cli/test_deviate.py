"""`stability deviate` runs every combination, prints what was asked for, and refuses early."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stability.cli.main import main
from stability.probe import published_presets
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from stability.records.waterfall_record import read_waterfalls

ROOT = Path(__file__).parents[3]
SMALL = ["--length", "64", "--head_dim", "16", "--heads", "2"]


def shown(capsys, *words):
    assert main(["deviate", *words]) == 0
    return capsys.readouterr().out


def test_every_combination_is_a_row_with_its_numerics(capsys):
    words = ["--profile", "fa2,all_bf16", "--format", "bf16,e8m9", "--backward", "--json"]
    found = json.loads(shown(capsys, *SMALL, *words))
    points = [
        (row["point"]["profile"], row["point"]["format"], row["what"]) for row in found["rows"]
    ]
    assert len(set(points)) == len(points) == 2 * 2 * 4
    assert found["versions"]["torch"] == torch.__version__
    for row in found["rows"]:
        assert row["numerics"]["accumulator"] in ("fp32", "bf16")
        assert {"rmse", "bias_ulp", "bias_ulp_se", "sqnr_db"} <= set(row["candidate"])
        assert {"max_abs"} <= set(row["pair"]) & set(row["baseline"])


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_tables_fit_the_terminal(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    for words in (["--profile", "fa2,stabilised", "--length", "32,64"], ["--waterfall"]):
        text = shown(capsys, *SMALL[2:], *words)
        assert max(len(line) for line in text.splitlines()) <= int(width)
        assert "\u2026" not in text


def test_what_tells_the_rows_apart_stays_whole_and_columns_leave(capsys, monkeypatch):
    asked = "rmse,max_abs,bias_ulp,error_ratio,baseline/rmse,pair/rmse"
    lists = ["--profile", "fa2,all_bf16", "--distribution", "normal,large", "--block_k", "16,32"]
    for width, left_out in (("80", "error_ratio, baseline/rmse, pair/rmse"), ("160", "")):
        monkeypatch.setenv("COLUMNS", width)
        text = shown(capsys, *SMALL, *lists, "--columns", asked)
        rows = [line.split()[:4] for line in text.splitlines() if " out " in line]
        assert sorted(rows) == [
            [profile, block, law, "out"]
            for profile in ("all_bf16", "fa2")
            for block in ("16", "32")
            for law in ("large", "normal")
        ]
        assert max(map(len, text.splitlines())) <= int(width)
        said = f"no room in {width} columns for: {left_out}; --json has all\n"
        assert (said in text) == (width == "80")
        assert ("no room" in text) == (width == "80")


def test_set_and_masks_reach_the_numerics(capsys):
    words = ["--set", "accumulator=bf16,splits=2", "--window", "8,none", "--causal", "--json"]
    (row,) = json.loads(shown(capsys, *SMALL, *words))["rows"]
    assert row["numerics"]["splits"] == 2
    assert row["point"]["window"] == [8, None]
    (plain,) = json.loads(shown(capsys, *SMALL, "--json"))["rows"]
    assert row["candidate"]["rmse"] > plain["candidate"]["rmse"]


def test_pictures_are_whole_pages(capsys, tmp_path):
    for name, words in (("points", ["--block_k", "16,64"]), ("waterfall", ["--waterfall"])):
        path = tmp_path / f"{name}.html"
        shown(capsys, *SMALL, *words, "--plot", str(path))
        page = path.read_text()
        assert "<html" in page
        assert "Plotly.newPlot" in page
        assert "http-equiv" not in page


def test_captured_tensors_are_measured(capsys, tmp_path):
    path = tmp_path / "qkv.safetensors"
    tensors = {name: torch.randn(1, 2, 32, 16) for name in "qkv"}
    save_file(tensors, path)
    (row,) = json.loads(shown(capsys, "--qkv", str(path), "--json"))["rows"]
    save_file({name: 4 * x for name, x in tensors.items()}, path)
    (larger,) = json.loads(shown(capsys, "--qkv", str(path), "--json"))["rows"]
    assert larger["candidate"]["rmse"] != row["candidate"]["rmse"]
    point = larger["point"]
    assert (point["batch"], point["heads"], point["length"], point["head_dim"]) == (1, 2, 32, 16)
    assert point["distribution"] == "given"


def test_v_may_have_a_head_dim_of_its_own_drawn_or_given(capsys, tmp_path):
    rows = json.loads(shown(capsys, *SMALL, "--value_dim", "24", "--backward", "--json"))["rows"]
    assert [row["what"] for row in rows] == ["out", "dq", "dk", "dv"]
    assert {row["point"]["value_dim"] for row in rows} == {24}
    path = tmp_path / "qkv.safetensors"
    sizes = {"q": 16, "k": 16, "v": 24, "dout": 24}
    save_file({name: torch.randn(1, 2, 32, size) for name, size in sizes.items()}, path)
    (row,) = json.loads(shown(capsys, "--qkv", str(path), "--json"))["rows"]
    assert (row["point"]["head_dim"], row["point"]["value_dim"]) == (16, 24)


def test_a_layer_of_a_run_is_captured_and_measured(capsys, trained_run):
    words = ["--checkpoint", str(trained_run), "--layer", "1", "--causal", "--json"]
    (row,) = json.loads(shown(capsys, *words))["rows"]
    assert (row["point"]["heads"], row["point"]["head_dim"]) == (2, 16)
    (other,) = json.loads(shown(capsys, *words[:2], "--causal", "--json"))["rows"]
    assert other["candidate"]["rmse"] != row["candidate"]["rmse"]
    (early,) = json.loads(shown(capsys, *words, "--step", "0"))["rows"]
    assert early["candidate"]["rmse"] != row["candidate"]["rmse"]
    for extra, message in (
        (["--layer", "7"], "layer must be from 0 to 1, got 7"),
        (["--step", "99"], "step must be one of [0, 1, 2], got 99"),
    ):
        with pytest.raises(SystemExit):
            main(["deviate", "--checkpoint", str(trained_run), *extra])
        assert message in capsys.readouterr().err


def test_a_recorded_waterfall_is_that_of_the_run(capsys, trained_run, tmp_path):
    run = RunPaths(tmp_path / "run")
    shutil.copytree(trained_run, run.root)
    manifest = read_manifest(run.manifest)
    attention = {"implementation": "flash", "profile": "all_bf16", "numerics": {"splits": 2}}
    attention = {**manifest.config["attention"], **attention}
    config = {**manifest.config, "attention": attention}
    write_manifest(run.manifest, replace(manifest, config=config))
    words = ["--checkpoint", str(run.root), "--waterfall", "--layer", "1", "--json"]
    printed = json.loads(shown(capsys, *words, "--record"))
    ((_, record),) = read_waterfalls([run])
    assert record.name == "all_bf16 splits=2, layer 1, step 2"
    assert record.steps == printed["steps"]
    assert record.numerics == printed["numerics"]
    assert record.point["causal"] is True
    full = json.loads(shown(capsys, *words))
    assert full["steps"] != printed["steps"], "--record measures under the run's mask"
    assert json.loads(shown(capsys, *words, "--causal"))["steps"] == printed["steps"]
    shown(capsys, *words, "--record", "--profile", "fa2", "--step", "1")
    assert [found.name for _, found in read_waterfalls([run])] == [
        record.name,
        "fa2, layer 1, step 1",
    ]


def test_presets_hold_published_figures_beside_ours(capsys, monkeypatch):
    short = functools.partial(published_presets.fa3_table3, length=128)
    monkeypatch.setattr(published_presets, "fa3_table3", short)
    rows = json.loads(shown(capsys, "--preset", "fa3_table3", "--json"))["rows"]
    assert [row["published"] for row in rows][:3] == [3.2e-4, 1.9e-4, 1.9e-4]
    assert all(row["measured"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "fa2,fa9"], "profile must be a known profile, got 'fa9'"),
        (["--preset", "fa3_table"], "preset must be one of fa3_table3, tie_bias, got 'fa3_table'"),
        (["--length", "64,x"], "length must be integers with commas, got '64,x'"),
        (["--window", "5"], "window must be LEFT,RIGHT"),
        (["--set", "splits"], "set must be FIELD=VALUE with commas, got 'splits'"),
        (["--columns", "rmsd"], "columns must be metrics, got 'rmsd'; nearest: rmse"),
        (["--record", "--checkpoint", "b"], "record must be given with waterfall and checkpoint"),
        (["--record", "--waterfall"], "record must be given with waterfall and checkpoint"),
        (["--qkv", "a", "--checkpoint", "b"], "qkv and checkpoint must not both be given"),
        (["--checkpoint", "nowhere"], "checkpoint must be a run's folder, got 'nowhere'"),
        (["--set", "softmx=fp16"], "no field 'softmx'; nearest: dot"),
        (["--format", "bf17"], "operands must be a format, got 'bf17'; nearest: bf16"),
        (["--waterfall", "--length", "32,64"], "waterfall takes one point, got 2 combinations"),
        (["--softcap", "-1"], "softcap must be a finite number of at least 0, got -1.0"),
        (["--softcap", "-1", "--waterfall"], "softcap must be a finite number of at least 0"),
        (["--kv-heads", "3"], "heads must be a multiple of kv_heads, got 4 and 3"),
        (["--kv-heads", "-1"], "kv_heads must be at least 0, got -1"),
        (["--value-dim", "-3"], "value_dim must be at least 0, got -3"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--seeds", "0"], "seeds must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused_before_any_work(capsys, words, message):
    with pytest.raises(SystemExit) as stop:
        main(["deviate", *words])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"stability: deviate: {message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--qkv", "nowhere"], "qkv must be a safetensors file, got 'nowhere'; no such file"),
        (["--distribution", "nrmal"], "distribution must be one of normal, outliers, uniform, la"),
    ],
)
def test_an_error_names_the_option_and_no_function(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(["deviate", *words])
    assert capsys.readouterr().err.startswith(f"stability: {message}")


def test_what_attention_refuses_of_given_tensors_names_their_file_and_no_function(tmp_path, capsys):
    path = tmp_path / "qkv.safetensors"
    save_file({name: torch.ones(1, 2, 4, 16) for name in "qkv"}, path)
    with pytest.raises(SystemExit, match="2"):
        main(["deviate", "--qkv", str(path), "--softcap", "-1"])
    said = capsys.readouterr().err
    assert said.startswith(f"stability: {path}: softcap must be a finite number of at least 0")
