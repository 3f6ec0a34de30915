"""What a call may change beside its results: the settings and random numbers of the process.

A kernel that seeds the generator anew, or leaves gradients switched off, gives right results and
spoils the training around it.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attention_kernels.testing.devices import CPU

__all__ = ["side_effects"]


def _matmul_precision() -> tuple[str, ...]:
    """Return the older, global setting, "" where torch refuses to tell it, and each backend's.

    It refuses where a backend's own was set to something else, as PyTorch advises today.
    """
    try:
        overall = torch.get_float32_matmul_precision()
    except RuntimeError:
        overall = ""
    return overall, *(each.fp32_precision for each in _matmuls())


def _set_matmul_precision(settings: tuple[str, ...]) -> None:
    overall, *own = settings
    if overall:
        torch.set_float32_matmul_precision(overall)
    for each, precision in zip(_matmuls(), own, strict=True):
        each.fp32_precision = precision


def _matmuls() -> tuple[Any, ...]:
    # torch adds this attribute at run time, out of pyright's sight.
    return (
        torch.backends.cuda.matmul,
        torch.backends.mkldnn.matmul,  # pyright: ignore[reportAttributeAccessIssue]
    )


def _set_default_device(device: torch.device) -> None:
    # A call puts its device on top of the check's own `with torch.device`, whose end would take
    # that one off and leave torch with a mode it believes to be on: so the call's goes first.
    torch.set_default_device(None)
    if torch.get_default_device() != device:
        torch.set_default_device(device)


_Setting: TypeAlias = tuple[str, Callable[[], Any], Callable[[Any], Any]]

_SETTINGS: tuple[_Setting, ...] = (
    ("torch's random numbers", torch.get_rng_state, torch.set_rng_state),
    ("Python's random numbers", random.getstate, random.setstate),
    ("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the precision of FP32 matrix products", _matmul_precision, _set_matmul_precision),
    (
        "whether algorithms must be deterministic",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    (
        "autocast",
        partial(torch.is_autocast_enabled, "cpu"),
        partial(torch.set_autocast_enabled, "cpu"),
    ),
    ("the detection of anomalies", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    ("the default device", torch.get_default_device, _set_default_device),
)


def _settings_of(device: torch.device) -> tuple[_Setting, ...]:
    """Return what a GPU has of its own."""
    if device.type != "cuda":
        return ()
    get, put = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    enabled, enable = torch.is_autocast_enabled, torch.set_autocast_enabled
    return (
        ("the GPU's random numbers", partial(get, device), lambda old: put(old, device)),
        ("the GPU's autocast", partial(enabled, "cuda"), partial(enable, "cuda")),
    )


@contextmanager
def side_effects(device: torch.device = CPU) -> Iterator[list[str]]:
    """Yield a list that holds, after the context, what was changed in it and has been put back."""
    changed: list[str] = []
    settings = (*_SETTINGS, *_settings_of(device))
    before = [get() for _, get, _ in settings]
    try:
        yield changed
    finally:
        for (name, get, put), old in zip(settings, before, strict=True):
            new = get()
            same = torch.equal(old, new) if isinstance(old, Tensor) else old == new
            if not same:
                changed.append(name)
                put(old)
