"""The least memory that one run can do with, in bytes, from its config alone.

It is a lower estimate: it counts only tensors that PyTorch can't do without, so that a study that
fits is never refused, and one that is far too large is. With P parameters of w bytes each, L
layers, batch B, T tokens, width W, heads H, kv heads G of head_dim D, vocabulary V, and n the bytes
of an activation (2 in mixed precision), four moments of a training are added up, and the largest
is the estimate.

    loss        weights, gradients of the step before and Adam's two moments:  4 P w
                (a run of a single update has its weights alone here:  P w)
                matrices cast by autocast, which the backward needs:  2 L W (10 W + 2 G D)
                what the backward needs of each layer:  B T W (2 w + 11 n) + B T 2 G D n
                baseline attention's score matrices:  c B H T T s in each layer, where s is 4, or 8
                if a format asks for FP64; c is 2 where the probabilities are rounded apart, else 1
                golden attention's q, k and v in FP64, in each layer:  8 B T (W + 2 G D)
                logits in the dtype of the loss, and their log-softmax:  2 B T V max(w, 4)
    backward    the same, less gradients and logits, and either two more score matrices of the
                layer whose attention is differentiated, or what the probe adds in that layer:
                (c + 2) score matrices of a baseline that is its shadow, or where it compares with
                the golden q, k, v, out, and their gradients in FP64:  8 B T (4 W + 4 G D)
    snapshot    4 P w, and one more copy of the weights:  P w. It is what `write_snapshot` copies,
                and what a candidate reads of its baseline to compare with
    held out    4 P w + 2 B T V max(w, 4)

Neither flash attention (twin or kernel) nor the golden ever holds a matrix of T x T: the first goes
block by block, the second by chunks of queries. An attention of the user's own is believed to hold
none, and so are PyTorch's. Under torch.compile only the residual stream and score matrices count as
kept, since a compiler may compute the rest again.

These are our GPT's. The weights of any other model, and what its backward needs, are counted on the
device "meta" (`model_size`): w and n times as many numbers as it saves there, less what autograd
adds in mixed precision, but for the matrices of linear layers that autocast casts.

Over ranks it is what one rank holds: its share of the batch, of each weight and its moments (over
shards and tensor parallel ranks), and of each activation and score (over tensor parallel ranks).
What FSDP2 gathers of a block for its products is left out. Each rank draws the whole model first,
in the memory of its CPU:

    start       P w, which no layout divides

On a GPU all but that is the device's, and the host has to hold a copy of the weights. Leaves out
text, libraries (some 300 MB a process) and what allocators lose; and what the machine has
(`machine_memory`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from attention_kernels.formats import FORMATS, Format, format_named
from attention_kernels.profiles import BASELINE_PROFILES, DEFAULT_BASELINE_PROFILE
from stability.config.parallel import ParallelConfig
from stability.config.precision import emulated_format, parse_precision
from stability.config.schema import ArmConfig, AttentionConfig, ModelConfig
from stability.study.assemble import resolve_device
from stability.study.model_size import size_of

__all__ = [
    "Estimate",
    "Part",
    "estimate_memory",
    "kept_for_backward",
    "parameter_count",
    "weight_bytes",
]

FP64_BYTES = 8
_FORMULA = "gpt2"
"""The builder whose models the formula above is of."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that fills memory, in words, e.g. "logits of 4 x 128 x 256", and its bytes."""

    name: str
    bytes: int

    def over(self, ranks: int) -> "Part":
        """Return what one of `ranks` holds that share it."""
        return self if ranks == 1 else Part(f"{self.name}, over {ranks} ranks", self.bytes // ranks)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run holds at the moment at which it holds most."""

    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(part.bytes for part in self.parts)

    @property
    def largest(self) -> Part:
        """What takes most of it."""
        return max(self.parts, key=lambda part: part.bytes)

    def of_all(self, ranks: int) -> "Estimate":
        """Return what as many ranks hold together."""
        if ranks == 1:
            return self
        return Estimate(
            tuple(Part(f"{x.name}, on each of {ranks} ranks", ranks * x.bytes) for x in self.parts)
        )


@dataclass(frozen=True, slots=True)
class _Widths:
    """Bytes of a number, by what it is, and the format of q, k and v."""

    weight: int
    """And of the residual stream, of gradients and of Adam's moments."""
    activation: int
    cast: int
    """Of a weight's copy for the products; 0 if there is none."""
    inputs: Format

    @property
    def loss(self) -> int:
        """Logits are widened for the loss."""
        return max(self.weight, 4)


_WIDTHS = {
    "64-true": _Widths(8, 8, 0, FORMATS["fp64"]),
    "32-true": _Widths(4, 4, 0, FORMATS["fp32"]),
    "bf16-true": _Widths(2, 2, 0, FORMATS["bf16"]),
    "bf16-mixed": _Widths(4, 2, 2, FORMATS["bf16"]),
    "16-mixed": _Widths(4, 2, 2, FORMATS["fp16"]),
}


def estimate_memory(config: ArmConfig, until: int) -> Estimate:
    """Return the least that a rank of a run of `config` up to step `until` holds at its peak.

    On a GPU it is the device's.
    """
    layout, whole = config.parallel, config
    train = replace(config.train, batch_size=config.train.batch_size // layout.parts)
    config = replace(config, train=train, parallel=ParallelConfig())
    widths = _widths(config.precision)
    kept = kept_for_backward(config)
    logits = _logits(config, widths)
    has_update_before = until > 1
    moments = (
        [_state(config, widths, 4 if has_update_before else 1), *kept, logits],
        [_state(config, widths, 3 if has_update_before else 1), *kept, *_transient(config, widths)],
        [_state(config, widths, 5)],
        [_state(config, widths, 4), *([logits] if config.held_out.share else ())],
    )
    of_rank = [
        [state.over(layout.shard * layout.tensor), *(part.over(layout.tensor) for part in rest)]
        for state, *rest in moments
    ]
    if layout.ranks > 1 and resolve_device(whole).type != "cuda":
        of_rank.append([_state(config, widths, 1)])
    return max(map(_estimate, of_rank), key=lambda estimate: estimate.bytes)


def kept_for_backward(config: ArmConfig) -> list[Part]:
    """Return what the backward needs of all layers and can't compute again."""
    widths = _widths(config.precision)
    return [*_activations(config, widths), *_scores_kept(config, widths)]


def parameter_count(model: ModelConfig) -> int:
    """Return how many parameters a model of this shape has; 0 where that can't be told."""
    if model.builder != _FORMULA:
        return size_of(model, 1).parameters
    width, head_dim, kv_width = model.width, model.head_dim, model.kv_width
    norms = 2 * head_dim if model.qk_norm else 0
    biases = width + kv_width + width + 4 * width + width  # the keys have none
    block = _matrices(model) + biases + 2 * 2 * width + norms
    return (model.vocab_size + model.context) * width + model.depth * block + 2 * width


def weight_bytes(config: ArmConfig) -> int:
    """Return the bytes of all weights as they are trained, and written to a snapshot."""
    return parameter_count(config.model) * _widths(config.precision).weight


def _matrices(model: ModelConfig) -> int:
    """Return the weights in the matrices of one block of our GPT."""
    return model.width * (2 * model.width + 2 * model.kv_width + 8 * model.width)


def _widths(precision: str) -> _Widths:
    # modules of their own hold as much as the default's or more: an estimate is a lower one. What
    # one of them does not cast is no copy, though
    wanted = parse_precision(precision)
    format = emulated_format(wanted.default)
    if format:
        return _Widths(4, 2 if wanted.modules else 4, 0, format)
    widths = _WIDTHS[wanted.default]
    return replace(widths, cast=0) if wanted.modules or wanted.of_blocks else widths


def _estimate(parts: Iterable[Part]) -> Estimate:
    return Estimate(tuple(part for part in parts if part.bytes))


def _state(config: ArmConfig, widths: _Widths, copies: int) -> Part:
    count = parameter_count(config.model)
    named = {
        1: "weights",
        3: "weights and Adam's moments",
        4: "weights, gradients and Adam's moments",
        5: "weights, gradients, Adam's moments and a snapshot",
    }
    return Part(f"{named[copies]} of {count:,} parameters", copies * count * widths.weight)


def _activations(config: ArmConfig, widths: _Widths) -> list[Part]:
    """Return what the backward needs of all layers, less the scores."""
    model = config.model
    tokens = config.train.batch_size * model.context
    residual, cast = 2 * widths.weight * model.width, 0
    products = widths.activation * (11 * model.width + 2 * model.kv_width)
    kept = model.depth * tokens * (residual + products)
    if config.train.compile:
        kept = model.depth * tokens * residual // 2
    elif model.builder == _FORMULA:
        cast = model.depth * widths.cast * _matrices(model)
    else:
        size = size_of(model, config.train.batch_size)
        kept, cast = size.kept * widths.activation // 4, size.block_matrices * widths.cast
    name = (
        f"activations of {_times(model.depth, 'layer')}, {config.train.batch_size} x "
        f"{model.context} tokens of width {model.width}"
    )
    return [
        Part(name, kept),
        Part(f"weights cast for the products of {model.depth} layers", cast),
    ]


def _logits(config: ArmConfig, widths: _Widths) -> Part:
    shape = (config.train.batch_size, config.model.context, config.model.vocab_size)
    batch, context, vocab_size = shape
    name = f"logits of {batch} x {context} tokens, {vocab_size} kinds of them, and their softmax"
    return Part(name, 2 * batch * context * vocab_size * widths.loss)


def _scores_kept(config: ArmConfig, widths: _Widths) -> list[Part]:
    """Return what else the backward needs of the attention of all layers."""
    return [
        _scores(config, attention, widths, _kept_matrices(attention, widths), len(layers))
        for attention, layers in _attention_by_layer(config)
        if layers and attention.implementation == "baseline"
    ] + [
        _in_fp64(config, "the golden's copies", (1, 2), len(layers))
        for attention, layers in _attention_by_layer(config)
        if layers and attention.implementation == "golden" and config.precision != "64-true"
    ]


def _transient(config: ArmConfig, widths: _Widths) -> list[Part]:
    """Return what is added while one layer's attention is differentiated, the most of it."""
    found: list[list[Part]] = [[]]
    for attention, layers in _attention_by_layer(config):
        if layers and attention.implementation == "baseline":
            found.append([_scores(config, attention, widths, 2, 1)])
    if _is_probed(config):
        for shadow in config.probe.shadows:
            if shadow.implementation == "baseline":
                matrices = _kept_matrices(shadow, widths) + 2 if config.probe.backward else 2
                found.append([_scores(config, shadow, widths, matrices, 1, "the probe's ")])
        if config.probe.golden:
            # q, k, v and out, and forward and backward their gradients
            tensors = (4, 4) if config.probe.backward else (1, 2)
            found.append([_in_fp64(config, "the probe's copies", tensors)])
    return max(found, key=lambda parts: sum(part.bytes for part in parts))


def _attention_by_layer(config: ArmConfig) -> list[tuple[AttentionConfig, list[str]]]:
    """Return the attentions that train the layers, each with the layers that are all its own."""
    names = config.model.layer_names
    changed = config.attention
    if not changed.is_partial:
        return [(changed, names)]
    if changed.direction != "both":  # which of the two keeps what is not told from here
        return []
    own = [name for name in names if any(fnmatchcase(name, glob) for glob in changed.layers)]
    return [
        (changed, own),
        (config.probe.shadows[0], [name for name in names if name not in own]),
    ]


def _scores(
    config: ArmConfig,
    attention: AttentionConfig,
    widths: _Widths,
    matrices: int,
    layers: int,
    whose: str = "",
) -> Part:
    model, batch = config.model, config.train.batch_size
    work = _work_format(attention, widths)
    # `Format.name` is lower case, as in a config
    name = (
        f"{whose}attention scores of {model.heads} heads x {model.context} x {model.context} in "
        f"{work.upper()}, {_times(batch, 'sequence')}"
        + (f", {_times(layers, 'layer')}" if not whose else "")
    )
    matrix = batch * model.heads * model.context**2 * (8 if work == "fp64" else 4)
    return Part(name, matrices * layers * matrix)


def _formats(attention: AttentionConfig, widths: _Widths) -> dict[str, Format]:
    """Return the formats of a baseline's rounding points, by field; none if it has no such."""
    profile = BASELINE_PROFILES.get(attention.profile or DEFAULT_BASELINE_PROFILE)
    if profile is None:
        return {}
    named = {**profile.to_dict(), **attention.numerics}
    points = ("operands", "products", "scores", "softmax", "probabilities", "output")
    return {
        point: widths.inputs if named[point] == "input" else format_named(str(named[point]))
        for point in points
    }


def _work_format(attention: AttentionConfig, widths: _Widths) -> str:
    formats = _formats(attention, widths).values()
    wide = FORMATS["fp32"]
    return "fp32" if all(each.fits(wide) for each in (*formats, widths.inputs)) else "fp64"


def _kept_matrices(attention: AttentionConfig, widths: _Widths) -> int:
    """Return how many score matrices the backward keeps: the softmax, and P if rounding copies."""
    rounded = _formats(attention, widths).get("probabilities")
    work = FORMATS[_work_format(attention, widths)]
    return 1 if rounded is None or rounded.changes_nothing(work) else 2


def _is_probed(config: ArmConfig) -> bool:
    """Whether the probe looks at some layer at step 0, which every run takes."""
    probe = config.probe
    names = config.model.layer_names
    is_listed = 0 in probe.steps if probe.steps else probe.every > 0
    is_due = is_listed or probe.per_decade > 0
    return is_due and any(fnmatchcase(name, glob) for name in names for glob in probe.layers)


def _in_fp64(config: ArmConfig, whose: str, tensors: tuple[int, int], layers: int = 1) -> Part:
    """Return what so many tensors of q's shape, and of k's, take in FP64."""
    model, batch = config.model, config.train.batch_size
    width = tensors[0] * model.attention_width + tensors[1] * model.kv_width
    name = (
        f"{whose} of q, k and v in FP64, {batch} x {model.context} tokens of width {model.width}, "
        f"{_times(layers, 'layer')}"
    )
    return Part(name, layers * FP64_BYTES * batch * model.context * width)


def _times(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
