"""A model's forward as torch.compile makes it, by the backend and options that a config names."""

from typing import Any

import torch
from torch._dynamo.exc import InvalidBackend

from stability.config.convert import nearest
from stability.config.schema import TrainConfig

__all__ = ["compiled"]


def compiled(function: Any, train: TrainConfig) -> Any:
    """Return `function` compiled.

    ValueError for an unknown backend, which names the nearest, and for options that it refuses.
    """
    options = dict(train.compile_options)
    mode = options.pop("mode", None)
    try:
        return torch.compile(function, backend=train.compile, mode=mode, options=options or None)
    except InvalidBackend as error:
        known = torch.compiler.list_backends(())  # those for debugging as well
        raise ValueError(
            f"train.compile must be a backend of torch.compile, got {train.compile!r}; nearest: "
            f"{nearest(train.compile, known)}"
        ) from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"train.compile_options must be those of {train.compile}, got "
            f"{train.compile_options!r}; {error}"
        ) from error
