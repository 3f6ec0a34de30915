"""Sees a training that says nothing of itself: its model's calls, its loss, its optimizers' steps.

Python's and PyTorch's own places are wrapped, process-wide: `nn.Module.__call__`, which is put back
while a model computes, so that it costs one call a pass and a graph sees nothing of it;
`torch.autograd.backward`; the hooks that PyTorch has for all optimizers; a loss scaler's `scale`
and `step`; `destroy_process_group`. What is compiled is not looked into.
Leaves out what is made of it (`training`).
"""

from __future__ import annotations

import functools
import sys
import weakref
from threading import get_ident
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .gradients import GIVEN, is_given_gradient
from .inputs import is_plain, tensors_in, values_in
from .loss_targets import find_targets, place_in_graph
from .made_of import made_of
from .older_torch import is_compiling, restore_step_hooks
from .patching import put
from .scaled_loss import mark_scaled, unscaled
from .training import Training

__all__ = ["install", "install_count"]

_original_call: Callable[..., Any] = nn.Module.__call__


def install(training: Training) -> Callable[[], None]:
    """Hand all that this process trains to `training`; return what takes the hooks out again."""
    undone = [
        _Calls(training).install(),
        _wrap_backward(training),
        _wrap_modes(training),
        *_wrap_optimizers(training),
        *_wrap_scaler(training),
        _wrap_group(training),
        *training.saved_hooks.install(),
    ]

    def uninstall() -> None:
        for undo in reversed(undone):
            undo()

    return uninstall


def install_count(training: Training) -> Callable[[], None]:
    """Tell `training` of the updates alone: no input, loss or scaler is looked at."""
    # sharded weights are gathered before the ranks part, as under `install`
    undone = [*_wrap_optimizers(training), _wrap_group(training)]
    if training.is_planned:  # it ends where the next forward pass begins, as under `install`
        calls = _Calls(training, looks=False)
        undone.append(calls.install())

    def uninstall() -> None:
        for undo in reversed(undone):
            undo()

    return uninstall


def _is_backward() -> bool:
    """Whether the autograd engine runs this: what is called there is computed a second time."""
    return torch._C._current_graph_task_id() != -1


def _is_transformed() -> bool:
    """Whether this runs under torch.func or a tracer, which hand over no tensors of their own."""
    functorch: Any = getattr(torch._C, "_functorch", None)
    peek = getattr(functorch, "peek_interpreter_stack", lambda: None)
    tracing: Any = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]
    return tracing() or peek() is not None


def _is_failing() -> bool:
    """Whether an error is on its way out, as in a `finally`: it may be this rank's alone."""
    error = sys.exc_info()[1]
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


class _Calls:
    """The calls of whole models."""

    def __init__(self, training: Training, *, looks: bool = True) -> None:
        self._training, self._looks = training, looks
        self._has_weights: weakref.WeakKeyDictionary[nn.Module, Tuple[bool, bool]]
        self._has_weights = weakref.WeakKeyDictionary()
        self._frozen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models that do not train and that gradients went through."""
        self._running: Set[int] = set()
        """The threads in which a model computes: what it calls itself is no other model's call."""
        self._made: Dict[int, Tuple[StorageWeakRef, str]] = {}
        """The memory of what models returned, and who made it of inputs that nobody hashed."""

    def install(self) -> Callable[[], None]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # first, and in no function of ours: a graph holds nothing of this
            if is_compiling() or torch._C._current_graph_task_id() != -1:
                return _original_call(module, *args, **kwargs)
            if get_ident() in self._running or _is_transformed():
                return _original_call(module, *args, **kwargs)
            return self._outermost(module, args, kwargs)

        functools.update_wrapper(call, _original_call)
        self._wrapped = call
        return put(nn.Module, "__call__", call)

    def _outermost(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._training.looks_away:
            return _original_call(module, *args, **kwargs)
        has_weights, own_train = self._weights_of(module)
        # gradients may go through a model that does not train, to what made its input
        trains = has_weights and (own_train or _need_gradients(args, kwargs))
        trains = trains and torch.is_grad_enabled()
        if trains:
            self._training.forward_begins()
            self._tell_frozen(module, own_train)
        if trains and self._looks:
            self._tell_given(module, args, kwargs)
        evaluates = has_weights and self._looks and self._tell_evaluated(module, args, kwargs)
        # where the script has put its own around ours that stays, and ours calls the original
        is_ours = nn.Module.__call__ is self._wrapped
        if is_ours:
            nn.Module.__call__ = _original_call
        self._running.add(get_ident())
        result = None
        begin = place_in_graph()
        try:
            result = _original_call(module, *args, **kwargs)
        finally:
            self._running.discard(get_ident())
            if has_weights and self._looks:
                maker = "" if trains else type(module).__name__
                self._training.models.add(begin, place_in_graph(), maker)
            if is_ours and nn.Module.__call__ is _original_call:
                nn.Module.__call__ = self._wrapped
            if evaluates:
                self._training.evaluations.model_returned(result)
        if has_weights and self._looks:
            self._tell_made(module, (args, kwargs), result, begin, trains)
        if trains and own_train and self._training.instrument is not None:
            self._training.instrument.called(module, args, kwargs, result, begin)
        return result

    def _tell_frozen(self, module: nn.Module, own_train: bool) -> None:
        """Tell of a model whose own weights don't train, when it is called first."""
        if self._looks and not own_train and module not in self._frozen:
            self._frozen.add(module)
            self._training.beside(module)

    def _tell_made(
        self, module: nn.Module, given: Any, result: Any, begin: int, trains: bool
    ) -> None:
        if trains:
            self._training.forward_ends()
        self._remember(result, given, "" if trains else type(module).__name__)
        if trains and not module.training:
            self._training.models.watch(begin, place_in_graph(), result)

    def _tell_given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        taken = self._data(module, args, kwargs, self._training.left_out)
        self._training.untold |= self._unread(module, args, kwargs)
        self._training.given(
            [x for _, x in taken],
            names=[name for name, _ in taken],
            is_training=module.training,
            model=id(module),
        )

    def _tell_evaluated(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Tell what a call without gradients is given; return whether it is an evaluation."""
        if torch.is_grad_enabled() or not self._training.evaluates(module):
            return False
        taken = self._data(module, args, kwargs, set())
        self._training.evaluated([x for _, x in taken], [name for name, _ in taken])
        return True

    def _weights_of(self, module: nn.Module) -> Tuple[bool, bool]:
        """Whether a module has parameters, and whether some train; asked again until some do."""
        known = self._has_weights.get(module, (False, False))
        if not known[1]:
            trains = [x.requires_grad for x in module.parameters()]
            known = bool(trains), any(trains)
            self._has_weights[module] = known
        return known

    def _data(
        self, module: nn.Module, args: Any, kwargs: Any, left_out: Set[str]
    ) -> List[Tuple[str, Tensor]]:
        """Return the data that a module is given, by name; `left_out` is told of other tensors."""
        found: List[Tuple[str, Tensor]] = []
        for name, x in (*tensors_in(args, ""), *tensors_in(kwargs, "")):
            found += self._data_in(module, name, x, left_out)
        return [*found, *values_in(args, "", set()), *values_in(kwargs, "", set())]

    def _unread(self, module: nn.Module, args: Any, kwargs: Any) -> Set[str]:
        """Return what of a module's arguments can't be read, in words."""
        unread: Set[str] = set()
        for _ in (*values_in(args, "", unread), *values_in(kwargs, "", unread)):
            pass
        return {f"{each}, given to {type(module).__name__}" for each in unread}

    def _data_in(
        self, module: nn.Module, name: str, x: Tensor, left_out: Set[str]
    ) -> List[Tuple[str, Tensor]]:
        """Return what is data of one tensor: itself, or what a script has mixed in."""
        given_as = f"{name} of {type(module).__name__}"
        # an evaluation's is no part of what is trained on
        doubts = self._training.doubts if left_out is self._training.left_out else set()
        if not is_plain(x):
            left_out.add(f"{given_as}, a {type(x).__name__}")
            doubts.add(f"the same {given_as}: a {type(x).__name__} has no hash")
            return []
        maker = self._maker_of(x)
        if x.grad_fn is not None:
            return self._data_behind(x, maker, (name, given_as), left_out, doubts)
        if maker is not None:
            left_out.add(f"{given_as}, which a model made")
            doubts.update(_unhashed(given_as, {maker}))
            return []
        is_weight = isinstance(x, nn.Parameter) and (
            self._training.trains(x) or any(x is each for each in module.parameters())
        )
        return [] if is_weight else [(name, x)]

    def _data_behind(
        self,
        x: Tensor,
        maker: Optional[str],
        named: Tuple[str, str],
        left_out: Set[str],
        doubts: Set[str],
    ) -> List[Tuple[str, Tensor]]:
        """Return what is data of a tensor that was made of others which need a gradient."""
        name, given_as = named
        found = made_of(x, self._training.models.made, self._training.saved_hooks.are_on)
        makers = {*found.makers, *([] if maker is None else [maker])}
        data, has_weights = [], False
        for leaf in found.leaves:
            maker = self._maker_of(leaf) if is_plain(leaf) else None
            if isinstance(leaf, nn.Parameter) or self._training.trains(leaf):
                has_weights = True
            elif maker is not None:
                makers.add(maker)
            elif is_plain(leaf):
                data.append((f"{name}, a part", leaf))
            else:
                doubts.add(f"the same {given_as}: a {type(leaf).__name__} has no hash")
        if not found.is_whole:
            doubts.add(f"the same {given_as}: it is made of too much to be looked at")
        elif not makers and not has_weights:
            return [(name, x)]
        left_out.add(f"{given_as}, which {'a model' if makers else 'weights'} made")
        doubts.update(_unhashed(given_as, makers))
        for each in found.beside:
            doubts.add(f"the same {given_as}: what {each} was given on the way has no hash")
        return data

    def _maker_of(self, x: Tensor) -> Optional[str]:
        """Return who made a tensor of what nobody hashed, "" if of what was; None: no model."""
        reference = StorageWeakRef(x.untyped_storage())
        known = self._made.get(reference.cdata)
        return known[1] if known is not None and not known[0].expired() else None

    def _remember(self, result: Any, given: Any, maker: str) -> None:
        self._made = {key: known for key, known in self._made.items() if not known[0].expired()}
        own = [StorageWeakRef(x.untyped_storage()).cdata for x in _plain_in(given)]
        for x in _plain_in(result):
            reference = StorageWeakRef(x.untyped_storage())
            if reference.cdata not in own:  # a model may return what it was given
                self._made[reference.cdata] = reference, maker


def _need_gradients(*given: Any) -> bool:
    return any(x.requires_grad for each in given for _, x in tensors_in(each, ""))


def _unhashed(given_as: str, makers: Set[str]) -> Set[str]:
    """Return in words which models were given something that has no hash."""
    end = "made it, and what that was given has no hash"
    return {f"the same {given_as}: {maker} {end}" for maker in makers if maker}


def _plain_in(value: Any) -> List[Tensor]:
    return [x for _, x in tensors_in(value, "") if is_plain(x)]


def _wrap_backward(training: Training) -> Callable[[], None]:
    original = torch.autograd.backward
    training.sees_backward = True

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or _is_backward():
            return original(tensors, *args, **kwargs)
        restore_step_hooks(training.optimizers)
        is_one = isinstance(tensors, Tensor) or hasattr(tensors, "node")  # an edge of the graph
        losses = [tensors] if is_one else list(tensors)
        is_loss = [isinstance(loss, Tensor) and loss.numel() == 1 for loss in losses]
        if is_given_gradient(args, kwargs) or not all(is_loss):
            training.back_propagated(None, GIVEN)
        for loss, is_number in zip(losses, is_loss):  # noqa: B905 Python 3.9 has no strict
            if is_number:
                models, hooked = training.models, training.saved_hooks.are_on
                found = find_targets(loss, models.reached_by, hooked, models.also_of)
                training.aimed_at(*found)
                meant, doubt = unscaled(loss) if training.scales_loss else (loss, "")
                training.back_propagated(meant, doubt)
        training.models.runs_backward = True
        try:
            return original(tensors if is_one else losses, *args, **kwargs)
        finally:
            training.models.runs_backward = False

    return put(torch.autograd, "backward", backward)


def _wrap_modes(training: Training) -> Callable[[], None]:
    original = nn.Module.train

    @functools.wraps(original)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if not is_compiling():
            (training.evaluations.may_end if mode else training.evaluations.may_begin)()
        return original(self, mode)

    return put(nn.Module, "train", train)


def _wrap_optimizers(training: Training) -> List[Callable[[], None]]:
    init = Optimizer.__init__

    @functools.wraps(init)
    def made(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        training.add_optimizer(self)

    # not in the graph of a step that is compiled
    eager: Any = torch.compiler.disable
    before: Any = eager(lambda opt, args, kwargs: _step_begins(training, opt, args, kwargs))
    after: Any = eager(lambda opt, args, kwargs: training.step_ends(opt))
    return [
        put(Optimizer, "__init__", made),
        register_optimizer_step_pre_hook(before).remove,
        register_optimizer_step_post_hook(after).remove,
    ]


def _step_begins(training: Training, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Tell of a step; a closure that it is given is counted, the same function around it."""
    training.step_begins(optimizer)
    index = next((i for i, each in enumerate(args) if i and callable(each)), 0)
    closure = args[index] if index else kwargs.get("closure")
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def counted(*own: Any, **named: Any) -> Any:
        training.evaluation_begins()
        return closure(*own, **named)

    if index:
        return (*args[:index], counted, *args[index + 1 :]), kwargs
    return args, {**kwargs, "closure": counted}


def _wrap_scaler(training: Training) -> List[Callable[[], None]]:
    # torch.cuda.amp's own is a subclass of the newer one, and before that the only one
    kind: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    init, step = kind.__init__, kind.step
    wrapped: Dict[type, Callable[[], None]] = {}

    def see(one: Any) -> None:
        if "scale" in vars(one) and one not in wrapped:  # as FSDP's, which asks no super()
            wrapped[one] = put(one, "scale", _scaled(training, one.scale))
        for below in one.__subclasses__():
            see(below)

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        see(kind)  # a class may be younger than this wrapper
        init(self, *args, **kwargs)

    @functools.wraps(step)
    def stepped(self: Any, opt: Any, *args: Any, **kwargs: Any) -> Any:
        before = training.steps
        result = step(self, opt, *args, **kwargs)
        if training.steps == before:
            training.skipped(opt)
        return result

    def unsee() -> None:
        for undo in wrapped.values():
            undo()

    see(kind)
    return [unsee, put(kind, "__init__", made), put(kind, "step", stepped)]


def _scaled(training: Training, scale: Any) -> Callable[[Any, Any], Any]:
    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        training.scales_loss = True
        mark_scaled(self, result, outputs)
        return result

    return scaled


def _wrap_group(training: Training) -> Callable[[], None]:
    distributed: Any = torch.distributed
    if not distributed.is_available():
        return lambda: None
    original = distributed.destroy_process_group

    @functools.wraps(original)
    def destroyed(group: Any = None) -> Any:
        if not _is_failing() and (group is None or group is distributed.group.WORLD):
            training.group_ends()
        return original(group)

    return put(distributed, "destroy_process_group", destroyed)
