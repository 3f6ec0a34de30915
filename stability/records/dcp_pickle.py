"""Reads the pickle of a `.metadata` file of torch.distributed.checkpoint, and runs nothing of it.

The file says where each chunk of each tensor lies. It is a pickle, so one from elsewhere could name
any function to call. Here nothing that it names is imported or called: a table lists the names that
DCP writes (torch 2.1 to 2.13, and Megatron's), each stands for a passive record, a tuple, a text or
a dtype, and any other is refused. The opcodes are parsed by `pickletools`, which takes no memory
that a count only claims; Python's own unpickler does, and hashes any key, for ever if it is nested
enough. What the content means is left to `dcp_metadata`.
"""

import pickletools
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["Record", "read_dcp_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

_RECORDS = frozenset(
    {
        f"{_METADATA}.BytesStorageMetadata",
        f"{_METADATA}.ChunkStorageMetadata",
        f"{_METADATA}.Metadata",
        f"{_METADATA}.MetadataIndex",
        f"{_METADATA}.StorageMeta",
        f"{_METADATA}.TensorProperties",
        f"{_METADATA}.TensorStorageMetadata",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        # where torch 2.1 and 2.2 have it
        f"{_SHARDED}.TensorProperties",
        # the plans of all ranks, which Megatron may keep beside the metadata
        f"{_PLANNER}.SavePlan",
        f"{_PLANNER}.TensorWriteData",
        f"{_PLANNER}.WriteItem",
        f"{_MEGATRON}.MCoreSavePlan",
    }
)
"""Classes whose instances are records of named fields."""

_DTYPES = {f"torch.{name}": x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
"""The fields of `TensorProperties`, whose state is a tuple."""
_MOST_SIZE = 2**62
_MOST_PLACES = 64
"""Of a size, and fields of a record: more than any has, and few enough to be copied each time that
a pickle recalls them."""
_MOST_LETTERS = 4096
"""Of a path that is joined, as Linux takes it."""


class _RefusedError(Exception):
    """The pickle holds what the metadata of a checkpoint does not; the text is a clause."""


class Record:
    """An instance of a class of DCP's: the class's name, without its module, and fields."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: dict[str, Any] = {}


class _Name:
    """A name of the table, as it lies on the stack until it is used."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _Stack:
    """The stack of a pickle that is being read: the items since the last mark, and those before."""

    __slots__ = ("before", "items", "memo", "result")

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.before: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.result: Any = None

    def pop_to_mark(self) -> list[Any]:
        """Take off what was put on since the last mark, and the mark."""
        items = self.items
        self.items = self.before.pop()
        return items


def read_dcp_pickle(data: bytes) -> Record:
    """Return the record `Metadata` that a pickle of DCP's holds.

    Classes are records, torch.Size a tuple, torch's dtypes themselves, a layout its name, an enum
    its number, a path its parts joined by slashes. ValueError, a clause, for a name that is not in
    the table, arguments that its class does not take, opcodes that DCP does not write, and for a
    pickle that is cut short or damaged.
    """
    stack = _Stack()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise _RefusedError(f"it has the opcode {opcode.name}, which DCP does not write")
            action(stack, argument)
    except _RefusedError as error:
        raise ValueError(str(error)) from error
    # what pickletools and decoding say of damage, and a stack that runs empty
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"it is cut short or damaged: {str(error)[:200]}") from error
    found = stack.result
    if not isinstance(found, Record) or found.kind != "Metadata":
        raise ValueError(f"it holds {_said(found)}, and no Metadata")
    return found


def _put(stack: _Stack, argument: Any) -> None:
    stack.items.append(argument)


def _mark(stack: _Stack, argument: Any) -> None:
    stack.before.append(stack.items)
    stack.items = []


def _stop(stack: _Stack, argument: Any) -> None:
    stack.result = stack.items.pop()


def _made_by(make: Callable[[], Any]) -> Callable[[_Stack, Any], None]:
    def action(stack: _Stack, argument: Any) -> None:
        stack.items.append(make())

    return action


def _tuple_of(count: int) -> Callable[[_Stack, Any], None]:
    def action(stack: _Stack, argument: Any) -> None:
        if len(stack.items) < count:
            raise _RefusedError(f"it is damaged: a tuple of {count} has fewer items")
        stack.items[-count:] = [tuple(stack.items[-count:])]

    return action


def _tuple(stack: _Stack, argument: Any) -> None:
    found = tuple(stack.pop_to_mark())
    stack.items.append(found)


def _remember(stack: _Stack, argument: Any) -> None:
    stack.memo[int(argument)] = stack.items[-1]


def _remember_next(stack: _Stack, argument: Any) -> None:
    stack.memo[len(stack.memo)] = stack.items[-1]


def _recall(stack: _Stack, argument: Any) -> None:
    stack.items.append(stack.memo[int(argument)])


def _append(stack: _Stack, argument: Any) -> None:
    _extend(stack, [stack.items.pop()])


def _appends(stack: _Stack, argument: Any) -> None:
    _extend(stack, stack.pop_to_mark())


def _extend(stack: _Stack, items: list[Any]) -> None:
    target = stack.items[-1]
    if not isinstance(target, list):
        raise _RefusedError(f"it appends to {_said(target)}")
    target.extend(items)


def _set_item(stack: _Stack, argument: Any) -> None:
    value, key = stack.items.pop(), stack.items.pop()
    _set(stack, [key, value])


def _set_items(stack: _Stack, argument: Any) -> None:
    _set(stack, stack.pop_to_mark())


def _set(stack: _Stack, items: list[Any]) -> None:
    target = stack.items[-1]
    if not isinstance(target, dict):
        raise _RefusedError(f"it sets items of {_said(target)}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # a record is hashed by what it is, not by what it holds
        if not isinstance(key, str | int | Record):
            raise _RefusedError(f"it has a key that is {_said(key)}")
        target[key] = value


def _global(stack: _Stack, argument: str) -> None:
    _name(stack, *argument.split(" ", 1))


def _stack_global(stack: _Stack, argument: Any) -> None:
    name, module = stack.items.pop(), stack.items.pop()
    _name(stack, module, name)


def _name(stack: _Stack, module: Any, name: Any) -> None:
    text = f"{_said(module)}.{_said(name)}"
    # never by `getattr`: torch imports some of its modules when they are asked for
    if text in _DTYPES:
        stack.items.append(_DTYPES[text])
    elif text in _RECORDS or text in _CALLS:
        stack.items.append(_Name(text))
    else:
        raise _RefusedError(f"it names {text}, which DCP does not write")


def _new(stack: _Stack, argument: Any) -> None:
    arguments, name = stack.items.pop(), stack.items.pop()
    if not isinstance(name, _Name) or name.text not in _RECORDS or arguments != ():
        raise _RefusedError(f"it makes {_said(name)} with {_said(arguments)}")
    stack.items.append(Record(name.text.rpartition(".")[2]))


def _call(stack: _Stack, argument: Any) -> None:
    arguments, name = stack.items.pop(), stack.items.pop()
    make = _CALLS.get(name.text) if isinstance(name, _Name) else None
    if make is None or not isinstance(arguments, tuple):
        raise _RefusedError(f"it calls {_said(name)} with {_said(arguments)}")
    try:
        made = make(*arguments)
    except (_RefusedError, TypeError) as error:
        raise _RefusedError(f"it calls {_said(name)} with {_said(arguments)}") from error
    stack.items.append(made)


def _build(stack: _Stack, argument: Any) -> None:
    state, record = stack.items.pop(), stack.items[-1]
    is_tuple = isinstance(state, tuple) and len(state) == len(_PROPERTIES)
    if isinstance(record, Record) and record.kind == "TensorProperties" and is_tuple:
        state = dict(zip(_PROPERTIES, state, strict=True))
    if not isinstance(record, Record) or not isinstance(state, dict):
        raise _RefusedError(f"it gives {_said(record)} the state {_said(state)}")
    if len(state) > _MOST_PLACES:
        raise _RefusedError(f"it gives {_said(record)} {len(state)} fields")
    record.fields = {str(name): value for name, value in state.items()}


_ACTIONS: dict[str, Callable[[_Stack, Any], None]] = {
    "APPEND": _append,
    "APPENDS": _appends,
    "BINGET": _recall,
    "BINPUT": _remember,
    "BUILD": _build,
    "EMPTY_DICT": _made_by(dict),
    "EMPTY_LIST": _made_by(list),
    "EMPTY_TUPLE": _made_by(tuple),
    "FRAME": lambda stack, argument: None,
    "GLOBAL": _global,
    "LONG_BINGET": _recall,
    "LONG_BINPUT": _remember,
    "MARK": _mark,
    "MEMOIZE": _remember_next,
    "NEWFALSE": _made_by(bool),
    "NEWOBJ": _new,
    "NEWTRUE": lambda stack, argument: stack.items.append(True),
    "NONE": _put,
    "PROTO": lambda stack, argument: None,
    "REDUCE": _call,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "STACK_GLOBAL": _stack_global,
    "STOP": _stop,
    "TUPLE": _tuple,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    **dict.fromkeys(("BINFLOAT", "BININT", "BININT1", "BININT2", "LONG1"), _put),
    **dict.fromkeys(("BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE"), _put),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES"), _put),
}
"""What an opcode does; those that are not here DCP does not write."""


def _size(values: Any = ()) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > _MOST_PLACES:
        raise _RefusedError
    if not all(map(_is_size, values)):
        raise _RefusedError
    return tuple(values)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_SIZE


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _RefusedError
    return value


def _number(value: Any) -> int:
    if type(value) is not int:
        raise _RefusedError
    return value


def _member(enum: Any, name: Any) -> int:
    members = _ENUMS.get(enum.text, {}) if isinstance(enum, _Name) else {}
    if _text(name) not in members:
        raise _RefusedError
    return members[name]


def _path(*parts: Any) -> str:
    if sum(len(_text(part)) + 1 for part in parts) > _MOST_LETTERS:
        raise _RefusedError
    return "/".join(parts)


def _no_items() -> dict[Any, Any]:
    return {}


def _paths() -> Iterator[str]:
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"):
            yield f"{module}.{name}"


_MEMORY_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": 0,
    "TORCH_CHANNELS_LAST": 1,
    "TORCH_PRESERVE_FORMAT": 2,
}
_ENUMS: dict[str, dict[str, int]] = {
    f"{_METADATA}._MEM_FORMAT_ENCODING": _MEMORY_FORMATS,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": _MEMORY_FORMATS,
    f"{_PLANNER}.WriteItemType": {"TENSOR": 1, "SHARD": 2, "BYTE_IO": 3},
}
"""The number of each member of an enum."""

_CALLS: dict[str, Callable[..., Any]] = {
    "torch.Size": _size,
    "torch.serialization._get_layout": _text,
    **dict.fromkeys(_ENUMS, _number),
    # Python 3.11.0 to 3.11.3 write a member of an enum as an attribute, by its name
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
    "collections.OrderedDict": _no_items,
    # where the checkpoint was saved is in it
    **dict.fromkeys(_paths(), _path),
}
"""What a pickle of DCP's calls, and what is made of the arguments here."""


def _said(thing: Any) -> str:
    if isinstance(thing, _Name):
        return thing.text
    if isinstance(thing, Record):
        return thing.kind
    if isinstance(thing, tuple) and all(isinstance(x, str | int) for x in thing):
        return repr(thing)[:200]
    return thing[:200] if isinstance(thing, str) else type(thing).__name__
