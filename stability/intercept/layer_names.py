"""The names of a model's modules as its author wrote them, whatever has been wrapped around it.

DDP, FSDP, PEFT, checkpoint wrappers and `torch.compile` each put a module around another, and a
segment into the dotted path of all that is inside. A glob that matched before the model was wrapped
matches after it, and a layer keeps its name in records, since no such segment is in these names.
"""

from collections.abc import Iterator

from torch import nn

__all__ = ["ROOT", "is_parallel_wrapper", "layer_names"]

ROOT = "model"
"""The name of the model itself."""

_INNER = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    # deepspeed, accelerate's parallel wrappers, torch's own averages of weights, Lightning's Fabric
    "DeepSpeedEngine": "module",
    "AveragedModel": "module",
    "_FabricModule": "_forward_module",
    # PEFT: PeftModel holds a tuner, which holds the model; a tuned layer holds the one it tunes
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "BaseTunerLayer": "base_layer",
}
"""What wraps a module, by class or base class, and the child that it wraps."""

_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def is_parallel_wrapper(module: nn.Module) -> bool:
    """Whether it only spreads the module that it wraps over ranks or devices."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return not names.isdisjoint((*_PARALLEL, "DeepSpeedEngine"))


def layer_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return each module of `model` with its dotted path, without the segments of wrappers.

    The model itself, and each wrapper right around it, is called `model`. A module that has several
    places has the name of the first.
    """
    names: dict[nn.Module, str] = {}
    for module, path in _walk(model, (), set()):
        names[module] = ".".join(path) or ROOT
    return names


def _walk(
    module: nn.Module, path: tuple[str, ...], seen: set[nn.Module]
) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    seen.add(module)
    yield module, path
    wrapped = _wrapped(module)
    for name, child in module.named_children():
        if child not in seen:
            yield from _walk(child, path if name == wrapped else (*path, name), seen)


def _wrapped(module: nn.Module) -> str | None:
    """Return the name of the child that `module` wraps, None if it wraps none."""
    for kind in type(module).__mro__:
        name = _INNER.get(kind.__name__)
        if name is not None and isinstance(getattr(module, name, None), nn.Module):
            return name
    return None
