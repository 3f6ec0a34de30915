"""Names the weights of a training: by the outermost module that owns them, less what wraps it.

A name is the same whether a model is compiled, checkpointed or wrapped for several ranks, so that
the weights of two runs can be compared. Leaves out what is done with them (`training`).
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "buffers_of",
    "cast_of",
    "copies_of",
    "frozen_beside",
    "masters_of",
    "named_masters",
    "named_state",
    "named_weights",
    "one_search",
    "optimized",
    "other_buffers",
    "outermost_modules",
    "owners_of",
    "root_of",
    "state_of",
    "unwrapped",
    "version_of",
    "whole",
    "without_wrappers",
]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of a name that no user has given: of torch.compile, of checkpointing and of FSDP."""

_Found = Tuple[List[nn.Module], List[Optimizer]]

_found: List[_Found] = []
"""What the search in progress has found, if it has."""
_searches = 0
"""How many calls of `one_search` are open."""


@contextmanager
def one_search() -> Iterator[None]:
    """Inside, the process is searched once: no script makes a module or an optimizer meanwhile.

    It takes 0.1 s for each half million of objects.
    """
    global _searches
    _searches += 1
    try:
        yield
    finally:
        _searches -= 1
        if not _searches:
            _found.clear()


def _search() -> _Found:
    """Return the process's modules and optimizers.

    A script's gc.freeze() would hide what it has made, so that is taken back for good: to freeze
    anew what is alive now would keep it alive.
    """
    if _found:
        return _found[0]
    if gc.get_freeze_count():
        gc.unfreeze()
    modules: List[nn.Module] = []
    optimizers: List[Optimizer] = []
    for x in gc.get_objects():
        # by type, since isinstance would wake up proxies that import lazily
        if issubclass(type(x), nn.Module):
            modules.append(x)
        if issubclass(type(x), Optimizer):
            optimizers.append(x)
    if _searches:
        _found.append((modules, optimizers))
    return modules, optimizers


def named_state(weights: Iterable[Tensor]) -> Tuple[Dict[str, Tensor], List[str]]:
    """Return the state that `weights` belong to, by name, and the classes of its outermost modules.

    It holds every parameter that trains and every floating-point buffer that a checkpoint would
    hold, of the modules that own `weights` and of whatever owns those, once each. Where several
    modules have no common owner each name begins with its module's class. A weight that no module
    owns is called `unowned_<n>`, by its place.
    """
    missing = {id(weight): weight for weight in weights}
    places = {key: index for index, key in enumerate(missing)}
    chosen: List[nn.Module] = []
    owners = _outermost(set(missing))
    while missing and owners:
        # the one that owns most of what has no name yet; the first by name where two are equal
        best = max(owners, key=lambda owner: (_count(owner, missing), len(_owned(owner))))
        if not _count(best, missing):
            break
        chosen.append(best)
        owners.remove(best)
        for parameter in best.parameters():
            missing.pop(id(parameter), None)
    state: Dict[str, Tensor] = {}
    prefixes = _prefixes(chosen)
    for module, prefix in zip(chosen, prefixes):  # noqa: B905 Python 3.9 has no strict
        taken = {id(value) for value in state.values()}
        for name, value in _state_of(module):
            if id(value) not in taken:
                state[prefix + name] = value
    state.update({f"unowned_{places[key]}": value for key, value in missing.items()})
    return state, [_class_of(module) for module in chosen]


def root_of(weights: Iterable[Tensor]) -> Optional[nn.Module]:
    """Return the module that owns most of `weights`, the outermost one; None if none owns any."""
    wanted = {id(weight): weight for weight in weights}
    owners = _outermost(set(wanted))
    return max(owners, key=lambda owner: (_count(owner, wanted), len(_owned(owner))), default=None)


def state_of(module: nn.Module) -> Tuple[Dict[str, Tensor], List[str]]:
    """Return the state of one module by name, as `named_state`, and the name of its class."""
    return dict(_state_of(module)), [_class_of(module)]


def owners_of(state: Dict[str, Tensor]) -> List[nn.Module]:
    """Return the outermost modules that own parameters of `state`."""
    return _outermost({id(x) for x in state.values()})


def frozen_beside(
    state: Dict[str, Tensor], owners: Optional[List[nn.Module]] = None
) -> Dict[str, Tensor]:
    """Return the parameters that do not train of the modules that own those of `state`, by name.

    `owners` are these modules, if they are known already: to find them takes a while.
    """
    owners = owners_of(state) if owners is None else owners
    return {
        f"{_class_of(owner)}.{name}": x
        for owner in owners
        for name, x in named_weights(owner)
        if not x.requires_grad
    }


def buffers_of(state: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Return what of `state` no optimizer updates, by name: buffers in floating point."""
    masters = masters_of(state)
    return {
        name: x
        for name, x in state.items()
        if not (isinstance(x, nn.Parameter) or x.requires_grad or name in masters)
    }


def other_buffers(state: Dict[str, Tensor], owners: List[nn.Module]) -> Dict[str, Tensor]:
    """Return the buffers of `owners` that are not in `state`, by name.

    As masks and counters, and what no checkpoint would hold.
    """
    known = {id(x) for x in state.values()}
    found = {}
    for owner in owners:
        inner = unwrapped(owner)
        renamed = _renames(inner)
        for name, x in inner.named_buffers():
            if id(x) not in known:
                found[f"{_class_of(owner)}.{renamed(name)}"] = x
    return found


def copies_of(name: str, weight: Tensor) -> List[Tensor]:
    """Return the parameters of other modules that are called `name` and have the bits of `weight`.

    As those of a moving average's copy, before the first update.
    """
    found = {}
    for module in _modules():
        for own, other in named_weights(module):
            is_alike = other.shape == weight.shape and other.dtype == weight.dtype
            if own == name and other is not weight and is_alike:
                found[id(other)] = other
    return [
        other for other in found.values() if type(other) is type(weight) and other.equal(weight)
    ]


def named_masters(weights: Iterable[Tensor]) -> Dict[str, Tensor]:
    """Return those of an optimizer's `weights` that no module can own, named as `named_state` does.

    As the FP32 masters of a model in BF16.
    """
    places = enumerate(weights)
    return {f"unowned_{place}": x for place, x in places if not isinstance(x, nn.Parameter)}


def masters_of(state: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Return what of `state` optimizers update although it is no parameter of a module."""
    owned = optimized()
    masters = {name: x for name, x in state.items() if not isinstance(x, nn.Parameter)}
    return {name: x for name, x in masters.items() if id(x) in owned}


def optimized() -> Set[int]:
    """Return the identities of what optimizers update."""
    groups = (group for x in _search()[1] for group in vars(x).get("param_groups", ()))
    return {id(weight) for group in groups for weight in group["params"]}


def outermost_modules() -> List[nn.Module]:
    """Return the modules that no other module holds, in an order of their own."""
    found = _without_owner(_modules())
    return sorted(found, key=lambda module: (type(module).__name__, -len(_owned(module))))


def cast_of(master: Tensor, taken: Set[int]) -> List[Tensor]:
    """Return the parameter that holds `master` in a dtype of its own, and that one's copies.

    Nothing if no parameter does, before the first update. Of several that are equal it is the first
    that is not in `taken`, the places in memory of those that other masters have.
    """
    for module in _without_owner(_modules()):
        for name, weight in named_weights(module):
            if id(weight) not in taken and _holds(weight, master):
                return [weight, *copies_of(name, weight)]
    return []


def _holds(weight: Tensor, master: Tensor) -> bool:
    """Whether `weight` is `master` in another dtype, spread over ranks alike."""
    is_sharded = [hasattr(x, "full_tensor") for x in (weight, master)]
    is_like = weight.shape == master.shape and weight.device == master.device
    if not is_like or weight.dtype == master.dtype or is_sharded[0] != is_sharded[1]:
        return False
    return weight.detach().equal(master.detach().to(weight.dtype))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what a wrapper holds: a compiled, checkpointed or distributed module's own one."""
    while True:
        children = dict(module.named_children())
        own = list(module.named_parameters(recurse=False)) or len(children) != 1
        name = next(iter(children), "")
        if own or (name != "module" and name not in _WRAPPERS):
            return module
        module = children[name]


def _class_of(module: nn.Module) -> str:
    """Return the name of the user's class; FSDP2 puts one of its own before it."""
    own = type(unwrapped(module))
    bases = [base.__name__ for base in own.__bases__]
    return bases[1] if bases[:1] == ["FSDPModule"] and bases[1:] else own.__name__


def _outermost(weights: Set[int]) -> List[nn.Module]:
    """Return the modules that own one of `weights` and that no other module holds."""
    return [x for x in outermost_modules() if weights.intersection(_owned(x))]


def _without_owner(modules: List[nn.Module]) -> List[nn.Module]:
    held = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in held]


def _modules() -> List[nn.Module]:
    return [x for x in _search()[0] if "_modules" in vars(x)]


def _owned(module: nn.Module) -> List[int]:
    return [id(parameter) for parameter in module.parameters()]


def _count(module: nn.Module, weights: Dict[int, Tensor]) -> int:
    return sum(key in weights for key in _owned(module))


def _prefixes(modules: List[nn.Module]) -> List[str]:
    if len(modules) < 2:
        return [""] * len(modules)
    classes = [_class_of(module) for module in modules]
    return [
        f"{name}." if classes.count(name) == 1 else f"{name}_{classes[:index].count(name)}."
        for index, name in enumerate(classes)
    ]


def _state_of(module: nn.Module) -> List[Tuple[str, Tensor]]:
    inner = unwrapped(module)
    renamed = _renames(inner)
    found: List[Tuple[str, Tensor]] = []
    found += [(name, x) for name, x in named_weights(module) if x.requires_grad]
    for place, owner in inner.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            is_kept = name not in owner._non_persistent_buffers_set
            if is_kept and buffer.is_floating_point():
                found.append((renamed(f"{place}.{name}" if place else name), buffer))
    return found


def named_weights(module: nn.Module) -> List[Tuple[str, nn.Parameter]]:
    """Return a module's parameters by name, less what wraps it or a module in it."""
    inner = unwrapped(module)
    renamed = _renames(inner)
    return [(renamed(name), x) for name, x in inner.named_parameters()]


def _renames(inner: nn.Module) -> Callable[[str], str]:
    """Return what takes out of a name in `inner` all that no user has put there."""
    held = [
        f"{place}.module."
        for place, x in inner.named_modules()
        if isinstance(x, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    ]

    def renamed(name: str) -> str:
        for begin in held:
            if name.startswith(begin):
                name = begin[: -len("module.")] + name[len(begin) :]
        return without_wrappers(name)

    return renamed


def without_wrappers(name: str) -> str:
    """Return a weight's name less what wraps its module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def whole(x: Tensor) -> Tensor:
    """Return all of a tensor, of which this rank may hold a part: every rank must ask."""
    gather = getattr(x, "full_tensor", None)
    return (gather() if gather else x).detach()


def version_of(x: Tensor) -> int:
    """Return how often a tensor was written in place; 0 of one that torch does not count for."""
    return 0 if x.is_inference() else x._version
