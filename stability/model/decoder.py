"""What a study asks of a model, and the builders that make one by the name in a config.

A decoder is any `nn.Module` that takes tokens `(batch, tokens)` and returns logits `(batch, tokens,
vocab_size)`, and calls the attention function it was given for each layer once a pass. Adding a
model is one file with a function of (config, attention): named in a config as `module:function`, or
by a package in its entry points `stability.models`.

Somebody else's model is tried on a few tokens before it trains: whether it runs, gives finite
logits of that shape, looks at no later token, and attends by what it was given. Leaves out the
initial weights of our own models (`initial_weights`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention_kernels import AttentionFn
from stability.config.model import HUGGINGFACE, ModelConfig
from stability.config.plugins import MODELS, plugins
from stability.config.user_functions import import_function
from stability.model.gpt import GPT
from stability.model.llama import Llama

__all__ = ["Builder", "Decoder", "LayerAttention", "attentions_of", "blocks_of", "build_decoder"]

_TRIED_TOKENS = 8


class Decoder(Protocol):
    """A causal decoder; besides this it is an `nn.Module`."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `(batch, tokens, vocab_size)` for int64 `tokens` `(batch, tokens)`."""
        ...


class Builder(Protocol):
    """Makes a decoder whose layer i attends by `attention[i]`."""

    def __call__(self, config: ModelConfig, attention: Sequence[AttentionFn]) -> nn.Module:
        """Return a `Decoder` of `config`'s shape. `config.options` are free-form.

        Each attention is called as `attention[i](q, k, v, causal=True, scale=None)`, with k and v
        of kv_heads. Weights are drawn from torch's generator, which is seeded.
        """
        ...


class LayerAttention:
    """The attention of one layer as somebody else's model holds it, whatever it computes by now."""

    def __init__(self, function: AttentionFn) -> None:
        self.function: Callable[..., Tensor] = function
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """What a call is made in: it takes the attention out of what else the model runs in."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attend by the present function, under autocast in its dtype, as PyTorch's own would.

        A model that turns q and k by angles in FP32 hands them over wider than v.
        """
        kind = q.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            q, k, v = (x.to(dtype) for x in (q, k, v))
        with self.around():
            return self.function(q, k, v, **options)


def build_decoder(
    config: ModelConfig,
    attention: Sequence[AttentionFn],
    *,
    seed: int = 0,
    may_ignore_attention: bool = False,
) -> nn.Module:
    """Return the model of `config`, on the CPU or in the device context it is called in.

    A model that is not ours has the weights that its own code draws from `seed`, and is tried
    before it is returned; `may_ignore_attention` says whether it may compute without the attention
    it is given. Its state has each tensor once, whichever names share it. ValueError, one line,
    for a builder that can't be imported, raises, or makes no decoder.
    """
    if config.is_ours:
        return {"gpt2": GPT, "llama": Llama}[config.builder](config, attention)
    slots = tuple(map(LayerAttention, attention))
    name = config.builder
    build = _builder(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = build(config, slots)
        except Exception as error:  # a user's function may raise anything
            if name == HUGGINGFACE and isinstance(error, ValueError):
                raise
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(
                f"model: {name} must build a model of (config, attention): {said}"
            ) from (error)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {name} must return a torch.nn.Module, got {type(model).__name__}")
    _share_state(model)
    vars(model)["attention_slots"] = slots
    if not any(parameter.is_meta for parameter in model.parameters()):
        _try_out(model.train(), config, slots, may_ignore_attention)
    return model.train()


def attentions_of(model: nn.Module) -> tuple[LayerAttention, ...]:
    """Return the attentions of a model that is not ours, whose functions can be exchanged."""
    return vars(model).get("attention_slots", ())


def blocks_of(model: nn.Module, depth: int) -> dict[str, nn.Module]:
    """Return the layers of a model by their names, `layer_<i>`; empty where it has no such list.

    They are the first container, from the outside in, that holds as many modules as it has layers.
    """
    for module in model.modules():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if is_list and len(module) == depth:
            return {f"layer_{i}": block for i, block in enumerate(module.children())}
    return {}


def _builder(config: ModelConfig) -> Builder:
    name = config.builder
    if name == HUGGINGFACE:
        from stability.model.huggingface import build_huggingface  # optional: transformers

        return build_huggingface
    entry = plugins(MODELS).get(name)
    return import_function(entry.value if entry else name, "model.builder")


def _share_state(model: nn.Module) -> None:
    """Let the state of `model` hold a parameter of several names once, and be loaded so."""
    seen: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            aliases[name] = first
    if not aliases:
        return

    def drop(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for alias in aliases:
            state.pop(prefix + alias, None)

    def add(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for alias, first in aliases.items():
            if prefix + first in state:
                state.setdefault(prefix + alias, state[prefix + first])

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_pre_hook(add)


def _try_out(
    model: nn.Module,
    config: ModelConfig,
    slots: Sequence[LayerAttention],
    may_ignore_attention: bool,
) -> None:
    """ValueError unless `model` is a causal decoder that attends once a layer by its `slots`."""
    name, count = config.builder, min(_TRIED_TOKENS, config.context)
    tokens, calls = torch.arange(count)[None] % config.vocab_size, [0] * len(slots)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _standing_in(slots, calls, name):
        model.eval()
        try:
            logits = model(tokens)
            _check_logits(logits, (1, count, config.vocab_size), name)
            evaluated = list(calls)
            _check_causal(model, tokens, logits, config)
            is_asked = name != HUGGINGFACE
            trained = _calls_in_training(model, tokens, calls) if is_asked else evaluated
        except ValueError:
            raise
        except Exception as error:  # a user's model may raise anything
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(
                f"model: {name} must give logits for tokens (1, {count}): {said}"
            ) from error
        finally:
            model.train()
    if not (may_ignore_attention and not any(evaluated)):
        _check_calls(evaluated, trained, name)


def _check_causal(model: nn.Module, tokens: Tensor, logits: Tensor, config: ModelConfig) -> None:
    """ValueError if another last token moves the `logits` of those before it."""
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % config.vocab_size
    if not torch.allclose(logits[:, :-1], model(other)[:, :-1], rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"model: {config.builder} must look at no later token: the logits of earlier ones "
            "change with the last"
        )


def _check_calls(evaluated: Sequence[int], trained: Sequence[int], name: str) -> None:
    """ValueError unless each layer has attended once, in evaluation and in training mode."""
    if not any(evaluated):
        raise ValueError(
            f"model: {name} made no attention call in a forward pass of one block: the arm's "
            "attention would change nothing"
        )
    for mode, counts in (("", evaluated), (" in training mode", trained)):
        layer = next((i for i, number in enumerate(counts) if number != 1), None)
        if layer is not None:
            raise ValueError(
                f"model: {name} must call the attention of each layer once a pass, called that of "
                f"layer_{layer} {counts[layer]} times{mode}"
            )


def _calls_in_training(model: nn.Module, tokens: Tensor, calls: list[int]) -> list[int]:
    """Return how often each layer attends in a pass in training mode, which may be another path.

    Hugging Face's models are asked by their own interface, which sees each call.
    """
    before = list(calls)
    model.train()
    model(tokens)
    return [now - was for now, was in zip(calls, before, strict=True)]


def _check_logits(logits: Any, shape: tuple[int, ...], name: str) -> None:
    if not isinstance(logits, Tensor) or tuple(logits.shape) != shape:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"model: {name} must return logits (batch, tokens, vocab_size), {shape} here, got "
            f"{found}"
        )
    if not bool(logits.isfinite().all()):
        raise ValueError(f"model: {name} must return finite logits, got others before any update")


@contextmanager
def _standing_in(slots: Sequence[LayerAttention], calls: list[int], name: str) -> Iterator[None]:
    """Inside, PyTorch's own attention computes in all `slots`, and `calls` counts them."""

    def stand_in(index: int) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
            if given.get("causal") is not True or set(given) - {"causal", "scale"}:
                raise ValueError(
                    f"model: {name} must call attention(q, k, v, causal=True, scale=None), called "
                    f"it with {', '.join(f'{key}={value!r}' for key, value in given.items())}"
                )
            calls[index] += 1
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=given.get("scale"), enable_gqa=True
            )

        return attend

    present = [slot.function for slot in slots]
    for index, slot in enumerate(slots):
        slot.function = stand_in(index)
    try:
        yield
    finally:
        for slot, function in zip(slots, present, strict=True):
            slot.function = function
