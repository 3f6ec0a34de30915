"""Finds 32-bit products and sums that may wrap around on their way to an address, in a TTIR.

A product or sum of 32-bit integers that exceeds 2**31 wraps around without a word, and an address
made of it is another one. The lint walks back from the offsets of every `tt.addptr`, and from the
places of every load by a descriptor, through everything that computes on integers, and reports each
32-bit `arith.muli`, `arith.addi` and `arith.subi` on the way whose result need not fit 32 bits.
What values it may take follows from intervals: a constant, a program's number, a remainder and a
quotient bound what is computed of them. Taken for granted is what the launch sees to: a sequence is
shorter than `arguments.MAX_LEN`, and a side of the window too. So is the difference of two loaded
integers, where a packed sequence ends and begins. Everything else, such as a stride or a number of
heads, may be any integer of its type.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from attention_kernels.triton.arguments import MAX_LEN

LENGTHS = ("max_query_len", "max_key_len", "query_len", "key_len")
ROWS = ("query_rows", "key_rows", "row_rows")
"""The arguments of kernels that are lengths, and those that are unless sequences are packed."""
SIZES = ("size",)
"""Those that may be any integer but a negative one."""

_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_ARGUMENT = re.compile(r"(%[\w-]+): ([^ ,{)]+)")
_DEFINITION = re.compile(r"^(%[\w-]+)(?::\d+)? = ([\w.]+) ?(.*)$")
_NAME = re.compile(r"%[\w-]+(?:#\d+)?")
_FOR = re.compile(r"^(?:(%[\w-]+)(?::\d+)? = )?scf\.for (%[\w-]+) = (\S+) to (\S+) step (\S+)")


@dataclass(eq=False)
class Value:
    """One value of a kernel: what computes it of what, and the integers it may be."""

    operation: str
    type: str
    low: float = float("-inf")
    high: float = float("inf")
    operands: list["Value"] = field(default_factory=list)
    text: str = ""

    @property
    def bits(self) -> int:
        """The width of an integer or of a tensor's integers; 0 for anything else."""
        found = re.search(r"(?:^|x)i(\d+)>?$", self.type)
        return int(found[1]) if found else 0

    def bounded(self, low: float, high: float) -> "Value":
        """Return this value, between bounds where they fit its type, else anything of its type."""
        limit = 2 ** (self.bits - 1) if self.bits else float("inf")
        fits = -limit <= low <= high < limit
        self.low, self.high = (low, high) if fits else (-limit, limit - 1)
        return self


def ttir_of(kernel: triton.JITFunction, signature: dict, constants: dict, attributes: dict) -> str:
    """Return the TTIR of a kernel, with all that it calls put into it, for an sm_90."""
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({})
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(stages["ttir"](source.make_ir(target, options, *functions, context), {}))


def wrapping_results(ttir: str, *, packed: bool = False) -> list[str]:
    """Return the 32-bit products and sums that reach an address and may wrap around, as lines."""
    assert "tt.call" not in ttir, "a function that is called would not be looked into"
    values = list(_values(ttir, LENGTHS if packed else LENGTHS + ROWS))
    waiting = [place for value in values for place in value.operands[1:] if _is_address(value)]
    assert waiting, "a kernel without addresses can't be the one that was meant"
    seen: set[int] = set()
    found: dict[str, None] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen or value.operation == "tt.load":
            continue
        seen.add(id(value))
        if _may_wrap(value):
            found[value.text] = None
        waiting += [operand for operand in value.operands if operand.bits > 1]
    return list(found)


def _is_address(value: Value) -> bool:
    """Whether a value's operands, but for the first, say where in memory it is."""
    return value.operation in ("tt.addptr", "tt.descriptor_load")


def _may_wrap(value: Value) -> bool:
    if value.operation not in ("arith.muli", "arith.addi", "arith.subi") or value.bits != 32:
        return False
    if _is_length(value.operation, value.operands):
        return False
    low, high = _computed(value.operation.split(".")[1], value.operands)
    return low < -(2**31) or high >= 2**31


def _is_length(operation: str, given: list[Value]) -> bool:
    """Whether it is where a packed sequence ends less where it begins."""
    return operation == "arith.subi" and all(x.operation == "tt.load" for x in given)


def _values(ttir: str, lengths: tuple[str, ...]) -> Iterator[Value]:
    """Yield each value of a kernel; a loop's are completed when its end has been read."""
    names: dict[str, Value] = {}
    loops: list[list[Value]] = []
    for line in _LOCATION.sub("", ttir).splitlines():
        line = line.strip()
        if line.startswith("tt.func"):
            given = _ARGUMENT.findall(line)
            names |= {name: _argument(name, kind, lengths) for name, kind in given}
        elif loop := _FOR.match(line):
            loops.append(_loop(line, loop, names))
        elif re.match(r"(%\S+ = )?scf\.(if|while)", line):
            loops.append(_results(line, names, []))
        elif line.startswith("scf.yield"):
            given = [names[name] for name in _NAME.findall(line)]
            for value, operand in zip(
                loops[-1], given * (len(loops[-1]) // len(given)), strict=True
            ):
                value.operands.append(operand)
        elif line == "}" and loops:
            loops.pop()
        elif (defined := _DEFINITION.match(line)) and not line.endswith("({"):
            value = names[defined[1]] = _value(line, defined, names)
            yield value


def _argument(name: str, kind: str, lengths: tuple[str, ...]) -> Value:
    value = Value("argument", kind, text=name)
    bounds = dict.fromkeys(lengths, _LENGTH) | dict.fromkeys(SIZES, _SIZE)
    return value.bounded(*bounds.get(name[1:], _ANYTHING))


def _results(line: str, names: dict[str, Value], first: list[Value]) -> list[Value]:
    """Name the results of a loop or branch; what they are is known from what is yielded."""
    name, types = line.split(" = ")[0], re.search(r"-> \(([^)]*)\)", line)
    if types is None or not line.startswith("%"):
        return []
    kinds = re.findall(r"tensor<[^>]*(?:<[^>]*>)?>|[^ ,]+", types[1])
    values = [Value("region", kind).bounded(*_ANYTHING) for kind in kinds]
    for value, start in zip(values, first, strict=bool(first)):
        value.operands.append(start)
    base = name.split(":")[0]
    names |= {f"{base}#{i}": value for i, value in enumerate(values)} | {base: values[0]}
    return values


def _loop(line: str, loop: re.Match[str], names: dict[str, Value]) -> list[Value]:
    low, high, step = (names[loop[i]] for i in (3, 4, 5))
    given = re.search(r"iter_args\((.*?)\) ->", line)
    pairs = [x.split(" = ") for x in given[1].split(", ")] if given else []
    started = [names[start] for _, start in pairs]
    results = _results(line, names, started)
    carried = [Value("region", x.type, operands=[x]).bounded(*_ANYTHING) for x in started]
    names |= {name: value for (name, _), value in zip(pairs, carried, strict=True)}
    counter = Value("counter", "i32", operands=[low, high, step])
    names[loop[2]] = counter.bounded(low.low, max(low.low, high.high - 1))
    return results + carried


def _value(line: str, defined: re.Match[str], names: dict[str, Value]) -> Value:
    operation, rest = defined[2], defined[3]
    kind = rest.rsplit("-> ", 1)[-1] if "->" in rest else rest.rsplit(" : ", 1)[-1]
    kind = kind.rsplit(" to ", 1)[-1]
    if operation == "tt.load":
        kind = re.sub(r"!tt\.ptr<(\w+)>", r"\1", kind)
    operands = [names[name] for name in _NAME.findall(rest.split(" : ")[0]) if name in names]
    value = Value(operation, kind.strip(), operands=operands, text=line)
    bounds = _bounds(operation, rest, operands) if value.bits else _ANYTHING
    return value.bounded(*bounds)


_ANYTHING = (float("-inf"), float("inf"))
_LENGTH = (0, MAX_LEN - 1)
_SIZE = (0, 2**31 - 1)
_SAME = ("extsi", "splat", "broadcast", "expand_dims", "trans", "reshape", "trunci")


def _bounds(operation: str, rest: str, given: list[Value]) -> tuple[float, float]:
    """Return the least and the largest integer that an operation may give."""
    name = operation.split(".")[1]
    if name == "constant":
        number = re.match(r"(?:dense<)?(-?\d+)", rest)
        return (int(number[1]),) * 2 if number else _ANYTHING
    if name == "make_range":
        stop, start = re.findall(r"= (\d+) : i32", rest)
        return int(start), int(stop) - 1
    if name == "get_program_id":
        return 0, 2**31 - 1
    if _is_length(operation, given) or _is_side(operation, given):
        return _LENGTH
    if name in _SAME:
        return given[0].low, given[0].high
    return _computed(name, given)


def _is_side(operation: str, given: list[Value]) -> bool:
    """Whether it is put together of halves (`rounding.whole`): a side of the window.

    No other number of the kind reaches an address.
    """
    return operation == "arith.ori" and given[0].operation == "arith.shli"


def _computed(name: str, given: list[Value]) -> tuple[float, float]:
    lows, highs = [x.low for x in given], [x.high for x in given]
    if name == "select":
        return min(lows[1:]), max(highs[1:])
    if len(given) != 2:
        return _ANYTHING
    simple = {
        "addi": lambda: (lows[0] + lows[1], highs[0] + highs[1]),
        "subi": lambda: (lows[0] - highs[1], highs[0] - lows[1]),
        "muli": lambda: _product(*given),
        "minsi": lambda: (min(lows), min(highs)),
        "maxsi": lambda: (max(lows), max(highs)),
        "divsi": lambda: _quotient(*given),
        "remsi": lambda: _remainder(*given),
    }
    return simple[name]() if name in simple else _ANYTHING


def _product(left: Value, right: Value) -> tuple[float, float]:
    corners = [x * y for x in (left.low, left.high) for y in (right.low, right.high)]
    return min(corners), max(corners)


def _quotient(left: Value, right: Value) -> tuple[float, float]:
    if right.low <= 0 <= right.high:
        # divided by one, or by minus one, at the least
        largest = max(abs(left.low), abs(left.high))
        return (0 if left.low >= 0 and right.low == 0 else -largest), largest
    corners = [int(x / y) for x in (left.low, left.high) for y in (right.low, right.high)]
    return min(corners), max(corners)


def _remainder(left: Value, right: Value) -> tuple[float, float]:
    largest = max(abs(right.low), abs(right.high)) - 1
    return (0 if left.low >= 0 else -largest), min(largest, max(left.high, 0))
