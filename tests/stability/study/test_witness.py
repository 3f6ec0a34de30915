"""What a run executed is on record, and a run whose label says otherwise fails."""

import itertools
import re
import sys
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.checkpoint import checkpoint

from attention_kernels import baseline_attention
from attention_kernels.testing.faults import FAULTS
from stability.config.arms import expand
from stability.config.load import load_study
from stability.model.gpt import Block
from stability.recorder import witnessing as witnessing_file
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import Witnessing
from stability.recorder.writer import RunWriter
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import MetricLog
from stability.records.numeric_switches import numeric_switches
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles, damage
from stability.records.snapshots import hash_state
from stability.records.witness import Label, gap, read_witness
from stability.study import run as run_module
from stability.study import train_run
from stability.study.assemble import assemble, fit, load_data, make_trainer
from stability.study.observer_gate import check_observer

_refuse = run_module._refuse_difference
QUICK = {
    ("bf16-mixed", "baseline"),
    ("32-true", "sdpa"),
    ("16-mixed", "flash"),
    ("emulated:e4m3", "baseline"),
}
GRID = [
    pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
    for each in itertools.product(
        ("bf16-mixed", "32-true", "64-true", "bf16-true", "16-mixed", "emulated:e4m3"),
        ("baseline", "flash", "sdpa"),
    )
    if each != ("emulated:e4m3", "sdpa")  # it can't be told to round
]


FLASH = {"attention": {"implementation": "flash", "profile": "all_bf16"}}


def _two_arms(content):
    content.update(seeds=[0], arms={"baseline": {}, "fp32": {"precision": "32-true"}})
    content["base"]["train"].update(steps=4, snapshot_steps=[2])


def _run(tmp_path, arm):
    return RunPaths.for_run(tmp_path / "tiny", arm, 0)


def _train_all_in(monkeypatch, precision):
    """Train every arm in `precision`, whatever its label says."""

    def make(config, *args):
        return make_trainer(replace(config, precision=precision), *args)

    monkeypatch.setattr(train_run, "make_trainer", make)


def test_an_arm_that_trains_otherwise_than_it_is_labelled_fails(
    write_study, run_tiny, tmp_path, monkeypatch
):
    _train_all_in(monkeypatch, "bf16-mixed")
    ended = run_tiny(load_study(write_study(_two_arms)), tmp_path).ended
    said = "witness: arm fp32 is labelled 32-true, its linear layers multiplied BF16"
    assert ended == [("baseline", 0, "finished", ""), ("fp32", 0, "failed", said)]
    manifest = read_manifest(_run(tmp_path, "fp32").manifest)
    # found after the first update: not a step is lost on a run that says nothing
    assert (manifest.state, manifest.step) == ("failed", 1)
    (stretch,) = read_witness(_run(tmp_path, "fp32").witness).all
    assert {row.operands for row in stretch.rows if row.part == "linear"} == {("bfloat16",) * 2}


def test_a_finished_run_has_witnessed_its_first_updates_and_its_last(
    write_study, run_tiny, tmp_path
):
    run_tiny(load_study(write_study(_two_arms)), tmp_path)
    for arm, dtype in (("baseline", "bfloat16"), ("fp32", "float32")):
        run = _run(tmp_path, arm)
        (stretch,) = read_witness(run.witness).all
        assert (stretch.first, stretch.last, stretch.steps) == (0, 4, [0, 1, 3])
        linear = [row for row in stretch.rows if row.part == "linear"]
        assert {row.operands for row in linear} == {(dtype, dtype)}
        # six layers a block, and the head, which has no module of its own
        assert len({row.module for row in linear}) == 2 * 6 + 1
        assert {row.during for row in linear} == {"forward", "backward"}
        assert stretch.answers["at_start"] == stretch.answers["at_end"]
        assert set(stretch.switches) == {"before_imports", "at_start", "at_end"}
        assert stretch.switches["at_start"]["deterministic_algorithms"] is True
        assert not damage(run)
        run.witness.write_text(run.witness.read_text() + " ")
        assert "witness.json: is damaged" in damage(run)[0]


def _trained(config, folder, *, witnessed=True):
    """Train `config`, held against its own label; return its weights' hash, and what was seen."""
    parts, data = assemble(config), load_data(config)
    implementation = parts.attention.description["implementation"]
    label = Label(arm="broken", precision=config.precision, implementation=implementation)
    witnessing = Witnessing(parts.model, config.train.steps, before=numeric_switches(), label=label)
    files = RunFiles.unnamed(folder)
    log = MetricLog(files.paths.metrics)
    door = TrainerDoor(RunWriter(files, log), parts.model, [], witnessing)
    callbacks: list[Callback] = [*parts.callbacks, *([door] if witnessed else [])]
    trainer = make_trainer(config, files, [], callbacks)
    fit(trainer, parts, data)
    if witnessed:
        door.end(trainer)
    log.close()
    return hash_state(parts.model.state_dict()), witnessing.witness


@pytest.mark.parametrize(("precision", "attention"), GRID)
def test_the_witness_changes_no_bit(write_study, tmp_path, precision, attention):
    def edit(content):
        _two_arms(content)
        content["base"]["precision"] = precision
        content["base"]["attention"] = {"implementation": attention}
        content["base"]["probe"] = {"every": 0}

    config = expand(load_study(write_study(edit)))[0].config
    # every update is one of the first or the last
    config = replace(config, train=replace(config.train, steps=3, snapshot_steps=()))
    plain, _ = _trained(config, tmp_path / "plain", witnessed=False)
    watched, witness = _trained(config, tmp_path / "witnessed")
    assert watched == plain
    assert witness.rows


def computes_again(q, k, v, *, causal, scale=None):
    def attend(q, k, v):
        return baseline_attention(q, k, v, causal=causal, scale=scale)

    return checkpoint(attend, q, k, v, use_reentrant=True) if q.requires_grad else attend(q, k, v)


@pytest.mark.parametrize(
    "attention",
    [
        {"implementation": "baseline", "fault": "dq_gain"},
        {"implementation": f"{__name__}:computes_again"},
    ],
    ids=["fault", "checkpoint"],
)
def test_the_witness_changes_no_bit_of_a_backward_in_a_backward(write_study, tmp_path, attention):
    def edit(content):
        _two_arms(content)
        content.update(arms={"baseline": {}}, yardstick="")
        content["base"].update(precision="bf16-mixed", attention=attention, probe={"every": 0})

    config = expand(load_study(write_study(edit)))[0].config
    config = replace(config, train=replace(config.train, steps=3, snapshot_steps=()))
    plain, _ = _trained(config, tmp_path / "plain", witnessed=False)
    watched, witness = _trained(config, tmp_path / "witnessed")
    assert watched == plain
    again = [row for row in witness.rows if row.part == "attention" and row.during == "backward"]
    assert {row.module for row in again} == {"layer_0.attention", "layer_1.attention"}


@pytest.mark.slow
def test_the_witness_changes_no_measurement(write_study, run_tiny, tmp_path, monkeypatch):
    def edit(content):
        _two_arms(content)
        content.update(arms={"baseline": {}, "flash": FLASH}, yardstick="flash")
        content["base"]["watch"] = {"every": 1}
        content["base"]["probe"] |= {"every": 1, "inside": True, "inherited": True}

    logs = []
    for looks in (0, 100):
        monkeypatch.setattr(witnessing_file, "FIRST_LOOKS", looks)
        study = load_study(write_study(edit))
        run_tiny(study, tmp_path / str(looks))
        runs = [_run(tmp_path / str(looks), arm) for arm in ("baseline", "flash")]
        assert [len(read_witness(run.witness).all[0].steps) for run in runs] == [
            looks // 25 or 1
        ] * 2
        logs.append([run.metrics.read_bytes() for run in runs])
    assert logs[0] == logs[1]


def test_the_observer_gate_would_see_a_witness_that_changes_a_bit(write_study, monkeypatch):
    own = Witnessing.update_ended

    def disturbing(self, step):
        own(self, step)
        with torch.no_grad():
            next(iter(self._model.parameters())).mul_(1.001)

    config = expand(load_study(write_study(_two_arms)))[0].config
    assert check_observer(config, steps=2).equal
    monkeypatch.setattr(Witnessing, "update_ended", disturbing)
    assert not check_observer(config, steps=2).equal


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "precision", [pytest.param("32-true", marks=pytest.mark.long), "bf16-mixed"]
)
@pytest.mark.parametrize(
    "attention",
    ["baseline", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flash", "sdpa"))],
)
def test_every_planted_fault_trains_under_its_label(
    write_study, tmp_path, attention, precision, fault
):
    def edit(content):
        _two_arms(content)
        content["base"].update(precision=precision, probe={"every": 0})
        content["base"]["attention"] = {"implementation": attention, "fault": fault}
        content["base"]["train"].update(steps=2, snapshot_steps=[])
        content.update(arms={"baseline": {}}, yardstick="")

    _, witness = _trained(expand(load_study(write_study(edit)))[0].config, tmp_path)
    dtype = {"32-true": "float32", "bf16-mixed": "bfloat16"}[precision]
    linear = [row for row in witness.rows if row.part == "linear"]
    assert {row.operands for row in linear} == {(dtype, dtype)}
    assert not [row for row in witness.rows if row.part == "unowned"]
    # golden, which all faults but that of the scale are computed with
    wide = {row.module for row in witness.rows if "float64" in row.operands}
    golden = set() if fault == "scale_gain" else {"layer_0.attention", "layer_1.attention"}
    assert wide == golden


def test_a_block_that_is_computed_again_in_another_precision_fails(
    write_study, run_tiny, tmp_path, monkeypatch
):
    own = Block.forward

    def again_in_bf16(self, x, attention):
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_grad_enabled()):
            return own(self, x, attention).float()

    def forward(self, x, attention):
        if not x.requires_grad:  # the loss on held-out text
            return own(self, x, attention)
        return checkpoint(again_in_bf16, self, x, attention, use_reentrant=True)

    monkeypatch.setattr(Block, "forward", forward)

    def edit(content):
        _two_arms(content)
        content.update(arms={"baseline": {}}, yardstick="")
        content["base"].update(precision="32-true", probe={"every": 0})

    (ended,) = run_tiny(load_study(write_study(edit)), tmp_path).ended
    assert ended[2] == "failed"
    assert "its linear layers multiplied BF16 (first: blocks.layer_0." in ended[3]
    (stretch,) = read_witness(_run(tmp_path, "baseline").witness).all
    rows = [row for row in stretch.rows if "bfloat16" in row.operands]
    assert {row.during for row in rows} == {"backward"}
    assert {row.part for row in rows} == {"linear", "attention"}


def turns_a_switch(q, k, v, *, causal, scale=None):
    torch.backends.mkldnn.enabled = False
    return baseline_attention(q, k, v, causal=causal, scale=scale)


def test_a_switch_that_an_attention_turns_at_its_first_call_is_found(
    write_study, run_tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)

    def edit(content):
        _two_arms(content)
        content.update(arms={"baseline": {}}, yardstick="")
        content["base"]["attention"] = {"implementation": f"{__name__}:turns_a_switch"}

    (ended,) = run_tiny(load_study(write_study(edit)), tmp_path).ended
    assert ended[2] == "failed"
    assert ended[3] == (
        "witness: arm baseline: switch mkldnn was True when training began, False by update 4"
    )


def _stopped_at_two(run):
    """Put a run back to where a kill after the checkpoint of step 2 would have left it."""
    manifest = read_manifest(run.manifest)
    files = {n: s for n, s in manifest.files.items() if "00000004" not in n and "step-" in n}
    write_manifest(run.manifest, replace(manifest, state="running", files=files))
    run.witness.unlink()


@pytest.mark.slow
def test_a_resumed_run_has_a_stretch_for_each_process(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_two_arms))
    run_tiny(study, tmp_path)
    run = _run(tmp_path, "fp32")
    whole = read_witness(run.witness)
    _stopped_at_two(run)
    assert run_tiny(study, tmp_path).ended[1][2] == "finished"
    resumed = read_witness(run.witness)
    assert [(each.first, each.last, each.steps) for each in resumed.all] == [
        (0, 2, [0, 1]),
        (2, 4, [2, 3]),
    ]
    assert "at_end" not in resumed.all[0].answers  # nobody was there to compute them
    assert resumed.rows == whole.rows
    assert resumed.answers == whole.answers
    assert gap(resumed, 0, 4) == ""


def test_a_resume_in_another_precision_than_before_fails(
    write_study, run_tiny, tmp_path, monkeypatch
):
    study = load_study(write_study(_two_arms))
    run_tiny(study, tmp_path)
    _stopped_at_two(_run(tmp_path, "fp32"))
    _train_all_in(monkeypatch, "bf16-mixed")
    (_, (*_, state, message)) = run_tiny(study, tmp_path).ended
    assert state == "failed"
    assert "26 of 52 kinds of product in its linear layers multiplied BF16" in message


# Dynamo looks at .grad of what flows between the graphs: torch/_dynamo/variables
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
def test_a_compiled_run_says_that_its_dtypes_are_unproven(write_study, run_tiny, tmp_path):
    def edit(content):
        _two_arms(content)
        content.update(arms={"baseline": {}}, yardstick="")
        content["base"]["train"]["compile"] = "eager"
        content["base"]["probe"] = {"every": 0}

    run_tiny(load_study(write_study(edit)), tmp_path)
    witness = read_witness(_run(tmp_path, "baseline").witness)
    assert witness.unproven == "torch.compile fuses operators"
    assert not witness.rows
    assert len(witness.answers) == 1


EARLY = "from attention_kernels import baseline_attention as attend\nlr = 1\n"
LATE = """
def attend(q, k, v, *, causal, scale=None):
    import late_one  # only the first call needs it

    return late_one.attend(q, k, v, causal=causal, scale=scale)
"""


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """The folder of two modules of a user's own; the one imports the other in its first call."""
    (tmp_path / "early_one.py").write_text(LATE)
    (tmp_path / "late_one.py").write_text(EARLY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    yield tmp_path
    for name in ("early_one", "late_one"):
        sys.modules.pop(name, None)


def _of_own_modules(content):
    _two_arms(content)
    content.update(arms={"baseline": {}}, yardstick="")
    content["base"]["attention"] = {"implementation": "early_one:attend"}
    content["base"]["probe"] = {"every": 0}


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("early_one", r"environment\.module\.early_one = '[0-9a-f]{64}', asked for"),
        (
            "late_one",
            r"witness: arm baseline: the source of module late_one was '[0-9a-f]{16}' when",
        ),
    ],
)
def test_a_resume_after_a_module_of_the_users_was_edited_is_refused(
    write_study, run_tiny, tmp_path, own_modules, monkeypatch, module, said
):
    study = load_study(write_study(_of_own_modules))
    run_tiny(study, tmp_path)
    run = _run(tmp_path, "baseline")
    (stretch,) = read_witness(run.witness).all
    assert {"early_one", "late_one"} <= stretch.modules.keys()
    _stopped_at_two(run)
    manifest = read_manifest(run.manifest)
    # what a new process knows when it begins
    known = {k: v for k, v in manifest.environment.items() if k != "module.late_one"}
    resolved = {**manifest.resolved, "source": ""}
    write_manifest(run.manifest, replace(manifest, environment=known, resolved=resolved))
    (own_modules / f"{module}.py").write_text("# edited\n" + (LATE if "early" in module else EARLY))
    for name in ("early_one", "late_one"):
        sys.modules.pop(name)
    monkeypatch.setattr("stability.study.run._refuse_difference", _but_for_attention)
    (ended,) = run_tiny(study, tmp_path).ended
    assert ended[2] == "failed"
    assert re.search(said, ended[3])


def _but_for_attention(run, where, found, asked):
    # the attention's own file is compared before, in another sentence
    if where != "attention":
        _refuse(run, where, found, asked)
