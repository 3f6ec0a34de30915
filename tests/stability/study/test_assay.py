"""Faults planted on a trained candidate: measured on its own weights, found, and made once."""

import shutil
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from stability.analysis.assay import arm_assay
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.config.load import load_study
from stability.config.study import PolicyConfig
from stability.probe import planted_faults
from stability.records.assay import read_assay, write_assay
from stability.records.paths import snapshot_steps
from stability.study import assay, assays, run_study
from stability.study.measuring_cost import USUAL
from stability.study.run_study import plan_study
from stability.study.storage import drop_by_policy
from tests.conftest import SilentObserver, run_quietly, train_edited


def _edit(content):
    fa2 = {"implementation": "flash", "profile": "fa2"}
    content["arms"] = {
        "baseline": {},
        "fa2": {"attention": fa2},
        "broken": {"attention": {**fa2, "fault": "out_gain_1pct"}},
    }
    content["seeds"], content["yardstick"] = [0], ""


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory, text_file):
    """A tiny study with a candidate and an arm that is broken on purpose, run with its assay."""
    with pytest.MonkeyPatch.context() as patch:
        # the share of a bias takes more looks, which is the demo's business
        patch.setattr(planted_faults, "MOST", 3)
        path, folder = train_edited(tmp_path_factory.mktemp("assay"), text_file, _edit)
    return load_study(path), folder


@pytest.fixture
def trained_study(trained_once, tmp_path, monkeypatch):
    """The study and a copy of its folder that a test may spoil."""
    monkeypatch.setattr(planted_faults, "MOST", 3)
    study, folder = trained_once
    return study, shutil.copytree(folder, tmp_path / study.name)


def _again(study, folder):
    """Run the assays again; return the arms that were measured and what was noted."""
    notes = []
    runs = plan_study(study, folder.parent)
    made = assay.update_assays(folder, runs, study.policy, lambda *note: notes.append(note))
    return [record.arm for record in made], notes


def test_a_studys_candidates_are_assayed_at_its_end(trained_study, monkeypatch):
    study, folder = trained_study
    assert read_assay(folder, "broken") is None, "it is a fault itself"
    record = read_assay(folder, "fa2")
    steps = list(record.parents)
    assert steps == [f"snapshots/step-{step:08d}.safetensors" for step in (2, 4, 6)]
    by_name = {fault.name: fault for fault in record.faults}
    assert len(by_name) == 11
    gains = by_name["dk_gain"].operator
    assert sum(gains["dk"]["gain"]) / 6 == pytest.approx(5e-3, rel=0.3)
    assert gains["dq"] == record.own.operator["dq"], "a factor on dk leaves dq alone"
    assert min(by_name["dropped_key"].ratios) > 2
    assert not by_name["scale_gain"].ratios, "only the operator shows it"
    dropped = by_name["dropped_key"]
    assert len(dropped.own_ratios) == len(dropped.ratios) == 3
    assert max(dropped.own_ratios) < 2 < min(dropped.ratios)
    found = arm_assay(read_study(folder), read_study(folder).arm("fa2"), PolicyConfig())
    operator = [text for text in found.missed if text.endswith("operator")]
    # of two layers, three looks are six values: where the processor has a matrix unit of its own,
    # whose bits are others, they pin a bias of 0.1 ULP down just not well enough
    assert operator in ([], ["bias_tenth_ulp at the operator"])
    biases = by_name["bias_tenth_ulp"].operator["out"]["golden_bias_ulp"]
    assert sum(biases) / 6 == pytest.approx(0.1, abs=0.03)

    monkeypatch.setattr(assay, "assay_run", lambda *_: pytest.fail("measured again"))
    assert _again(study, folder) == ([], [])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: replace(record, faults=record.faults[:1]),
        lambda record: replace(
            record, faults=tuple(replace(f, levels=("operator",)) for f in record.faults)
        ),
        lambda record: replace(record, parents={}),
        lambda record: replace(record, stages=(3, 6, 12)),
        lambda record: replace(record, own=replace(record.own, error="no room")),
        lambda record: replace(record, sources={**record.sources, "attention": "0" * 64}),
    ],
    ids=["one fault", "older levels", "other weights", "fewer looks", "failed", "other source"],
)
def test_a_record_that_is_short_or_stale_is_made_anew(trained_study, monkeypatch, spoil):
    study, folder = trained_study
    whole = read_assay(folder, "fa2")
    write_assay(folder, spoil(whole))
    monkeypatch.setattr(assay, "assay_run", lambda *_: whole)
    assert _again(study, folder) == (["fa2"], [])
    assert _again(study, folder) == ([], [])


def test_faults_that_could_not_be_planted_are_noted_once_with_the_reason(
    trained_study, monkeypatch
):
    study, folder = trained_study
    whole = read_assay(folder, "fa2")
    (folder / "assay" / "fa2.json").unlink()
    failed = tuple(replace(fault, error="no disk") for fault in whole.faults[:2])
    monkeypatch.setattr(
        assay, "assay_run", lambda *_: replace(whole, faults=(*failed, *whole.faults[2:]))
    )
    assert _again(study, folder) == (["fa2"], [("fa2", 0, "no assay: no disk")])
    assert read_assay(folder, "fa2").faults[1].error == "no disk"
    monkeypatch.setattr(assay, "assay_run", lambda *_: whole)
    assert _again(study, folder) == (["fa2"], []), "it is tried again"


def test_no_look_at_a_fault_is_of_one_batch_at_the_same_weights(trained_study, monkeypatch):
    study, folder = trained_study
    (folder / "assay" / "fa2.json").unlink()
    data = assay.load_data
    monkeypatch.setattr(planted_faults, "MOST", 96)
    given = []

    def kept(looks, *_):
        given.extend(looks)
        raise ValueError("seen")

    class Data:
        def __init__(self, config):
            loader = data(config).train_dataloader()
            self._three = [batch[: assay.SEQUENCES] for batch in islice(loader, 3)]

        def train_dataloader(self):
            return [*self._three, *(batch.flip(0) for batch in self._three)]

    monkeypatch.setattr(assay, "load_data", Data)
    monkeypatch.setattr(assay, "plant_faults", kept)
    assert "seen" in _again(study, folder)[1][0][2]
    # three batches at three snapshots, though six batches came
    assert len(given) == 9
    args = [look.gradient.args for look in given]
    assert len({(id(weights), str(batch.tolist())) for _, weights, batch in args}) == 9
    assert len({str(sorted(batch.tolist())) for *_, batch in args}) == 3


def _without_weights(study, folder):
    """Drop the study's snapshots, and its assay, as if its candidate had failed when it ended."""
    runs = plan_study(study, folder.parent)
    assert drop_by_policy(folder, runs, "none")
    (folder / "assay" / "fa2.json").unlink()
    (run,) = (run for run in runs if run.arm.name == "fa2")
    assert snapshot_steps(run.paths) == [0]
    return runs


@pytest.mark.slow
def test_a_candidate_whose_weights_were_dropped_is_trained_anew_for_the_same_assay(trained_study):
    study, folder = trained_study
    before = read_assay(folder, "fa2")
    runs, observer = _without_weights(study, folder), SilentObserver()
    measure = partial(assay.assay_whole_run, observer=observer, isolated=False)
    made = assay.update_assays(
        folder, runs, study.policy, lambda *note: pytest.fail(str(note)), measure=measure
    )
    assert [record.arm for record in made] == ["fa2"]
    looks = [done for arm, done, _, what in observer.assays if "open" in what and arm == "fa2"]
    assert looks == [*range(1, len(looks) + 1)] != []
    assert repr(read_assay(folder, "fa2")) == repr(before)  # a share of few looks is NaN
    assert "its snapshot of step 2 was dropped by the study's keep" in observer.notes[0]
    # the record is that of the study's run, and is made once
    assert _again(study, folder) == ([], [])


@pytest.mark.slow
def test_a_candidate_of_another_source_is_not_trained_anew(trained_study, monkeypatch):
    study, folder = trained_study
    runs, notes = _without_weights(study, folder), []
    monkeypatch.setattr(assay, "environment", lambda: {"kernel_source": "edited"})
    measure = partial(assay.assay_whole_run, observer=SilentObserver(), isolated=False)
    run = [folder, runs, study.policy, lambda *note: notes.append(note)]
    assert assay.update_assays(*run, measure=measure) == []
    assert "must have the kernel source that it was trained with" in notes[0][2]
    assert not (folder / "forks").exists()


@pytest.mark.slow
@pytest.mark.parametrize("has_failed", [True, False])
def test_only_a_candidate_that_awaits_faults_keeps_its_weights(
    trained_study, monkeypatch, has_failed
):
    study, folder = trained_study
    (folder / "assay" / "fa2.json").unlink()
    monkeypatch.setattr(run_study, "update_assays", lambda *_, **__: [])
    monkeypatch.setattr(run_study, "failed_arms", lambda *_: {"fa2"} if has_failed else set())
    run_quietly(replace(study, keep="none"), folder.parent)
    runs = {run.arm.name: run.paths for run in plan_study(study, folder.parent)}
    assert snapshot_steps(runs["fa2"]) == ([0] if has_failed else [0, 1, 2, 4, 6])
    assert snapshot_steps(runs["broken"]) == [0]


def test_how_many_updates_faults_take_is_told_of_candidates_of_the_first_seed(
    write_study, tmp_path
):
    def edit(content):
        _edit(content)
        content["seeds"] = [3, 4]
        looked = {"every": 1, "gradient_every": 2, "gradient_sequences": 1}
        content["arms"]["fa2"]["probe"] = looked

    study = load_study(write_study(edit))
    runs = plan_study(study, tmp_path)
    # a fault's gradient takes three updates; a look each second update is three of one sequence in
    # four, so that an update with its looks takes 1 + 3 * 3/4 / 2
    expected = {("fa2", 3): pytest.approx(USUAL * 3 / (1 + 9 / 8))}
    assert assay.planted_updates(runs, study.policy) == expected
    without = [run for run in runs if run.arm.role != "broken"]
    assert assay.planted_updates(without, study.policy) == {}


def test_faults_are_not_planted_with_another_source_than_the_runs(trained_study, monkeypatch):
    study, folder = trained_study
    path = folder / "assay" / "fa2.json"
    path.unlink()
    monkeypatch.setattr(assay, "environment", lambda: {"kernel_source": "edited"})
    made, ((arm, seed, said),) = _again(study, folder)
    assert (made, arm, seed) == ([], "fa2", 0)
    assert "fa2 must have the kernel source that it was trained with, has another now" in said
    assert not path.exists()


@pytest.mark.slow
def test_at_fp64_faults_are_planted_at_the_operator_alone(write_study, run_tiny, tmp_path):
    def edit(content):
        content["base"] |= {"precision": "64-true", "probe": {"every": 0}}
        flash = {"implementation": "flash", "profile": "golden"}
        content["arms"] = {
            "flash": {"attention": flash},
            "broken": {"attention": {**flash, "fault": "out_gain_1pct"}},
        }
        content["seeds"], content["yardstick"] = [0], ""

    study = load_study(write_study(edit))
    run_tiny(study, tmp_path)
    folder = tmp_path / study.name
    record = read_assay(folder, "flash")
    assert {fault.levels for fault in record.faults} == {("operator",)}
    assert not any(fault.ratios for fault in record.faults)
    recorded = read_study(folder)
    # the golden rounds as coarsely here: what the order of sums does, 4 to 32 times, is no fault
    policy = PolicyConfig(max_error_ratio=100.0)
    found = arm_assay(recorded, recorded.arm("flash"), policy)
    assert (found.state, found.faults) == ("sensitive", 10), found.sentence
    assert _again(study, folder) == ([], [])


@pytest.mark.slow
def test_an_arm_that_fails_already_is_not_assayed(trained_study, tmp_path, monkeypatch):
    study, folder = trained_study
    path = folder / "assay" / "fa2.json"
    path.unlink()
    runs = plan_study(study, tmp_path)

    def failing(recorded, policy):
        judged = judge_arms(recorded, policy)
        arms = tuple(replace(arm, outcome="FAIL") for arm in judged.arms)
        return replace(judged, arms=arms)

    with monkeypatch.context() as patch:
        patch.setattr(assays, "judge_arms", failing)
        planned = []
        made = assay.update_assays(
            folder, runs, study.policy, lambda *_: None, planned=planned.append
        )
        assert (made, planned) == ([], [[]]), "a display no longer waits for it"
    assert not path.exists()
    observer = run_quietly(study, tmp_path)
    assert read_assay(folder, "fa2").arm == "fa2", "it is undecided after one seed"
    assert observer.planned == [["fa2"]]
    few, told = observer.study_notes
    assert few.startswith("no PASS as it stands: it has 1 of the 3 seeds of the first look")
    assert told.startswith("planting known faults on fa2, to see")
