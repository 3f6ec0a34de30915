"""A check of an attention on a GPU: its inputs are moved there, and what it returns comes back.

What is right (`cells`) is computed on the CPU whatever the device, so that an attention is held to
the same numbers everywhere; the attention alone is called on the device. Leaves out the calls
themselves (`calls`).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_kernels.testing.laws import Inputs

__all__ = ["CPU", "called_on", "device_name", "inputs_on", "usable_device", "wait_for"]

CPU = torch.device("cpu")
"""Where the references are."""


def usable_device(device: torch.device | str) -> torch.device:
    """Return the device, with the number it has among its kind.

    ValueError for one that can't be computed on here, with the reason that torch gives.
    """
    try:
        if torch.device(device).type == "meta":
            raise ValueError("tensors there have no values")
        wanted = torch.ones(1, device=device).device
        wait_for(wanted)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"device must be one that this machine computes on, got {str(device)!r}: {reason}"
        ) from None
    return wanted


def device_name(device: torch.device) -> str:
    """Return what a reader calls the device: "CPU", or the model of a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(device).upper()


def inputs_on(device: torch.device, inputs: Inputs) -> Inputs:
    """Return the inputs on `device`, with the same strides; the very same where they are there."""
    return Inputs(*(_moved(x, device) for x in inputs))


def _moved(x: Tensor, device: torch.device) -> Tensor:
    if x.device == device:
        return x
    # Tensor.to makes an expanded tensor contiguous, and kernels have failed at a stride of 0
    flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return flat.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def wait_for(device: torch.device) -> None:
    """Return once all that was launched there has run; what went wrong in it is raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def called_on(device: torch.device, attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return `attention` for arguments on the CPU, computed on `device`, gradients as well.

    It has the name and the signature of `attention`.
    """
    if device == CPU:
        return attention

    def there(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    def here(x: Any) -> Any:
        return x.to(CPU) if isinstance(x, Tensor) else x

    @functools.wraps(getattr(attention, "forward", attention))
    def moved(*inputs: Any, **options: Any) -> Any:
        named = {name: there(x) for name, x in options.items()}
        returned = attention(*(there(x) for x in inputs), **named)
        if isinstance(returned, tuple | list):
            return tuple(here(x) for x in returned)
        return here(returned)

    return moved
