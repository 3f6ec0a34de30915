"""`stability probe`: compares a candidate attention with a Hugging Face model's own.

It loads a model with random or given weights, runs text through it forward and backward, and shows
where the candidate deviates. The comparison itself is `stability.shadow` (`intercept.session`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from stability.cli.output import FAILS, HOLDS, UNDECIDED, print_json
from stability.report.view.plain_text import as_text

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from stability.analysis.probe_answer import ProbeAnswer

__all__ = ["exit_code_of", "probe"]

_DTYPES = {"32": "float32", "bf16": "bfloat16", "bf16-mixed": "float32"}
"""The torch dtype of the weights, by precision."""


def probe(
    model: str = "",
    text: str = "",
    candidate: str = "flash:fa2",
    weights: Literal["random", "given"] = "random",
    attention: Literal["sdpa", "eager"] = "sdpa",
    steps: int = 1,
    every: int = 1,
    lr: float = 0.0,
    batch: int = 2,
    length: int = 128,
    precision: Literal["32", "bf16", "bf16-mixed"] = "bf16-mixed",
    tokenizer: str = "",
    layers: str = "*",
    golden: bool = True,
    heads: bool = True,
    positions: int = 0,
    inside: bool = True,
    inherited: bool = False,
    replace: str = "",
    direction: Literal["both", "forward", "backward"] = "both",
    seed: int = 0,
    out: Path = Path("runs"),
    name: str = "",
    json: bool = False,
) -> int:
    """Compare a candidate attention with a model's own, call by call, forward and backward.

    Exits 1 if a candidate fails, returns what is not finite, was never compared, or is beyond a
    limit against FP64: an error ratio of 2, a gain of 0.1 %, a bias of 0.05 ULP. Exits 3 if none of
    this was found, but some layer's attention could not be compared.

    Args:
        model: a folder with a config.json, or a name on the Hugging Face hub
        text: a text file to run through the model; README.md will do
        candidate: attentions with commas, e.g. flash:fa2,mypkg:my_attention
        weights: random, or those given with the model
        attention: the model's own implementation
        steps: batches, each forward and backward
        every: look at each so-many-th step
        lr: learning rate of AdamW between the steps; 0 leaves the weights as they are
        batch: sequences a step
        length: tokens a sequence
        precision: of weights and activations
        tokenizer: bytes, a tokenizer.json or a name; empty is the model's own, else bytes
        layers: globs of layers with commas, e.g. *.0.*,*.11.*
        golden: also measure both against FP64
        heads: also each head
        positions: also so many ranges of positions
        inside: also logits, entropy, repeated maxima, LSE
        inherited: run the forward pass again in the candidate's own stream
        replace: globs of layers in which the candidate computes instead
        direction: of what is replaced
        seed: of random weights
        out: folder that gets the records
        name: of the records' folder; the model's and the candidate's names if empty
        json: print what stands out as JSON
    """
    _check_given(model=model, text=text)
    _check_positive(steps=steps, every=every, batch=batch, length=length)
    candidates = _words(candidate)
    if not candidates:
        raise ValueError(f"probe: candidate must name an attention, got {candidate!r}")
    _check_file(Path(text))
    import torch  # heavy, and so is the rest: transformers, plotly
    from rich.console import Console

    from stability.data.hub import offline_if_unreachable
    from stability.intercept.session import shadow
    from stability.model.pretrained import load_pretrained
    from stability.probe.attention_registry import resolve_attention
    from stability.probe.probe_recorder import ProbeRecorder

    cpu = torch.device("cpu")
    named = [resolve_attention(one, cpu) for one in candidates]
    with offline_if_unreachable():
        loaded, dropped = load_pretrained(model, weights, seed=seed, attention=attention)
    blocks, tokens_of = _blocks(Path(text), tokenizer, model, loaded, batch * steps, length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = loaded.to(device, getattr(torch, _DTYPES[precision]))
    folder = out / (name or _plain(f"probe-{Path(model).name}-{candidate}"))
    own = {"implementation": f"{type(loaded).__name__}'s own {attention}"}
    described = {one.name: one.description for one in named}
    replaced = {**next(iter(described.values())), "layers": replace, "direction": direction}
    sink = ProbeRecorder(
        folder,
        model=model,
        primary=replaced if replace else own,
        shadows={"own": own} if replace else described,
        golden=golden,
    )
    console = Console(stderr=json)
    _say(console, dropped, tokens_of, weights, precision)
    with shadow(
        loaded,
        [*candidates],
        every=every,
        layers=_words(layers),
        golden=golden,
        heads=heads,
        positions=positions,
        inside=inside,
        inherited=inherited,
        replace=_words(replace),
        direction=direction,
        sinks=[sink.write],
    ) as session:
        _run(loaded, blocks.to(device), batch, lr, precision == "bf16-mixed", session.step)
    sink.end(session.layers, session.steps)
    return _show(folder, console, as_json=json)


def _show(folder: Path, console: "Console", *, as_json: bool) -> int:
    """Write the page, print the table, or as JSON the answer, and return the exit code."""
    from stability.analysis.probe_answer import answer_of_probe  # heavy: numpy
    from stability.analysis.probe_records import read_probe
    from stability.report.page.html import write_probe_page  # heavy: plotly

    page = write_probe_page(folder)
    answer = answer_of_probe(read_probe(folder))
    if as_json:
        print_json(
            {
                "records": str(folder),
                "holds": answer.holds,
                "failures": answer.failures,
                "stands_out": answer.places,
                "below_the_noise": answer.unsure,
                "unseen": answer.unseen,
            }
        )
    else:
        from stability.report.terminal.probe import print_probe

        print_probe(folder, console)
        console.print(as_text(f"\nreport: {page}"), soft_wrap=True)
    return exit_code_of(answer)


def exit_code_of(answer: "ProbeAnswer") -> int:
    """Return the exit code of a probe's answer."""
    if not answer.holds:
        return FAILS
    return UNDECIDED if answer.unseen else HOLDS


def _run(
    model: "nn.Module",
    blocks: "Tensor",
    batch: int,
    lr: float,
    mixed: bool,
    step: Callable[[], None],
) -> None:
    """Run each batch forward and backward, update the weights if there is a rate, end the step."""
    import torch  # heavy

    from stability.model.pretrained import language_loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr) if lr else None
    autocast = torch.autocast(blocks.device.type, torch.bfloat16) if mixed else nullcontext()
    for tokens in blocks.split(batch):
        model.zero_grad()
        with autocast:
            loss = language_loss(model, tokens)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        step()


def _check_file(text: Path) -> None:
    if not text.is_file():
        raise ValueError(f"probe: text must be a file, got {str(text)!r}")


def _blocks(
    text: Path, tokenizer: str, name: str, model: "nn.Module", count: int, length: int
) -> tuple["Tensor", str]:
    """Return `count` blocks of token ids `(count, length)`, and the tokenizer that made them."""
    from stability.data.tokenizers import load_tokenizer  # heavy: torch

    own = Path(name) / "tokenizer.json"
    chosen = tokenizer or (str(own) if own.is_file() else "bytes" if Path(name).is_dir() else name)
    content = text.read_text(encoding="utf-8", errors="replace")
    ids = load_tokenizer(chosen).encode([content]).long()
    if len(ids) < count * length:
        raise ValueError(
            f"probe: text must hold steps * batch * length = {count * length} tokens, got "
            f"{len(ids)} in {str(text)!r}; lower one of them"
        )
    embeddings = cast("Any", model).get_input_embeddings()
    return ids[: count * length].remainder(embeddings.num_embeddings).view(count, length), chosen


def _say(
    console: "Console", dropped: list[str], tokens_of: str, weights: str, precision: str
) -> None:
    console.print(as_text(f"{weights} weights, {precision}; tokens: {tokens_of}", "dim"))
    if dropped:
        console.print(as_text(f"set to 0, since a shadow cannot repeat it: {', '.join(dropped)}"))


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)[:80]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _check_given(**options: str) -> None:
    for option, value in options.items():
        if not value:
            raise ValueError(f"probe: {option} must be given, as --{option} ...")


def _check_positive(**options: int) -> None:
    for option, value in options.items():
        if value < 1:
            raise ValueError(f"probe: {option} must be at least 1, got {value}")
