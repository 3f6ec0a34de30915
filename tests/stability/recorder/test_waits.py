"""Recording lets a device run ahead: nothing waits for it inside of a forward or a backward."""

from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.stability.recorder.test_several_losses import recorded

_WAITING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_to_copy"}
"""What needs the values: on a GPU the host waits for them."""


class _Waits(TorchDispatchMode):
    """Lists the operators called under it that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name != "_to_copy" or "device" in (kwargs or {}):
            self.names += [name] * (name in _WAITING)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_between_an_updates_first_forward_and_its_step(
    tmp_path: Path,
) -> None:
    accumulated, watched = 3, {"passes": _Waits(), "steps": _Waits()}

    def train() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # Adam reads its own step
        for step in range(4):
            for micro in range(accumulated):
                # a row ends with the next forward, and waits there
                of_row = step == 0 or micro == 0
                with _Waits() if of_row else watched["passes"]:
                    loss = model(torch.randn(5, 4)).square().mean() / accumulated
                    loss.backward()
            with watched["steps"] if step else _Waits():
                optimizer.step()
            optimizer.zero_grad()

    updates = recorded(tmp_path, train).updates
    assert watched["passes"].names == watched["steps"].names == []
    assert [update.samples for update in updates] == [5 * accumulated] * 4
