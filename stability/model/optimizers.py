"""The optimizer of a run by its name in the config: AdamW, SGD, Muon, or a class of the user's own.

All of them take the parameters in groups, of which matrices alone decay. Muon updates the matrices
of the blocks, and AdamW what remains: embeddings, biases and scales; its updates are scaled to the
RMS of AdamW's, so that one learning rate serves both. PyTorch's Muon orthogonalises in BF16, in
every precision of the run.

An optimizer's state may be held in a narrower format than the weights: it is rounded to that format
after each update, as if it were stored so, and the update itself is computed as before.

Leaves out the schedule (`lightning_module`).

Sources: Loshchilov and Hutter, arXiv 1711.05101 (AdamW); Jordan et al. 2024, "Muon: an optimizer
for hidden layers in neural networks"; Liu et al., arXiv 2502.16982, section 2.2 (its scale).
"""

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from attention_kernels import Format, round_to
from attention_kernels.formats import format_named
from stability.config.schema import OptimizerConfig
from stability.config.user_functions import import_function

__all__ = ["SideBySide", "build_optimizer", "with_settings_of"]


def build_optimizer(model: nn.Module, chosen: OptimizerConfig) -> Optimizer:
    """Return the optimizer of `model`'s parameters.

    ValueError for a class of the user's own that can't be imported, does not take the groups of
    parameters, `lr` and `chosen.options`, or gives no optimizer.
    """
    if chosen.name == "muon":
        optimizer: Optimizer = _muon_and_adamw(model, chosen)
    elif chosen.name == "sgd":
        groups = _groups(list(model.parameters()), chosen)
        optimizer = SGD(groups, lr=chosen.lr, momentum=chosen.momentum)
    elif chosen.name == "adamw":
        optimizer = _adamw(list(model.parameters()), chosen)
    else:
        optimizer = _own(model, chosen)
    if chosen.state:
        _hold_state(optimizer, format_named(chosen.state))
    return optimizer


def with_settings_of(saved: dict[str, Any], fresh: Optimizer, factor: float) -> dict[str, Any]:
    """Return the saved state of an optimizer with the settings of `fresh`, whose schedule began.

    A restored optimizer takes its settings from the state and not from its constructor, so that a
    run which goes on with another learning rate would go on with the old one. `factor` is the
    schedule's at the step of the state. ValueError if the two hold other groups of parameters.
    """
    was, now = saved["param_groups"], fresh.param_groups
    if [(len(g["params"]), g.keys() - _SCHEDULED) for g in was] != [
        (len(g["params"]), g.keys() - _SCHEDULED) for g in now
    ]:
        raise ValueError("the state is that of another optimizer, whose settings are others")
    groups = []
    for old, new in zip(was, now, strict=True):
        settings = {key: value for key, value in new.items() if key != "params"}
        base = settings.get("initial_lr", settings["lr"])
        groups.append({**old, **settings, "initial_lr": base, "lr": base * factor})
    return {**saved, "param_groups": groups}


_SCHEDULED = {"initial_lr"}
"""What a schedule adds to the settings of a group."""


class SideBySide(Optimizer):
    """Several optimizers of different parameters that step as one; their state is one, too."""

    def __init__(self, *parts: Optimizer) -> None:
        self._parts = parts
        super().__init__(list(chain.from_iterable(part.param_groups for part in parts)), {})
        self._share()

    def _share(self) -> None:
        """Let the parts work on the groups and the state of the whole."""
        begin = 0
        for part in self._parts:
            end = begin + len(part.param_groups)
            part.param_groups = self.param_groups[begin:end]
            part.state = self.state
            begin = end

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step each part in turn; returns what `closure` does, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, which the parts then share."""
        super().load_state_dict(state_dict)
        self._share()


def _groups(parameters: list[nn.Parameter], chosen: OptimizerConfig) -> list[dict[str, Any]]:
    """Return `parameters` as the matrices, which decay, and the others, which do not."""
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": chosen.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _adamw(parameters: list[nn.Parameter], chosen: OptimizerConfig) -> AdamW:
    groups = _groups(parameters, chosen)
    return AdamW(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)


def _muon_and_adamw(model: nn.Module, chosen: OptimizerConfig) -> SideBySide:
    hidden = {m.weight for block in _layers(model) for m in block.modules() if _is_linear(m)}
    muon = Muon(
        [p for p in model.parameters() if p in hidden],
        lr=chosen.lr,
        weight_decay=chosen.weight_decay,
        momentum=chosen.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return SideBySide(muon, _adamw([p for p in model.parameters() if p not in hidden], chosen))


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the longest list in `model`, the outermost of these: its layers."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)]
    longest = max(lists, key=len, default=None)  # of equals the outermost
    if not longest or not any(map(_is_linear, longest.modules())):
        raise ValueError(
            "optimizer.name must not be 'muon' for a model without a ModuleList or ModuleDict of "
            "layers, whose matrices it updates"
        )
    return list(longest.children())


def _is_linear(module: nn.Module) -> bool:
    # by its name: transformers, which has GPT-2's transposed layers, need not be installed
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _own(model: nn.Module, chosen: OptimizerConfig) -> Optimizer:
    own = import_function(chosen.name, "optimizer.name")
    groups = _groups(list(model.parameters()), chosen)
    try:
        inspect.signature(own).bind(groups, lr=chosen.lr, **chosen.options)
        optimizer = own(groups, lr=chosen.lr, **chosen.options)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"optimizer.name must be a class that takes groups of parameters, lr and "
            f"optimizer.options, got {chosen.name!r}; {type(error).__name__}: {error}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer.name must name a torch.optim.Optimizer, got {chosen.name!r}, which gives "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def _hold_state(optimizer: Optimizer, format: Format) -> None:
    """Round the optimizer's state to `format` after each of its steps."""

    @torch.no_grad()
    def round_state(stepped: Optimizer, *_: Any) -> None:
        for parameter in chain.from_iterable(g["params"] for g in stepped.param_groups):
            for value in stepped.state.get(parameter, {}).values():
                # counts of steps have no shape
                if isinstance(value, Tensor) and value.dim() and value.is_floating_point():
                    value.copy_(round_to(value, format))

    optimizer.register_step_post_hook(round_state)
