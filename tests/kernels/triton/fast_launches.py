"""What the fast path hands to Triton on a GPU, without one: its launches are caught, and none runs.

Results are what `torch.empty` gives. So that tensors on the CPU are launched as those on a GPU are,
they stay in their dtype and have the tiles of another architecture.
"""

import contextlib
from typing import Any, NamedTuple
from unittest import mock

import torch

from attention_kernels import PROFILES
from attention_kernels.masks import Mask
from attention_kernels.triton import fast_launch

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}


class Launch(NamedTuple):
    """One kernel with what it is launched with; `constants` are its last argument."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: Any
    stages: tuple[int, ...]


@contextlib.contextmanager
def caught(arch):
    """Give the list that launches on a GPU of compute capability `arch` are added to."""
    launches = []

    def catch(kernel, programs, arguments, constants, *, device, warps, stages):
        launches.append(Launch(kernel, programs, arguments, constants, stages))

    with mock.patch.multiple(
        fast_launch,
        run=catch,
        architecture=lambda device: arch,
        kernel_inputs=lambda work, *tensors: list(tensors),
    ):
        yield launches


def launches_of(arch, q, k, v, mask=None, scale=0.1):
    """What forward and backward of a call launch."""
    call = {"mask": mask or Mask(), "scale": scale, "numerics": PROFILES["fa2"].resolve(q.dtype)}
    with caught(arch) as launches:
        out, lse = fast_launch.forward(q, k, v, **call)
        fast_launch.backward(torch.empty_like(out), q, k, v, out, lse, **call)
    return launches


def signature_of_launch(launch):
    """Return the types of a kernel's arguments and its constants, as `ahead.signature_of` does.

    Strides are those of any tensor, whole numbers any of 32 bits.
    """
    signature, constants = {}, {}
    names = [parameter.name for parameter in launch.kernel.params]
    assert names[-1] == "N", "the constants are the last"
    for index, (name, value) in enumerate(zip(names[:-1], launch.arguments, strict=True)):
        signature[name] = _kind_of(value)
        nested = value if isinstance(value, tuple) else ()
        constants |= {(index, at): None for at, each in enumerate(nested) if each is None}
    constants[(len(names) - 1,)] = launch.constants
    return signature | {"N": "constexpr"}, constants


def _kind_of(value):
    """What Triton compiles for an argument."""
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}"
    if isinstance(value, tuple):
        kinds = [_kind_of(each) for each in value]
        return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
    if hasattr(value, "block_shape"):
        return f"tensordesc<{NAMES[value.base.dtype]}{value.block_shape}>"
    return {type(None): "constexpr", int: "i32", float: "fp32"}[type(value)]
