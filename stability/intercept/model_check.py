"""What `shadow` refuses of a model before it runs, and what it says if nothing could be caught."""

from collections.abc import Sequence

from torch import nn

from stability.intercept.coverage import LayerCoverage
from stability.intercept.eager import check_eager, check_unscripted
from stability.intercept.transformers import check_transformers, is_transformers_model

__all__ = ["check_model", "nothing_caught"]

_HINT = (
    "\nCompiled code has run: calls are seen there in graphs of Inductor that were compiled inside "
    "`with shadow(...)`; to compile one again, call torch.compiler.reset() before the first step"
)
_SHOWN = 12
"""The most modules or classes that a message names."""


def check_model(model: nn.Module, *, compiled: bool, attends: bool = True) -> None:
    """ValueError if the attention of `model` cannot be caught, or drops values at random: a shadow
    would drop other values than the model does. With `compiled` parts of it may be compiled;
    without `attends` its attention is not looked at.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"shadow: model must be a torch.nn.Module, got {type(model).__name__}; "
            "functions can be given to a DualAttention"
        )
    check_unscripted(model) if compiled else check_eager(model)
    if not attends:
        return
    if is_transformers_model(model):
        check_transformers(model)
        return
    for name, module in model.named_modules():
        dropout = _attention_dropout(module)
        if dropout and module.training:
            raise ValueError(
                f"shadow: attention dropout must be 0, got {dropout:g} in {name or 'the model'} "
                f"({type(module).__name__}); a shadow would drop other values"
            )


def _attention_dropout(module: nn.Module) -> float:
    """Return the rate with which an attention module drops probabilities, 0 if it has none.

    Transformer Engine's are told call by call: its layers drop by default, others may lie beside.
    """
    kind = type(module)
    if "attention" not in kind.__name__.lower() or kind.__module__.startswith("transformer_engine"):
        return 0.0
    for name in ("dropout", "dropout_p", "attn_dropout", "attention_dropout", "attn_pdrop"):
        value = getattr(module, name, None)
        rate = getattr(value, "p", value)
        if isinstance(rate, float) and name in ("attn_dropout", "attention_dropout", "attn_pdrop"):
            return rate
        if isinstance(value, float):  # a Dropout module of this name may follow the projection
            return value
    return 0.0


def nothing_caught(model: nn.Module, coverage: Sequence[LayerCoverage], *, compiled: bool) -> str:
    """Return the message for a model in which no attention call was caught.

    `compiled` says that some of it may have run in compiled code.
    """
    hint = _HINT if compiled else ""
    if coverage:
        listed = "".join(f"\n  {one.layer}: {one}" for one in coverage[:_SHOWN])
        more = f"\n  and {len(coverage) - _SHOWN} more" if len(coverage) > _SHOWN else ""
        return f"shadow: no attention of {type(model).__name__} is seen:{listed}{more}{hint}"
    kinds = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
    shown = ", ".join(kinds[:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
    return (
        f"shadow: {type(model).__name__} has no attention that could be seen in a step: no call of "
        f"it, and no softmax that multiplies a matrix; module classes seen: {shown}{hint}"
    )
