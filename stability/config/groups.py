"""The groups of an arm's config that decide its bits: model, attention, data, optimizer, training.

Frozen dataclasses, each checking its own values. Leaves out what only looks (`observation`) and
the arm and the study they make (`schema`).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "AttentionConfig",
    "DataConfig",
    "ModelConfig",
    "NudgeConfig",
    "OptimizerConfig",
    "SeedConfig",
    "TrainConfig",
    "require",
]

InitScheme = Literal["gpt2", "xavier", "kaiming", "orthogonal"]


def require(ok: bool, owner: str, rule: str, value: Any) -> None:
    """ValueError "<owner>: <rule>, got <value>" unless `ok`."""
    if not ok:
        raise ValueError(f"{owner}: {rule}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A pre-norm decoder. `kv_heads=0` means as many as heads."""

    depth: int
    width: int
    heads: int
    kv_heads: int = 0
    context: int
    vocab_size: int = 256
    qk_norm: bool = False
    init: InitScheme = "gpt2"

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "context", "vocab_size"):
            require(getattr(self, name) >= 1, "model", f"{name} must be >= 1", getattr(self, name))
        require(
            self.width % self.heads == 0,
            "model",
            f"width must be a multiple of heads ({self.heads})",
            self.width,
        )
        require(
            self.kv_heads >= 0 and self.heads % (self.kv_heads or self.heads) == 0,
            "model",
            f"kv_heads must divide heads ({self.heads})",
            self.kv_heads,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """An attention by registry name, with the numerics it runs at."""

    implementation: str = "baseline"
    """Registered, an entry point's name, or `module:function` of your own."""
    profile: str = ""
    """A profile of the implementation; empty means its default (`plain`, `fa2`)."""
    numerics: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Single numerics fields changed by name, e.g. `{block_k: 32}`."""
    engine: Literal["auto", "twin", "triton"] = "auto"
    layers: tuple[str, ...] = ("*",)
    """In an arm: globs of the layers that attend so; the others attend as the baseline does."""
    direction: Literal["both", "forward", "backward"] = "both"
    """In an arm: the direction that is computed so; the other is as the baseline's."""

    def __post_init__(self) -> None:
        require(bool(self.layers), "attention", "layers must name at least one", self.layers)

    @property
    def is_partial(self) -> bool:
        """Whether the baseline's attention computes a part."""
        return self.layers != ("*",) or self.direction != "both"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    source: str = "stdlib"
    """`stdlib`, a local .txt/.json/.jsonl/.parquet file, or a hub data set, `name[:config]`."""
    text_column: str = "text"
    split: str = "train"
    tokenizer: str = "bytes"
    """`bytes`, or the name or path of a Hugging Face tokenizer."""
    workers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to a tenth of the peak."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 20

    def __post_init__(self) -> None:
        require(self.lr > 0, "optimizer", "lr must be > 0", self.lr)
        require(self.eps > 0, "optimizer", "eps must be > 0", self.eps)
        require(
            all(0 <= beta < 1 for beta in self.betas),
            "optimizer",
            "betas must be in [0, 1)",
            self.betas,
        )
        for name in ("weight_decay", "warmup_steps"):
            require(
                getattr(self, name) >= 0, "optimizer", f"{name} must be >= 0", getattr(self, name)
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long an arm trains and what it writes down when."""

    steps: int = 200
    batch_size: int = 8
    grad_clip: float = 1.0
    log_every: int = 1
    snapshot_steps: tuple[int, ...] = ()
    """Steps with a snapshot besides 0 and the last; steps past the end are left out."""
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    """The last so many are kept; 0 keeps all, to fork from any of them."""
    compile: str = ""
    """A backend of torch.compile, e.g. `inductor`; empty is eager. Attention stays eager."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `lightning.Trainer`, passed through."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, "train", f"{name} must be >= 1", getattr(self, name))
        require(
            self.keep_checkpoints >= 0,
            "train",
            "keep_checkpoints must be >= 0",
            self.keep_checkpoints,
        )

    def planned_snapshots(self) -> list[int]:
        """Return the steps with a snapshot, sorted: the first, the last and those asked for."""
        return sorted({0, self.steps, *(s for s in self.snapshot_steps if 0 <= s <= self.steps)})


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedConfig:
    """`base` is the study's seed; the offsets move initial weights or data order alone."""

    base: int = 0
    init_offset: int = 0
    order_offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NudgeConfig:
    """Move every initial weight by `ulps` units in the last place, up or down by a seeded coin."""

    ulps: int = 0

    def __post_init__(self) -> None:
        require(self.ulps >= 0, "nudge", "ulps must be >= 0", self.ulps)
