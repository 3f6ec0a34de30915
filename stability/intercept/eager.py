"""Tells a model that runs eagerly from one of which torch.compile or TorchScript made a graph."""

from collections.abc import Iterator

from torch import nn

__all__ = ["check_eager", "check_unscripted"]

_SCRIPTS = ("RecursiveScriptModule", "ScriptModule", "TopLevelTracedModule")


def check_unscripted(model: nn.Module) -> None:
    """ValueError if `model` or a part of it is a script: not a call of it could be caught."""
    for name, module in model.named_modules():
        if type(module).__name__ in _SCRIPTS:
            raise ValueError(
                f"shadow: model must be Python, got {type(module).__name__} at "
                f"{name or 'its root'}: TorchScript calls attention with no Python in between; "
                "give the model before it is scripted, and train it so"
            )


def check_eager(model: nn.Module) -> None:
    """ValueError if `model` or a part of it runs a graph: what computes its attention could not be
    replaced, or the graph would be another one.
    """
    check_unscripted(model)
    for name, graph in _compiled(model):
        raise ValueError(
            "shadow: model must run eagerly where replace, inherited, gradient_every or modules is "
            f"given, got {graph} at {name or 'its root'}: of a compiled graph the attention calls "
            "alone can be compared, and none be made by another; give the model before it is "
            "compiled, and train it so"
        )


def _compiled(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path of each compiled part, and what it is."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "OptimizedModule":
            yield name, kind
        elif module._compiled_call_impl is not None:
            yield name, f"{kind}.compile()"
        elif hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            yield name, f"{kind} with a compiled forward"
