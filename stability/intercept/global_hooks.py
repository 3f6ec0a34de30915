"""Forward hooks on all modules of the process, which torch.compile does not warn of.

`OptimizedModule` warns of global hooks, as they fire once more for itself. Ours know that it is
none of the model's own modules, and are not there while compiled code runs (`catcher`).
"""

from collections.abc import Callable
from threading import Lock
from typing import Any

from torch.nn.modules import module as torch_module

__all__ = ["put_global_hooks"]

_LOCK = Lock()
_OURS: set[int] = set()
"""The hooks' ids, as torch gives them."""


def put_global_hooks(
    before: Callable[..., Any], after: Callable[..., Any], *, with_kwargs: bool = False
) -> Callable[[], None]:
    """Call `before` and `after` around each module's forward; return what ends that.

    `after` is called after an error too. With `with_kwargs` it is given them behind the arguments,
    but after an error.
    """
    handles = [
        torch_module.register_module_forward_pre_hook(before),
        torch_module.register_module_forward_hook(after, with_kwargs=with_kwargs, always_call=True),
    ]
    ids = {handle.id for handle in handles}
    with _LOCK:
        if not _OURS:
            torch_module._has_any_global_hook = _has_any_hook_of_others
        _OURS.update(ids)

    def remove() -> None:
        for handle in handles:
            handle.remove()
            # torch's handle leaves this behind, and a later torch.compile warns of it
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        with _LOCK:
            _OURS.difference_update(ids)
            if not _OURS:
                torch_module._has_any_global_hook = _ASKED_BY_TORCH

    return remove


_ASKED_BY_TORCH = torch_module._has_any_global_hook


def _has_any_hook_of_others() -> bool:
    groups = (
        torch_module._global_backward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
    )
    return any(one not in _OURS for hooks in groups for one in tuple(hooks))
