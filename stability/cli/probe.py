"""`stability probe`: the instrument on a Hugging Face model, from the shell.

Loads a model with random or given weights, runs text through it forward and backward, and shows
where a candidate attention deviates. Leaves out the instrument (`attention.session`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import torch
from rich.console import Console
from torch import Tensor, nn

from stability.analysis.locate import locate, sentences
from stability.analysis.probe_records import read_probe
from stability.cli.output import print_json
from stability.data.hub import offline_if_unreachable
from stability.data.tokenizers import load_tokenizer
from stability.intercept.session import shadow
from stability.model.pretrained import Weights, language_loss, load_pretrained
from stability.probe.attention_registry import resolve_attention
from stability.probe.probe_recorder import ProbeRecorder
from stability.report.page.html import write_probe_page
from stability.report.terminal.probe import print_probe

__all__ = ["probe"]

_DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "bf16-mixed": torch.float32}


def probe(
    model: str = "",
    text: str = "",
    candidate: str = "flash:fa2",
    weights: Weights = "random",
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
    for option, given in {"model": model, "text": text}.items():
        if not given:
            raise ValueError(f"probe: {option} must be given, as --{option} ...")
    for option, value in {"steps": steps, "every": every, "batch": batch, "length": length}.items():
        if value < 1:
            raise ValueError(f"probe: {option} must be at least 1, got {value}")
    candidates = [word.strip() for word in candidate.split(",") if word.strip()]
    cpu = torch.device("cpu")
    named = {one: resolve_attention(one, cpu) for one in candidates}
    if not named:
        raise ValueError(f"probe: candidate must name an attention, got {candidate!r}")
    with offline_if_unreachable():
        loaded, dropped = load_pretrained(model, weights, seed=seed, attention=attention)
    blocks, tokens_of = _blocks(Path(text), tokenizer, model, loaded, batch * steps, length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = loaded.to(device, _DTYPES[precision])
    folder = out / (name or _plain(f"probe-{Path(model).name}-{candidate}"))
    own = {"implementation": f"{type(loaded).__name__}'s own {attention}"}
    described = {one.name: one.description for one in named.values()}
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
        list(candidates),
        every=every,
        layers=[word.strip() for word in layers.split(",")],
        golden=golden,
        heads=heads,
        positions=positions,
        inside=inside,
        inherited=inherited,
        replace=[word.strip() for word in replace.split(",") if word.strip()],
        direction=direction,
        sinks=[sink.write],
    ) as session:
        _run(loaded, blocks.to(device), batch, lr, precision == "bf16-mixed", session.step)
    sink.describe(session.layers, session.steps)
    sink.close()
    page = write_probe_page(folder)
    if json:
        found = [str(line) for line in sentences(locate(read_probe(folder).metrics))]
        print_json({"records": str(folder), "stands_out": found})
        return 0
    print_probe(folder, console)
    console.print(f"\nreport: {page}", soft_wrap=True, highlight=False)
    return 0


def _run(
    model: nn.Module, blocks: Tensor, batch: int, lr: float, mixed: bool, step: Callable[[], None]
) -> None:
    """Run each batch forward and backward, update the weights if there is a rate, end the step."""
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


def _blocks(
    text: Path, tokenizer: str, name: str, model: nn.Module, count: int, length: int
) -> tuple[Tensor, str]:
    """Return `count` blocks of token ids `(count, length)`, and what made them."""
    own = Path(name) / "tokenizer.json"
    chosen = tokenizer or (str(own) if own.is_file() else "bytes" if Path(name).is_dir() else name)
    if not text.is_file():
        raise ValueError(f"probe: text must be a file, got {str(text)!r}")
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
    console: Console, dropped: list[str], tokens_of: str, weights: str, precision: str
) -> None:
    console.print(f"{weights} weights, {precision}; tokens: {tokens_of}", style="dim")
    if dropped:
        console.print(f"set to 0, since a shadow cannot repeat it: {', '.join(dropped)}")


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)[:80]
