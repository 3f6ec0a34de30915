"""Tells a model that runs eagerly from one of which torch.compile or TorchScript made a graph."""

from torch import nn

__all__ = ["check_eager"]

_GRAPHS = ("OptimizedModule", "RecursiveScriptModule", "ScriptModule", "TopLevelTracedModule")


def check_eager(model: nn.Module) -> None:
    """ValueError if `model` or a part of it runs a graph, which calls attention with no Python in
    between: not a call of it could be caught, or the graph would be another one.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        graph = ""
        if kind in _GRAPHS:
            graph = kind
        elif module._compiled_call_impl is not None:
            graph = f"{kind}.compile()"
        elif hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            graph = f"{kind} with a compiled forward"
        if graph:
            raise ValueError(
                f"shadow: model must run eagerly, got {graph} at {name or 'its root'}: a compiled "
                "graph calls attention with no Python in between; give the model before it is "
                "compiled, and train it so"
            )
