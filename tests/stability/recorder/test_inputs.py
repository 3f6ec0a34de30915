"""What a model is given that no hash can be made of is told, and stops no training."""

import enum
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stability.recorder.inside import recorded as recorded_process
from stability.recorder.inside.hooks import install
from stability.recorder.inside.recorded import start_of
from stability.recorder.inside.spool import Spool
from stability.recorder.inside.training import Training
from stability.recorder.spooled import Spooled, read_spool


class Graph(SimpleNamespace):
    """As PyTorch Geometric's `Data`: an object that holds tensors, and can be called."""

    x: torch.Tensor

    def __call__(self, *keys: str) -> Iterator[Any]:
        """Give what it has of these names."""
        return (getattr(self, key) for key in keys)


class Task(enum.Enum):
    """What a model is asked for."""

    ADD = "add"
    NEGATE = "negate"


class Model(nn.Module):
    """Takes anything, and computes with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, given: Any, task: Any = None) -> torch.Tensor:
        """Return the layer's result for a graph or a tensor."""
        if isinstance(given, torch.Tensor) and given.is_quantized:
            return self.layer(given.dequantize())
        if isinstance(given, torch.Tensor):
            return self.layer(given).values() if given.is_nested else self.layer(given)
        return self.layer(given.x) * (-1 if task is Task.NEGATE else 1)


def recorded(folder: Path, *given: Any) -> Spooled:
    """Return what is recorded of a training whose model gets `given` in each of two updates."""
    training = Training(Spool(str(folder), 0), begin=lambda x: start_of(x, {}, 0, {}))
    uninstall = install(training)
    try:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(*given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        training.end("exit")
    finally:
        uninstall()
    return read_spool(folder)


@pytest.fixture(autouse=True)
def _of_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is told of the test's own process: all its sources would be hashed."""
    monkeypatch.setattr(recorded_process, "own_modules", dict)
    monkeypatch.setattr(recorded_process, "environment", lambda switches: {})


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, torch.quint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Graph(x=torch.ones(4, 3)), "a Graph"),
        (quantized, "a tensor of layout quantized"),
        (nested, "a tensor of layout nested"),
    ],
)
def test_what_can_not_be_hashed_is_told(make: Callable[[], Any], told: str, tmp_path: Path) -> None:
    found = recorded(tmp_path, make())
    assert found.step == 2
    assert any(told in each for each in found.untold), found.untold


@pytest.mark.filterwarnings("ignore")
def test_a_nested_tensor_of_the_older_layout_stops_nothing(tmp_path: Path) -> None:
    class Padded(Model):
        def forward(self, given: Any, task: Any = None) -> torch.Tensor:
            return self.layer(torch.nested.to_padded_tensor(given, 0.0))

    older = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    training = Training(Spool(str(tmp_path), 0), begin=lambda x: start_of(x, {}, 0, {}))
    uninstall = install(training)
    try:
        model = Padded()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(older).square().mean().backward()
        optimizer.step()
        training.end("exit")
    finally:
        uninstall()
    found = read_spool(tmp_path)
    assert any("a tensor of layout nested" in each for each in found.untold), found.untold


def test_a_container_that_holds_itself_is_read_once(tmp_path: Path) -> None:
    """A model's arguments or result may; what it holds beside itself is hashed as without."""
    batches = []
    for folder, is_cyclic in (("cyclic", True), ("plain", False)):
        (tmp_path / folder).mkdir()
        given: dict[str, Any] = {"x": torch.ones(4, 3), "rows": [1, 2, 3, 4]}
        if is_cyclic:
            given["again"] = [given]

        class Keyed(Model):
            def forward(self, given: Any, task: Any = None) -> Any:
                return {"out": super().forward(given["x"]), "given": given}

        training = Training(
            Spool(str(tmp_path / folder), 0), begin=lambda x: start_of(x, {}, 0, {})
        )
        uninstall = install(training)
        try:
            torch.manual_seed(0)
            model = Keyed()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(given)["out"].square().mean().backward()
            optimizer.step()
            training.end("exit")
        finally:
            uninstall()
        batches.append([update.batch for update in read_spool(tmp_path / folder).updates])
    assert batches[0] == batches[1]
    assert batches[0][0]


def test_a_member_of_an_enum_is_part_of_what_is_given(tmp_path: Path) -> None:
    batches = []
    for place, task in enumerate([Task.ADD, Task.NEGATE, Task.ADD]):
        (tmp_path / str(place)).mkdir()
        found = recorded(tmp_path / str(place), torch.ones(4, 3), task)
        assert not found.untold
        batches.append([update.batch for update in found.updates])
    assert batches[0] == batches[2]
    assert batches[0] != batches[1]


@pytest.mark.parametrize("setting", [torch.relu, functools.partial(torch.add, 1), nn.ReLU(), len])
def test_a_function_is_no_data(setting: Any, tmp_path: Path) -> None:
    found = recorded(tmp_path, torch.ones(4, 3), setting)
    assert not found.untold


class Loss:
    """A loss that was made for its labels."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.labels = labels

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return nn.functional.cross_entropy(logits, self.labels)


def around(labels: Any) -> Callable[..., Any]:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, labels) if logits.dim() else loss(logits)

    return loss


@pytest.mark.parametrize(
    "made_for",
    [
        lambda labels: functools.partial(nn.functional.cross_entropy, target=labels),
        lambda labels: functools.partial(nn.functional.cross_entropy, labels),
        lambda labels: functools.partial(around(labels)),
        lambda labels: lambda logits, y=labels: y,
        lambda labels: lambda logits, *, y=labels: y,
        around,
        lambda labels: Loss(labels).of,
        lambda labels: around(labels.tolist()),
    ],
)
def test_labels_that_a_function_holds_are_part_of_what_is_given(
    made_for: Callable[[torch.Tensor], Any], tmp_path: Path
) -> None:
    batches = []
    for place, other in enumerate([0, 0, 1]):
        folder = tmp_path / str(place)
        folder.mkdir()
        labels = torch.arange(4) % 2 + other
        found = recorded(folder, torch.ones(4, 3), made_for(labels))
        assert not found.untold
        batches.append([update.batch for update in found.updates])
    assert batches[0] == batches[1]
    assert batches[0] != batches[2]


def test_an_object_in_a_function_is_told(tmp_path: Path) -> None:
    found = recorded(tmp_path, torch.ones(4, 3), around(object()))
    assert any("labels in argument 1, a object" in each for each in found.untold), found.untold
    (tmp_path / "inner").mkdir()
    inner = recorded(tmp_path / "inner", torch.ones(4, 3), around(around(torch.ones(4))))
    assert any("given to Model" in each for each in inner.untold), inner.untold
