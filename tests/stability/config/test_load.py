"""A study's YAML: what is read, and each mistake in one line that names file and key."""

import inspect
import math
from pathlib import Path

import pytest
import yaml

from attention_kernels import checks
from stability.config.attentions import HEAD_DIMS
from stability.config.convert import ConfigError
from stability.config.load import RESERVED, load_study
from stability.records.paths import StudyPaths

STUDY = """
name: tiny
question: Does it matter?
base:
  model: {depth: 2, width: 32, heads: 2, context: 32}
  optimizer: {lr: 1e-3}
  train: {steps: 10, snapshot_steps: [2, 5]}
arms:
  fp32: {precision: 32-true}
  flash: {attention: {implementation: flash, profile: fa2, numerics: {block_k: 32}}}
  rerun:
seeds: [0, 1]
yardstick: fp32
early_step: 5
"""


@pytest.fixture
def write(tmp_path):
    def write_study(edit=lambda content: None, text=STUDY) -> Path:
        content = yaml.safe_load(text)
        content["base"]["optimizer"] = {"lr": 1e-3}
        edit(content)
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write_study


def _set(dotted, value):
    def edit(content):
        *parents, key = dotted.split(".")
        for parent in parents:
            content = content.setdefault(parent, {})
        content[key] = value

    return edit


def test_a_study_is_read_with_the_baseline_first(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(STUDY)
    study = load_study(path)
    assert list(study.arms) == ["baseline", "fp32", "flash", "rerun"]
    assert study.arms["baseline"] == study.arms["rerun"] == {}
    assert study.base.optimizer.lr == 0.001, "1e-3 is a number, though YAML 1.1 reads a string"
    assert study.base.train.snapshot_steps == (2, 5)
    assert study.seeds == (0, 1)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("base.train.stepz", 3), "base.train.stepz: unknown key; nearest: steps"),
        (_set("base.trian", {}), "base.trian: unknown key; nearest: train"),
        (_set("arm", {}), "arm: unknown key; nearest: arms"),
        (_set("base.precision", "fp16"), "base.precision: must be a known .*, got 'fp16'; nearest"),
        (_set("policy", {"candidates": ["fp23"]}), "policy.candidates.0: .*'fp23'; nearest: fp32"),
        (_set("policy", {"candidates": ["baseline"]}), "policy.candidates.0: must be an arm besid"),
        (_set("policy", {"step": 3}), "policy.step: .* snapshot, got 3; they are 0, 2, 5"),
        (_set("policy", {"max_gain": 0}), "policy: max_gain must be > 0 and finite, got 0"),
        (_set("base.precision", 32), "base.precision: must be a string, got 32"),
        (_set("base.attention.fault", "dq_gian"), "base.attention.fault: .*; nearest: dq_gain"),
        (_set("base.model", "demmo"), "base.model: .* preset, got 'demmo'; nearest: demo"),
        (_set("base.model", {"preset": "x"}), "base.model.preset: must be a model preset, got 'x'"),
        (_set("base.model", 7), "base.model: must be a mapping, got 7"),
        (_set("base.model.depth", 10**9), "base.model: depth must be at most 4096, got 1000000000"),
        (_set("base", None), "base.model: missing"),
        (_set("base", [1]), r"base: must be a mapping, got \[1\]"),
        (
            _set("base.attention.implementation", "flesh"),
            "base.attention.implementation: must be a known .*got 'flesh'; nearest: flash",
        ),
        (_set("base.attention.engine", "cuda"), "base.attention.engine: must be a known name"),
        (
            _set("base.probe.shadows", [{"implementation": "flash", "profile": "fa22"}]),
            "base.probe.shadows.0.profile: must be a profile of flash, got 'fa22'; nearest: fa2",
        ),
        (
            _set("arms.flash.attention.numerics", {"probabilities": "bf61"}),
            "arms.flash.attention.numerics.probabilities: .*got 'bf61'; nearest: bf16",
        ),
        (
            _set("arms.flash.attention.numerics", {"blok_k": 3}),
            "arms.flash.attention.numerics.blok_k: .*nearest: block_k",
        ),
        (_set("arms.flash.attention.numerics", {"self": 3}), "arms.flash.attention.numerics.self"),
        (
            _set("arms.x", {"attention": {"implementation": "sdpa", "profile": "fa2"}}),
            "arms.x.attention.profile: must be a profile of sdpa",
        ),
        (_set("arms.x", {"sed": {}}), "arms.x.sed: unknown key; nearest: seed"),
        (_set("arms.x", {"model": {"init": "xavir"}}), "arms.x.model: init must be .* got 'xavir'"),
        (_set("arms.x", "fp32"), "arms.x: must be a mapping of overrides, got 'fp32'"),
        (_set("arms.a/b", {}), "arms: a name must be 1 to 64 letters, .* got 'a/b'"),
        (_set("arms.baseline", {"precision": "32-true"}), "arms.baseline: must override nothing"),
        (_set("arms.drifts", {}), "arms: 'drifts' is reserved"),
        (_set("base.data", {"workers": 1e6}), "base.data.workers: must be a whole number"),
        (
            _set("base.train.snapshot_steps", [2, 5, 2]),
            r"base.train.snapshot_steps: must not hold a step twice, got \[2, 5, 2\]; it is step 2",
        ),
        (
            _set(
                "base.train",
                {
                    "steps": 10,
                    "snapshot_steps": [5],
                    "grad_clip": 0,
                    "trainer": {"gradient_clip_algorithm": "value"},
                },
            ),
            "base.train.trainer.gradient_clip_algorithm: must not be given where .*_clip is 0",
        ),
        (
            _set(
                "base",
                {
                    "model": {"depth": 2, "width": 32, "heads": 2, "context": 32},
                    "precision": "emulated:e4m3",
                    "train": {"steps": 10, "snapshot_steps": [5], "compile": "inductor"},
                },
            ),
            "base.precision: must not be emulated where train.compile is 'inductor'",
        ),
        (
            lambda content: (
                _set("base.train.compile", "inductor")(content),
                _set("arms.e4m3", {"precision": "emulated:e4m3"})(content),
            ),
            "arms.e4m3.precision: must not be emulated where train.compile is 'inductor'",
        ),
        (_set("arms", {"study.json": {}}), "arms: 'study.json' is reserved"),
        (_set("arms.FORKS", {}), "arms: 'FORKS' is reserved: .*; reserved are assay, distances"),
        (_set("arms.FP32", {}), "arms: names must differ in more than case, got 'fp32', 'FP32'"),
        (_set("arms", ["x"]), "arms: must be a mapping from arm names"),
        (_set("name", ".."), r"name: must be 1 to 64 letters, .* got '\.\.'"),
        (_set("name", "forks"), "name: 'forks' is reserved"),
        (_set("name", "x" * 65), "name: must be 1 to 64 letters"),
        (_set("yardstick", "fp23"), "yardstick: must be an arm, got 'fp23'; nearest: fp32"),
        (_set("seeds", []), "seeds: must be different whole numbers from 0"),
        (_set("seeds", [1, 1]), "seeds: must be different whole numbers from 0"),
        (_set("seeds", [0, 1, 0]), r"seeds: .* got \[0, 1, 0\]; seed 0 is listed twice"),
        (_set("seeds", [2**32]), r"seeds: .* all below 2\*\*32, got \[4294967296\]"),
        (_set("base.seed", {"base": -1}), r"base.seed: base must be from 0 to 2\*\*32 - 1, got -1"),
        (
            _set("arms.x", {"seed": {"init_offset": 2**32}}),
            r"arms.x.seed: init_offset must be between -2\*\*32 and 2\*\*32, got 4294967296",
        ),
        (_set("base.data", {"workers": -1}), "base.data: workers must be from 0 to .*, got -1"),
        (_set("base.data", {"workers": 10**6}), "base.data: workers must be from 0 to 1024"),
        (
            _set("base.model.heads", 4),
            r"base.model: width / heads must be from 16 to 256 for the .* baseline, got 32 / 4 = 8",
        ),
        (_set("base.model.width", 1026), "base.model: width / heads .*, got 1026 / 2 = 513"),
        (_set("base.optimizer.lr", math.inf), "base.optimizer: lr must be > 0 and finite, got inf"),
        (_set("seeds", [-1]), "seeds: must be different whole numbers from 0"),
        (_set("seeds", [True]), "seeds.0: must be a whole number, got True"),
        (_set("early_step", 4), "early_step: must be a step with a snapshot, got 4; nearest: 5"),
        (_set("early_step", 50), "early_step: must be a step with a snapshot, got 50; nearest: 10"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_file_and_key(write, edit, message):
    path = write(edit)
    with pytest.raises(ConfigError, match=f"tiny.yaml: {message}") as refusal:
        load_study(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


BOMB = "precision: &a0 [1, 2]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
"""Nine lines that stand for 8e8 values."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "line 2: key 'name' is given twice"),
        ("base:\n  train: {steps: 1, steps: 2}\n", "line 2: key 'steps' is given twice"),
        ("x: {trainer: {a: 1, 'a': 2}}\n", "line 1: key 'a' is given twice"),
        ("arms:\n  a: {}\n  a: {}\n", "line 3: key 'a' is given twice"),
        ("base:\n  <<: {a: 1}\n  <<: {a: 2}\n", "line 3: key '<<' is given twice"),
        ("base:\n  ? [a, b]\n  : 3\n", "line 2: a key must be a single word"),
        ("a: 2020-13-41\n", "line 1: a value can't be read as timestamp"),
        ("a: !!int abc\n", "line 1: a value can't be read as int"),
        ("a: !!bool abc\n", "line 1: a value can't be read as bool"),
        (f"a: {'9' * 5000}\n", "line 1: a value can't be read as int"),
        (BOMB, "line 1: holds more than 100000 values"),
        ("a: &a [1, *a]\n", "line 1: .* repeats itself within itself"),
        ("{a: " * 5000, "is nested too deep to be read"),
        ("base: [1\n", "line 2: "),
        ("- a\n- b\n", "must hold a mapping"),
        ("", "must hold a mapping, got None"),
        ("a: !!python/object:os.system x\n", "line 1: could not determine a constructor"),
    ],
)
def test_what_is_no_yaml_mapping_is_refused(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.yaml: {message}"):
        load_study(path)


def test_every_file_of_a_study_has_a_reserved_name():
    paths = StudyPaths(Path("study"))
    own = {name: value for name, value in vars(StudyPaths).items() if not name.startswith("_")}
    properties = {name for name, value in own.items() if isinstance(value, property)}
    methods = {name for name, value in own.items() if inspect.isfunction(value)}
    files = [getattr(paths, name) for name in properties]
    files += [getattr(paths, name)(0) for name in methods]
    assert {"drifts", "distances", "assay"} == methods, "each is called with a seed or an arm"
    assert {file.relative_to(paths.root).parts[0] for file in files} <= set(RESERVED)


def test_the_head_dims_of_a_config_are_those_of_the_kernels(write):
    assert HEAD_DIMS == (checks.MIN_HEAD_DIM, checks.MAX_HEAD_DIM)

    def narrow(content):
        content["base"]["model"]["heads"] = 4
        content["base"]["attention"] = {"implementation": "sdpa"}
        content["base"]["probe"] = {"every": 0}
        content["arms"] = {"rerun": {}}
        content["yardstick"] = ""

    assert load_study(write(narrow)).base.model.heads == 4, "PyTorch's own attention takes 8"


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gone.yaml: cannot be read: No such file"):
        load_study(tmp_path / "gone.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(ConfigError, match=r"latin.yaml: cannot be read: not UTF-8 text"):
        load_study(tmp_path / "latin.yaml")


def test_overrides_are_typed_and_reach_every_arm(write):
    changes = {"train.steps": "7", "optimizer.lr": "2e-4", "train.snapshot_steps": "[5, 6]"}
    study = load_study(write(), changes)
    assert (study.base.train.steps, study.base.optimizer.lr) == (7, 2e-4)
    assert study.base.train.snapshot_steps == (5, 6)


def test_overrides_that_are_only_valid_together_are_taken_together(write):
    model = load_study(write(), {"model.heads": "3", "model.width": "48"}).base.model
    assert (model.heads, model.width) == (3, 48)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.stepz": "5"}, "--train.stepz: unknown key; nearest: steps"),
        ({"trian.steps": "5"}, "--trian: unknown key; nearest: train"),
        ({"train.steps": "many"}, "--train.steps: must be a whole number, got 'many'"),
        ({"train.steps": ""}, "--train.steps: must be a whole number, got ''"),
        ({"train.steps": "[1"}, r"--train.steps: must be YAML, got '\[1'"),
        ({"model": "demoo"}, "--model: must be a model preset, got 'demoo'; nearest: demo"),
        (
            {"precision": "bf16"},
            "--precision: must be a known name or .*, got 'bf16'; nearest: bf16-",
        ),
    ],
)
def test_a_wrong_override_is_named_as_it_was_typed(write, changes, message):
    with pytest.raises(ConfigError, match=f"tiny.yaml: {message}"):
        load_study(write(), changes)


def test_a_run_cut_short_reads_its_last_step_early(write):
    assert load_study(write(), {"train.steps": "3"}).early_step == 3
    assert load_study(write(), {"train.steps": "7"}).early_step == 5


def test_presets_come_from_beside_the_study_before_the_shipped_ones(write, tmp_path):
    path = write(_set("base.model", "demo"))
    assert load_study(path).base.model.depth == 5
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "demo.yaml").write_text("{depth: 9, width: 64, heads: 2, context: 16}")
    assert load_study(path).base.model.depth == 9
    assert load_study(path, {"model.depth": "4"}).base.model.depth == 4
    path = write(_set("base.model", {"preset": "demo", "kv_heads": 1}))
    model = load_study(path).base.model
    assert (model.depth, model.kv_heads) == (9, 1)
    assert load_study(path, {"model": "small"}).base.model.kv_heads == 0
