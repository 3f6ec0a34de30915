"""The table of wrong attentions, on which each puts itself as its file is imported."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.zoo.flash_by_hand import Flash
from tests.zoo.right import ALL

__all__ = ["TABLE", "Wrong", "wrong"]


class Wrong(NamedTuple):
    """A wrong attention, the words that name its mistake, and the dtypes at which it is wrong."""

    name: str
    function: Callable[..., Any]
    noun: str
    dtypes: tuple[torch.dtype, ...]


TABLE: list[Wrong] = []


def wrong(
    name: str, noun: str, dtypes: tuple[torch.dtype, ...] = ALL
) -> Callable[[type[Flash]], type[Flash]]:
    """Put a kernel on the table."""

    def put(kernel: type[Flash]) -> type[Flash]:
        TABLE.append(Wrong(name, kernel(), noun, dtypes))
        return kernel

    return put
