"""What of this package runs on this machine, and how fast: the end of `stability doctor`."""

import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial
from shutil import which
from typing import Any, NamedTuple

__all__ = ["Ability", "abilities", "speeds"]

REPEATS = 3


class Ability(NamedTuple):
    """Something that can be done here, or not, and why."""

    name: str
    available: bool
    how: str


def abilities(device: str, gpus: int) -> list[Ability]:
    """Return what runs here, each with how, or with what is missing."""
    on_gpu = device == "cuda"
    cores = os.cpu_count() or 1
    ranks = f"NCCL, {gpus} GPUs" if gpus > 1 else f"gloo, {cores} cores; a GPU holds one rank"
    return [
        Ability("studies and the demo", True, "on the GPU" if on_gpu else "on the CPU"),
        Ability(
            "Triton kernels", on_gpu, "compiled" if on_gpu else "no CUDA device; the twin runs"
        ),
        Ability("layouts over ranks", gpus > 1 or cores > 1, ranks),
        _command("--executor slurm", "sbatch", "submitit", "slurm"),
        _package("--executor ray", "ray", "ray"),
        _package("files at s3://", "s3fs", "s3"),
        _package("Hugging Face models", "transformers", "transformers"),
        _package("stability workspace", "wandb_workspaces", "workspace"),
    ]


def _package(name: str, package: str, extra: str) -> Ability:
    if importlib.util.find_spec(package) is not None:
        return Ability(name, True, f"{package} is installed")
    return Ability(name, False, f"pip install 'training-stability[{extra}]'")


def _command(name: str, command: str, package: str, extra: str) -> Ability:
    if which(command) is None:
        return Ability(name, False, f"{command} is not on the PATH")
    return _package(name, package, extra)


def speeds(device: str) -> dict[str, float | str]:
    """Return what was timed here, in milliseconds, the fastest of a few; or why it could not be.

    An update of the demo's model without its optimizer, and attention forward and backward by the
    plain baseline and by `flash:fa2`. Random numbers are those of a generator of their own.
    """
    import torch  # heavy from here on

    from stability.config.model import ModelConfig
    from stability.config.schema import AttentionConfig
    from stability.model.decoder import build_decoder
    from stability.model.lightning_module import next_token_loss
    from stability.probe.attention_registry import resolve_attention

    place = torch.device(device)
    generator = torch.Generator().manual_seed(0)
    shape = ModelConfig(depth=4, width=128, heads=4, context=128, vocab_size=256)
    named = {
        "baseline": AttentionConfig(),
        "flash:fa2": AttentionConfig(implementation="flash", profile="fa2"),
    }
    attend = {name: resolve_attention(given, place).function for name, given in named.items()}
    with torch.random.fork_rng(devices=[]):
        model = build_decoder(shape, [attend["baseline"]] * shape.depth, seed=0).to(place)
    tokens = torch.randint(256, (4, shape.context + 1), generator=generator).to(place)
    operands = [
        torch.randn(1, 4, 512, 64, generator=generator).to(place, torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]

    def update() -> None:
        with torch.autocast(place.type, torch.bfloat16):
            loss = next_token_loss(model(tokens[:, :-1]), tokens)
        loss.backward()

    def attention(function: Callable[..., Any]) -> None:
        function(*operands, causal=True).float().sum().backward()

    calls = {"forward and backward of the demo's model, 4 x 128 tokens": update}
    for name, function in attend.items():
        said = f"attention {name}, (1, 4, 512, 64), forward and backward"
        calls[said] = partial(attention, function)
    timed: dict[str, float | str] = {}
    for said, call in calls.items():
        try:
            timed[said] = _fastest(call, place)
        except Exception as error:  # a GPU that is full, or that a compiler doesn't know
            timed[said] = " ".join(str(error).split())[:80] or type(error).__name__
    return timed


def _fastest(call: Callable[[], None], place: Any) -> float:
    import torch

    def wait() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    found = []
    call()
    for _ in range(REPEATS):
        wait()
        start = time.perf_counter()
        call()
        wait()
        found.append(1000 * (time.perf_counter() - start))
    return min(found)
