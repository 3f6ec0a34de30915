"""The state dict in a file of `torch.save` or of Lightning, mapped into memory, never unpickled.

`weights_only` admits tensors and plain values, so opening a file from elsewhere runs none of its
code. Leaves out files from before torch 1.6, which are no zip archives and can't be mapped.
"""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["TorchFile"]

# The pages of a mapping stay in memory once they are read, until the file is mapped anew.
_MAPPED_BYTES = 2**27


class TorchFile:
    """The tensors of a state dict by name, read one by one.

    A mapping under the key "state_dict", as in Lightning's checkpoints, is taken for the state
    dict, otherwise the whole content. ValueError, naming the file, if it holds no state dict, holds
    other objects, or is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors, self.others = self._map()
        self._read = 0

    @property
    def outlines(self) -> dict[str, Tensor]:
        """The tensors by name without their values, on the device "meta"."""
        return {name: tensor.to("meta") for name, tensor in self._tensors.items()}

    def load(self, name: str) -> Tensor:
        """Return a tensor."""
        if self._read > _MAPPED_BYTES:
            self._tensors, _ = self._map()
            self._read = 0
        self._read += self._tensors[name].nbytes
        return self._tensors[name]

    def _map(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        content = _load(self._path)
        inner = content.get("state_dict") if isinstance(content, Mapping) else None
        state = inner if isinstance(inner, Mapping) else content
        entries = state if isinstance(state, Mapping) else {}
        tensors = {str(name): x.detach() for name, x in entries.items() if _has_values(x)}
        if not tensors:
            found = ", ".join(map(str, entries)) or type(state).__name__
            raise ValueError(
                f"{self._path}: must hold a state dict, names with tensors, got "
                f"{found[:200]}; save model.state_dict()"
            )
        others = {str(name): _describe(x) for name, x in entries.items() if not _has_values(x)}
        return tensors, others


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = found.group(1) if found else "what can't be read"
        raise ValueError(
            f"{path}: must hold tensors and plain values alone, got {what}; save only "
            "model.state_dict()"
        ) from error
    except Exception as error:  # damaged pickles raise ten kinds, AssertionError among them
        reason = re.split(r"\.\s", str(error))[0] or type(error).__name__
        raise ValueError(
            f"{path}: must be a whole file of torch.save, of torch 1.6 or newer: {reason}"
        ) from error


def _has_values(entry: Any) -> bool:
    return (
        isinstance(entry, Tensor)
        and entry.layout is torch.strided
        and entry.device.type == "cpu"
        and not entry.is_quantized
    )


def _describe(entry: Any) -> str:
    if not isinstance(entry, Tensor):
        return type(entry).__name__
    return f"{entry.dtype} on {entry.device}, {entry.layout}".replace("torch.", "")
