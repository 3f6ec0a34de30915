"""One captured call of a module or a function, and how it is repeated outside of the run.

A repeat computes on copies: inputs, parameters and buffers are leaves of a graph of its own, in the
dtype they have or in FP64, in a replica of the module, so that whatever it does to them, or to its
attributes, does not reach the run. A replica has no hooks: a user's own would run again. Results
and gradients have names: `out`, `dx` for the only input or `d<argument>` for each of several, and
`d<parameter>`. Leaves out who repeats (`module_candidates`), what is measured (`module_probe`) and
how calls are caught (`intercept.module_calls`).
"""

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stability.probe.captured_call import version_of
from stability.probe.double_precision import InDouble
from stability.probe.isolation import isolated
from stability.probe.kept_state import Copies
from stability.probe.repeated_call import BadResultError

__all__ = [
    "ModuleCall",
    "autocast_now",
    "forward_of",
    "named_tensors",
    "repeat",
    "repeat_in_double",
    "replica_of",
]

Renewed = Callable[[Tensor], Tensor]


@dataclasses.dataclass(kw_only=True)
class ModuleCall:
    """A call as it was made; `own(module, *args, **kwargs)` makes it again.

    `module` is a replica with the buffers as they were before the call, None for a function, which
    is then called as `own(*args, **kwargs)`. `autocast` is the dtype of the caller's, None if off.
    Tensors share memory with the run's own.
    """

    layer: str
    module: nn.Module | None
    own: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    """The floating-point tensors among the arguments, by name."""
    trained: frozenset[str]
    """The inputs that have a gradient."""
    out: Mapping[str, Tensor]
    """What came out, detached."""
    device: torch.device
    autocast: torch.dtype | None
    versions: Sequence[tuple[Tensor, int]]

    @classmethod
    def of(
        cls,
        layer: str,
        module: nn.Module | None,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Mapping[str, Tensor],
        *,
        named_by: Callable[..., Any],
        autocast: torch.dtype | None,
    ) -> "ModuleCall":
        """Capture a call that has just been made and has given `out`.

        `named_by` is the function whose arguments give the inputs their names.
        """
        found = _named_inputs(named_by, args, kwargs)
        detached = Copies(lambda x: x.detach())
        args, kwargs = detached.of((args, dict(kwargs)))
        tensors = [x for x in detached.made.values() if isinstance(x, Tensor)]
        results = {name: x.detach() for name, x in out.items()}
        device = _device_of(*found.values(), *out.values())
        return cls(
            layer=layer,
            module=module,
            own=own,
            args=args,
            kwargs=kwargs,
            inputs={name: detached.of(x) for name, x in found.items()},
            trained=frozenset(name for name, x in found.items() if x.requires_grad),
            out=results,
            device=device,
            autocast=autocast,
            versions=[(x, version_of(x)) for x in (*tensors, *results.values())],
        )

    def was_overwritten(self) -> bool:
        """Whether the run has written into one of the tensors since the call."""
        return any(version_of(x) != version for x, version in self.versions)


def autocast_now(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """Return the dtype of the autocast that is on for such tensors, None if it is off."""
    device = _device_of(*tensors).type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _device_of(*tensors: Tensor) -> torch.device:
    return next((x.device for x in tensors), torch.device("cpu"))


def named_tensors(value: Any, name: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors in `value` by name, and the kinds of what holds something else.

    A tensor alone has the name itself; parts of lists, tuples, mappings and dataclasses have their
    place or key behind it: `out_0`. None and plain values are no loss.
    """
    found: dict[str, Tensor] = {}
    others: list[str] = []
    for path, part in _parts(value, name):
        if isinstance(part, Tensor):
            found[path] = part
        elif part is not None and not isinstance(part, int | float | complex | str | bytes):
            others.append(f"{path}, a {type(part).__name__}")
    return found, others


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        yield name, value
        return
    for key, part in items:
        yield from _parts(part, f"{name}_{str(key).replace('/', '_')}")


def _named_inputs(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the floating-point tensors that a call is given, once each, by argument."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # it does not tell what its arguments are called
        given = {**{f"input_{i}": x for i, x in enumerate(args)}, **kwargs}
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for argument, value in given.items():
        for name, x in named_tensors(value, argument)[0].items():
            if x.is_floating_point() and id(x) not in seen:
                seen.add(id(x))
                named[name] = x
    return dict(zip(["x"], named.values(), strict=True)) if len(named) == 1 else named


def forward_of(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module without its own hooks."""
    return module.forward(*args, **kwargs)


def replica_of(module: nn.Module, renewed: Renewed, buffer: Renewed) -> nn.Module:
    """Return a module like `module`, of the same kinds and attributes, with tensors of its own.

    Each parameter is `renewed`, each other tensor what `buffer` makes of it, wherever the module
    holds it (`kept_state`), so that none of the module's is changed; what is shared stays shared.
    """
    copies = Copies(lambda x: renewed(x) if isinstance(x, nn.Parameter) else buffer(x))
    parts = list(module.modules())
    # first: a list or an attribute may hold one that is registered elsewhere
    # by object's own: that of a module that FSDP shards makes one anew, with __init__
    copies.made.update({id(one): object.__new__(type(one)) for one in parts})
    for one in parts:
        hooks = {name: OrderedDict() for name in vars(one) if name.endswith("_hooks")}
        held = {name: x for name, x in vars(one).items() if name not in hooks}
        replica = copies.made[id(one)]
        vars(replica).update(hooks | {name: copies.of(x) for name, x in held.items()})
    return copies.made[id(module)]


def repeat(
    call: ModuleCall,
    function: Callable[..., Any],
    douts: Mapping[str, Tensor] | None = None,
    *,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the results of `function` on the inputs of `call`, with `douts` its gradients too.

    It is called as `call.own` is, under the autocast of the call, or with `dtype` outside of any
    and on inputs of that dtype. Forward and backward run in the context `within`. BadResultError if
    results differ from the call's in number or shape, or nothing of them carries a gradient.
    """
    leaves: dict[int, Tensor] = {}

    def copied(x: Tensor) -> Tensor:
        return x.detach().clone().to(dtype if dtype and x.is_floating_point() else x.dtype)

    def leaf(x: Tensor) -> Tensor:
        return nn.Parameter(copied(x), requires_grad=x.requires_grad and bool(douts))

    for name, x in call.inputs.items():
        leaves[id(x)] = copied(x).requires_grad_(bool(douts) and name in call.trained)

    given = Copies(copied)
    given.made.update(leaves)
    args, kwargs = given.of((call.args, dict(call.kwargs)))
    module = None if call.module is None else replica_of(call.module, leaf, copied)
    cast = None if dtype else call.autocast
    autocast = torch.autocast(
        call.device.type, dtype=cast, enabled=cast is not None, cache_enabled=False
    )
    with isolated(call.device), torch.set_grad_enabled(bool(douts)), within():
        with autocast:
            result = function(*(() if module is None else (module,)), *args, **kwargs)
        out, _ = named_tensors(result, "out")
        _check(out, call, dtype)
        found = {name: x.detach() for name, x in out.items() if x.is_floating_point()}
        if douts:
            wanted = {f"d{name}": leaves[id(x)] for name, x in call.inputs.items()}
            parameters = [] if module is None else module.named_parameters()
            wanted |= {f"d{name}": x for name, x in parameters}
            found |= _gradients(
                out, {name: x for name, x in wanted.items() if x.requires_grad}, douts
            )
    return found


def repeat_in_double(
    call: ModuleCall, douts: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return what `repeat` does for the module's own code in FP64 throughout."""
    wide = None if douts is None else {name: x.double() for name, x in douts.items()}
    found = repeat(call, call.own, wide, within=InDouble, dtype=torch.float64)
    narrow = [f"{name} in {x.dtype}" for name, x in found.items() if x.dtype != torch.float64]
    if narrow:
        raise BadResultError(f"its own code gives {narrow[0]} where all it is given is FP64")
    return found


def _gradients(
    out: Mapping[str, Tensor], wanted: Mapping[str, Tensor], douts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    results = [out[name] for name in douts]
    if not wanted:
        return {}
    if not any(x.requires_grad for x in results):
        raise BadResultError("out carries no gradient")
    pairs = [(x, douts[name]) for x, name in zip(results, douts, strict=True) if x.requires_grad]
    # copies of the gradients: the run's own backward goes on with them
    found = torch.autograd.grad(
        [x for x, _ in pairs],
        list(wanted.values()),
        [dout.detach().clone() for _, dout in pairs],
        allow_unused=True,
    )
    named = zip(wanted, found, strict=True)
    return {name: x.detach() for name, x in named if x is not None}


def _check(out: Mapping[str, Tensor], call: ModuleCall, dtype: torch.dtype | None) -> None:
    if list(out) != list(call.out):
        expected = ", ".join(call.out)
        raise BadResultError(f"returned {', '.join(out) or 'no tensor'}, expected {expected}")
    for name, x in out.items():
        own = call.out[name]
        same = x.dtype == own.dtype or dtype is not None
        if x.shape != own.shape or not same:
            raise BadResultError(
                f"returned {name} {tuple(x.shape)} {x.dtype}, expected {tuple(own.shape)} "
                f"{own.dtype}"
            )
