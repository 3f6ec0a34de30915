"""The start on record is what the first update begins from, in all its parts."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability.analysis.start_contract import start_part_lines
from stability.recorder.inside import recorded as recorded_process
from stability.recorder.inside.hooks import install
from stability.recorder.inside.recorded import start_of
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training
from stability.recorder.spooled import Spooled, read_spool, read_state
from stability.records.manifest import Manifest
from stability.study.given_start import check_given
from tests.stability.recorder.recording import Recording, code_of


@pytest.fixture(autouse=True)
def _of_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is told of the test's own process: all its sources would be hashed."""
    monkeypatch.setattr(recorded_process, "own_modules", dict)
    monkeypatch.setattr(recorded_process, "environment", lambda switches: {})


Train = Callable[[int], None]


def recorded(
    folder: Path, train: Train, other: int, asked: dict[str, str] | None = None
) -> Spooled:
    """Return what is recorded of `train`, given a number that one thing of its start depends on."""
    training = Training(Spool(str(folder), 0), begin=lambda x: start_of(x, asked or {}, 0, {}))
    uninstall = install(training)
    try:
        torch.manual_seed(0)
        train(other)
        training.end("exit")
    finally:
        uninstall()
    return read_spool(folder)


def both(folder: Path, train: Train) -> list[Spooled]:
    """Return what is recorded of a training in three runs, the last one with another start."""
    found = []
    for place, other in enumerate([0, 0, 1]):
        (folder / str(place)).mkdir()
        found.append(recorded(folder / str(place), train, other))
    return found


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    F.cross_entropy(model(drawn(1, 6, 3)), torch.arange(6) % 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def loads_after_a_trial_pass(other: int) -> None:
    """Load weights and a mean into a model that was tried."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(drawn(9, 2, 3))
    loaded = {"0.weight": drawn(5, 4, 3) + other, "1.running_mean": torch.full((4,), 7.0)}
    model.load_state_dict(loaded, strict=False)
    update(model, optimizer)


def writes_after_the_first_pass(other: int) -> None:
    """Write weights as autograd does not see it, after the pass that trains."""
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.cross_entropy(model(drawn(1, 6, 3)), torch.arange(6) % 4)
    loss.backward()
    model.weight.data.copy_(drawn(5, 4, 3) + other)
    optimizer.step()


def loads_what_does_not_train(other: int) -> None:
    """Load the frozen weights of a model whose head trains."""
    frozen, head = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 4)
    model, optimizer = nn.Sequential(frozen, head), torch.optim.SGD(head.parameters(), lr=0.1)
    model(drawn(9, 2, 3))
    frozen.weight.data.copy_(drawn(5, 3, 3) + other)
    update(model, optimizer)


@pytest.mark.parametrize(
    "train", [loads_after_a_trial_pass, writes_after_the_first_pass, loads_what_does_not_train]
)
def test_weights_that_are_loaded_before_the_first_step_are_the_start(
    train: Train, tmp_path: Path
) -> None:
    first, again, other = both(tmp_path, train)
    assert first.init == again.init
    assert first.init != other.init
    assert not first.doubts


def test_the_snapshot_of_the_start_has_what_was_loaded(tmp_path: Path) -> None:
    state = read_state(recorded(tmp_path, loads_after_a_trial_pass, 0).states[0])
    assert state["0.weight"].equal(drawn(5, 4, 3))
    assert state["1.running_mean"].eq(7).all(), "not as the first pass moved it"


def test_a_start_that_nobody_sets_is_taken_once(tmp_path: Path) -> None:
    def train(other: int) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        at_first.update({name: x.clone() for name, x in model.state_dict().items()})
        for _ in range(2):  # micro-batches
            F.cross_entropy(model(drawn(1, 6, 3)), torch.arange(6) % 4).backward()
        optimizer.step()

    at_first: dict[str, torch.Tensor] = {}
    state = read_state(recorded(tmp_path, train, 0).states[0])
    assert all(x.equal(at_first[name]) for name, x in state.items())


def test_a_nudge_that_is_overwritten_is_refused(tmp_path: Path) -> None:
    found = recorded(tmp_path, loads_after_a_trial_pass, 0, {"STABILITY_NUDGE": "1 0"})
    said = "the nudge was undone: 0.weight was set anew after the start weights were nudged"
    with pytest.raises(ValueError, match=said):
        check_given(found)


class Masked(nn.Linear):
    """Multiplies its weight by a buffer."""

    mask: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the mask."""
        return F.linear(x, self.weight * self.mask)


def is_masked(other: int) -> None:
    """Train under a mask of bools."""
    model = Masked(3, 4)
    model.register_buffer("mask", torch.tensor([True, True, not other]))
    update(model, torch.optim.SGD(model.parameters(), lr=0.1))


def has_a_factor(other: int) -> None:
    """Train with what no checkpoint would hold, inside of a wrapper."""
    model = Masked(3, 4)
    model.register_buffer("mask", torch.ones(3) + other, persistent=False)
    update(nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1))


def is_masked_after_a_trial_pass(other: int) -> None:
    """Put a mask in another's place."""
    model = Masked(3, 4)
    model.register_buffer("mask", torch.ones(3), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(drawn(9, 2, 3))
    model.mask = torch.ones(3) + other
    update(model, optimizer)


class Loaded(nn.Linear):
    """Keeps how much was last asked of it, as a router of experts does."""

    load: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("load", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return its result."""
        out = super().forward(x)
        with torch.no_grad():
            self.load.add_(out.detach().mean(0) * SCALE)
        return out


SCALE = 1.0


@pytest.mark.parametrize("passes", [1, 3])
def test_what_a_forward_pass_remembers_is_no_start(
    passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(other: int) -> None:
        monkeypatch.setattr(sys.modules[__name__], "SCALE", 1.0 + other)
        torch.manual_seed(0)
        model = Loaded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(passes - 1):
            model(drawn(1, 6, 3)).sum().backward()
        update(model, optimizer)

    first, _, other = map(manifest_of, both(tmp_path, train))
    lines = list(start_part_lines(first, other, {"nudge.ulps": (0, 1)}))
    assert [x.sameness for x in lines] == ["same"], lines


def test_what_the_script_writes_between_passes_is_the_start_though_a_pass_writes_it_too(
    tmp_path: Path,
) -> None:
    def train(other: int) -> None:
        torch.manual_seed(0)
        model = Loaded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(drawn(1, 6, 3)).square().mean()
        model.load.fill_(other)
        loss.backward()
        optimizer.step()

    first, _, other = map(manifest_of, both(tmp_path, train))
    assert [x.sameness for x in start_part_lines(first, other, {})] == ["unknown"]


def test_frozen_weights_that_count_no_writes_stop_nothing(tmp_path: Path) -> None:
    def train(other: int) -> None:
        with torch.inference_mode():
            frozen = nn.Linear(3, 3).requires_grad_(False)
        head = nn.Linear(3, 4)
        model = nn.ModuleDict({"frozen": frozen, "head": head})
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        with torch.no_grad():
            x = frozen(drawn(1, 6, 3)).clone()
        F.cross_entropy(model["head"](x), torch.arange(6) % 4).backward()
        optimizer.step()

    first, again, _ = both(tmp_path, train)
    assert first.init == again.init


def resumes_moments(other: int) -> None:
    """Go on with an optimizer's state."""
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for x in model.parameters():
        moments = {"exp_avg": torch.ones_like(x) * other, "exp_avg_sq": torch.ones_like(x)}
        optimizer.state[x] = {"step": torch.tensor(5.0), **moments}
    update(model, optimizer)


OTHERS: dict[Train, str] = {
    is_masked: "the same buffers at the start (Masked.mask: not the same on both sides",
    has_a_factor: "the same buffers at the start (Sequential.0.mask: not the same",
    is_masked_after_a_trial_pass: "the same buffers at the start (Masked.mask before the first",
    resumes_moments: "the same state of the optimizers at the start (exp_avg: not the same",
}


def manifest_of(found: Spooled) -> Manifest:
    return cast("Manifest", SimpleNamespace(resolved={"start_parts": found.start_parts}))


@pytest.mark.parametrize("train", OTHERS)
def test_what_is_no_weight_at_the_start_must_be_the_same(train: Train, tmp_path: Path) -> None:
    first, again, other = map(manifest_of, both(tmp_path, train))
    assert all(x.sameness == "same" for x in start_part_lines(first, again, {}))
    unproven = [x for x in start_part_lines(first, other, {}) if x.sameness != "same"]
    assert [x.sameness for x in unproven] == ["unknown"]
    assert OTHERS[train] in unproven[0].says
    meant = start_part_lines(first, other, {"changes.init": (False, True)})
    assert all(x.sameness == "same" for x in meant)


def has_a_mask_of_its_own(other: int) -> None:
    """Make a causal mask in one run alone, as a model does that has no fused attention."""
    model = nn.Sequential(Masked(3, 4))
    model[0].register_buffer("mask", torch.ones(3))
    if other:
        model[0].register_buffer("causal", torch.ones(4, 4).tril())
    update(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_buffer_of_one_run_alone_is_part_of_a_change_of_code(tmp_path: Path) -> None:
    first, _, other = map(manifest_of, both(tmp_path, has_a_mask_of_its_own))
    flash: dict[str, tuple[object, object]] = {"flags.flash": (True, None)}
    assert [x.sameness for x in start_part_lines(first, other, flash)] == ["same"]
    for differences in ({}, {"nudge.ulps": (0, 1)}):
        assert [x.sameness for x in start_part_lines(first, other, differences)] == ["unknown"]


@pytest.mark.parametrize("train", [is_masked, is_masked_after_a_trial_pass])
def test_a_buffer_of_both_must_be_the_same_whatever_changes(train: Train, tmp_path: Path) -> None:
    first, _, other = map(manifest_of, both(tmp_path, train))
    lines = start_part_lines(first, other, {"flags.flash": (True, None)})
    assert "unknown" in [x.sameness for x in lines]


def test_an_optimizer_that_is_the_change_has_a_state_of_its_own(tmp_path: Path) -> None:
    first, _, other = map(manifest_of, both(tmp_path, resumes_moments))
    for path in ("flags.optimizer", "optimizer.name", "flags.optimizer.name", "config.optim_type"):
        lines = start_part_lines(first, other, {path: ("Adam", "AdamW")})
        assert all(x.sameness == "same" for x in lines)
    for path in ("flags.optimization_level", "flags.optimizer.lr", "flags.optimizer_steps"):
        lines = start_part_lines(first, other, {path: (1, 2)})
        assert [x.sameness for x in lines] == ["unknown"]


def test_a_start_that_one_run_alone_tells_of_is_unproven(tmp_path: Path) -> None:
    found = recorded(tmp_path, writes_after_the_first_pass, 0)
    assert found.start_parts == {"buffers": {}, "optimizers": {}, "models": {}}
    older = cast("Manifest", SimpleNamespace(resolved={}))
    lines = list(start_part_lines(older, manifest_of(found), {}))
    assert [x.sameness for x in lines] == ["unknown"] * 3
    assert "of one run alone there are hashes" in lines[0].says
    assert not list(start_part_lines(older, older, {}))
    with_moments, _, _ = map(manifest_of, both(tmp_path, resumes_moments))
    for differences in ({}, {"flags.flash": (None, True)}):
        lines = list(start_part_lines(with_moments, older, differences))
        assert [x.sameness for x in lines] == ["unknown"] * 3


def test_what_can_not_be_hashed_is_equal_to_nothing(tmp_path: Path) -> None:
    def train(other: int) -> None:
        model = nn.Linear(3, 4)
        model.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {"of the user's": object()}
        update(model, optimizer)

    first, again, _ = map(manifest_of, both(tmp_path, train))
    assert [x.sameness for x in start_part_lines(first, again, {})] == ["unknown"] * 2


def test_counters_that_a_pass_moves_are_no_other_start(tmp_path: Path) -> None:
    started = [x.start_parts["buffers"] for x in both(tmp_path, loads_after_a_trial_pass)]
    moved = ["1.running_mean", "1.running_var"]
    assert list(started[0]) == ["Sequential.1.num_batches_tracked", *moved]
    assert started[0] == started[2]


RESUMES = """
import sys
from pathlib import Path
import torch
from torch.nn import functional as F
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=float(sys.argv[sys.argv.index("--lr") + 1]))
model(torch.ones(1, 8))  # a trial pass
saved = torch.load(Path(__file__).with_name("last.pt"))  # no argument names it
model.load_state_dict(saved["model"])
optimizer.state.update({x: dict(saved["moments"]) for x in [model.bias]})
data = torch.Generator().manual_seed(1)
for _ in range(2):
    x, y = torch.randn(6, 8, generator=data), torch.randint(0, 4, (6,), generator=data)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_arms_that_resume_from_what_no_argument_names_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def left(weight: float, moment: float) -> None:
        model = {"weight": torch.full((4, 8), weight), "bias": torch.zeros(4)}
        moments = {"exp_avg": torch.full((4,), moment), "exp_avg_sq": torch.ones(4)}
        saved = {"model": model, "moments": {"step": torch.tensor(5.0), **moments}}
        torch.save(saved, tmp_path / "last.pt")

    script = tmp_path / "resumes.py"
    script.write_text(RESUMES)
    study = Recording(tmp_path / "runs", [sys.executable, str(script)])
    left(1.0, 1.0)
    assert study.record("baseline", "--lr", "0.1") == 0
    assert study.record("alike", "--lr", "0.2") == 0
    left(1.0, 2.0)
    assert study.record("moments", "--lr", "0.2") == 0
    left(2.0, 1.0)
    capsys.readouterr()
    assert study.record("weights", "--lr", "0.2") == 1
    assert "hashes.init_weights must be the baseline's" in capsys.readouterr().out
    assert code_of("verify", str(study.folder)) != 0
    said = capsys.readouterr().out.splitlines()
    assert ["alike/seed-0", "holds"] in [x.split()[:2] for x in said]
    assert any(
        x.startswith("moments/seed-0") and "same state of the optimizers at the start" in x
        for x in said
    )
