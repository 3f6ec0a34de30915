"""What an arm and a study are: the frozen dataclasses whose values a YAML file holds.

From the inside out: the groups of an arm that decide its bits (model, attention, precision, data,
held-out text, optimizer, training, seeds), the groups that only look and change no bit (probe,
watch), the arm they make, what a study calls a pass, and the study. Each class checks its own
values. Leaves out reading YAML and naming where a mistake stands (`load`), the comparison of two
arms (`diff`), and every object that a name stands for (`study.assemble`).
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from attention_kernels.formats import FORMATS, Format, format_named
from stability.config.convert import nearest
from stability.config.trainer_keys import check_trainer

__all__ = [
    "AXES",
    "BASELINE",
    "NATIVE",
    "ArmConfig",
    "AttentionConfig",
    "Axis",
    "DataConfig",
    "HeldOutConfig",
    "ModelConfig",
    "NudgeConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "ProbeConfig",
    "Role",
    "SeedConfig",
    "StudyConfig",
    "TrainConfig",
    "WatchConfig",
    "emulated_format",
]

Axis = Literal[
    "attention",
    "precision",
    "init",
    "seed",
    "data_order",
    "optimizer_eps",
    "nudge",
    "many",
    "none",
]
"""What an arm changes; `many` only where a study allows several at once."""

Role = Literal["baseline", "candidate", "reference", "rerun", "nudge", "broken", "yardstick"]
"""What an arm is there for (`config.roles` says what each means and how it is recognised)."""

BASELINE = "baseline"
"""The arm that every other arm of its study is paired with."""

AXES: dict[Axis, str] = {
    "attention": "attention",
    "precision": "precision",
    "init": "model.init",
    "seed": "seed.init_offset",
    "data_order": "seed.order_offset",
    "optimizer_eps": "optimizer.eps",
    "nudge": "nudge",
}
"""The config path that each axis changes; `none`, the A/A control, changes nothing."""

InitScheme = Literal["gpt2", "xavier", "kaiming", "orthogonal"]

NATIVE = ("64-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed")
"""PyTorch's own precisions, as Lightning names them."""
_EMULATED = "emulated:"
"""Opens the name of an emulated precision; a format's name follows. The operands and outputs of
matmuls are rounded to any format that FP32 holds, and multiplied in FP32, so that an FP16 or FP8
run is affordable where no hardware has it (`model.precision`)."""


def _check_precision(name: str) -> None:
    """ValueError unless `name` is a native precision or `emulated:` and a format within FP32."""
    if name not in NATIVE and not name.startswith(_EMULATED):
        raise ValueError(
            f"precision: must be a known name or {_EMULATED}<format>, got {name!r}; "
            f"nearest: {nearest(name, NATIVE)}"
        )
    emulated_format(name)


def emulated_format(name: str) -> Format | None:
    """Return the format that the precision `name` emulates, None if it is native.

    ValueError if there is no such format, or if FP32 does not hold it.
    """
    if not name.startswith(_EMULATED):
        return None
    try:
        format = format_named(name.removeprefix(_EMULATED))
    except ValueError as error:
        raise ValueError(f"precision: {error}, in {name!r}") from error
    if not format.fits(FORMATS["fp32"]):
        raise ValueError(
            f"precision: must emulate a format that FP32 holds, got {name!r}; use 64-true"
        )
    return format


def _require(ok: bool, owner: str, rule: str, value: Any) -> None:
    """ValueError "<owner>: <rule>, got <value>" unless `ok`."""
    if not ok:
        raise ValueError(f"{owner}: {rule}, got {value!r}")


MOST_LAYERS = 4096
"""Layers are named one by one; the deepest published transformers have some thousand."""


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
        rule = f"depth must be at most {MOST_LAYERS}"
        _require(self.depth <= MOST_LAYERS, "model", rule, self.depth)
        for name in ("depth", "width", "heads", "context", "vocab_size"):
            _require(getattr(self, name) >= 1, "model", f"{name} must be >= 1", getattr(self, name))
        _require(
            self.width % self.heads == 0,
            "model",
            f"width must be a multiple of heads ({self.heads})",
            self.width,
        )
        _require(
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
    fault: str = ""
    """A known error planted on the attention, by its name in `attention_kernels.testing.FAULTS`."""

    def __post_init__(self) -> None:
        _require(bool(self.layers), "attention", "layers must name at least one", self.layers)

    @property
    def is_partial(self) -> bool:
        """Whether the baseline's attention computes a part."""
        return self.layers != ("*",) or self.direction != "both"


MOST_WORKERS = 1024
"""Of one loader: a node with more cores than that is not known to us."""


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

    def __post_init__(self) -> None:
        rule = f"workers must be from 0 to {MOST_WORKERS}, each is a process of its own"
        _require(0 <= self.workers <= MOST_WORKERS, "data", rule, self.workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutConfig:
    """The part of the text that no arm trains on, and how much of it is evaluated at snapshots.

    It changes which blocks are trained on, so it belongs to what decides a run's bits.
    """

    share: float = 0.05
    """Of the text's blocks; 0 trains on all of them and measures no loss on held-out text."""
    batches: int = 8
    """How many batches, of `train.batch_size` blocks each, `eval/loss` is the mean over."""
    prediction_batches: int = 1
    """How many of these batches' token log-probabilities are kept with each snapshot."""

    def __post_init__(self) -> None:
        _require(0 <= self.share < 1, "held_out", "share must be in [0, 1)", self.share)
        _require(self.batches >= 1, "held_out", "batches must be >= 1", self.batches)
        _require(
            0 <= self.prediction_batches <= self.batches,
            "held_out",
            f"prediction_batches must be between 0 and batches ({self.batches})",
            self.prediction_batches,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to a tenth of the peak."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 20

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            value = getattr(self, name)
            _require(0 < value < math.inf, "optimizer", f"{name} must be > 0 and finite", value)
        _require(
            all(0 <= beta < 1 for beta in self.betas),
            "optimizer",
            "betas must be in [0, 1)",
            self.betas,
        )
        decay, rule = self.weight_decay, "weight_decay must be >= 0 and finite"
        _require(0 <= decay < math.inf, "optimizer", rule, decay)
        _require(
            self.warmup_steps >= 0, "optimizer", "warmup_steps must be >= 0", self.warmup_steps
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long an arm trains and what it writes down when."""

    steps: int = 200
    batch_size: int = 8
    grad_clip: float = 1.0
    """Most of the gradient's norm; 0 clips nothing."""
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
    """Arguments of `lightning.Trainer`: `accumulate_grad_batches`, `gradient_clip_algorithm`."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "checkpoint_every"):
            _require(getattr(self, name) >= 1, "train", f"{name} must be >= 1", getattr(self, name))
        _require(
            self.keep_checkpoints >= 0,
            "train",
            "keep_checkpoints must be >= 0",
            self.keep_checkpoints,
        )
        steps = list(self.snapshot_steps)
        _require(min(steps, default=0) >= 0, "train", "snapshot_steps must be >= 0", steps)
        clip, rule = self.grad_clip, "grad_clip must be >= 0 and finite (0 clips nothing)"
        _require(0 <= clip < math.inf, "train", rule, clip)
        check_trainer(self.trainer)

    def planned_snapshots(self) -> list[int]:
        """Return the steps with a snapshot, sorted: the first, the last and those asked for."""
        return sorted({0, self.steps, *(s for s in self.snapshot_steps if 0 <= s <= self.steps)})


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedConfig:
    """`base` is the study's seed; the offsets move initial weights or data order alone."""

    base: int = 0
    init_offset: int = 0
    order_offset: int = 0

    def __post_init__(self) -> None:
        # torch's CPU generator keeps the low 32 bits of a seed, so that 2**32 would be 0 again and
        # another seed draw the same weights
        _require(0 <= self.base < 2**32, "seed", "base must be from 0 to 2**32 - 1", self.base)
        offset, rule = self.init_offset, "init_offset must be between -2**32 and 2**32"
        _require(abs(offset) < 2**32, "seed", rule, offset)


MOST_ULPS = 1024
"""A weight is moved ULP by ULP, so that a number without a bound would never end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NudgeConfig:
    """Move every initial weight by `ulps` units in the last place, up or down by a seeded coin."""

    ulps: int = 0
    draw: int = 0
    """Which coin: with another draw the same seed sends each weight another way."""

    def __post_init__(self) -> None:
        rule = f"ulps must be from 0 to {MOST_ULPS}: a nudge is the least that can be changed"
        _require(0 <= self.ulps <= MOST_ULPS, "nudge", rule, self.ulps)
        _require(self.draw >= 0, "nudge", "draw must be >= 0", self.draw)
        _require(
            self.ulps > 0 or self.draw == 0,
            "nudge",
            "draw must be 0 where ulps is 0 and no weight moves",
            self.draw,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """The dual-attention hook: when and where it looks, and at what.

    Due are those in `steps`, where none is given the multiples of `every`, and `per_decade`
    log-spaced steps between powers of ten; with none of them the probe is off.
    """

    every: int = 10
    steps: tuple[int, ...] = ()
    per_decade: int = 0
    shadows: tuple[AttentionConfig, ...] = (AttentionConfig(implementation="flash"),)
    """Run beside the primary; in arms that change the attention it is the baseline's own."""
    shadows_are: Literal["candidates", "baseline"] = "candidates"
    """Set by the study: `baseline` in arms that change the attention."""
    golden: bool = True
    """Also FP64: error ratios of candidate over baseline."""
    backward: bool = True
    """Also the gradients of q, k and v under the run's own gradient of the output."""
    layers: tuple[str, ...] = ("*",)
    """Globs of layer names, e.g. `layer_*`."""
    heads: bool = False
    """Also for each head."""
    positions: int = 0
    """Also for so many ranges of positions in the sequence."""
    inside: bool = False
    """Also logits, entropy, repeated maxima, LSE, norms of W_Q and the running sum of delta."""
    inherited: bool = False
    """Run the forward pass a second time, in the shadow's own stream."""
    overhead: float | str = 0.0
    """Most of the run's time that the probe may take, e.g. `5%`: layers take turns. 0: no bound."""
    gradient_every: int = 0
    """Every so many steps also the whole model's gradient; 0 switches it off."""
    gradient_sequences: int = 0
    """How many sequences of the batch gradient evidence looks at; 0: all."""
    seeds: Literal["all", "first"] = "all"
    """`first`: the study's first seed alone is looked at, and the others train unwatched."""

    def __post_init__(self) -> None:
        for name in ("every", "per_decade", "positions", "gradient_every", "gradient_sequences"):
            _require(getattr(self, name) >= 0, "probe", f"{name} must be >= 0", getattr(self, name))
        _require(min(self.steps, default=0) >= 0, "probe", "steps must be >= 0", list(self.steps))
        share = self.overhead_share
        _require(
            share is not None and 0 <= share < 1,
            "probe",
            "overhead must be in [0, 1) or below 100%",
            self.overhead,
        )
        _require(bool(self.layers), "probe", "layers must name at least one", self.layers)
        if self.is_on:
            _require(bool(self.shadows), "probe", "shadows must name at least one", self.shadows)

    @property
    def overhead_share(self) -> float | None:
        """`overhead` as a number; None if it is none."""
        text = str(self.overhead).strip()
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return None

    @property
    def is_on(self) -> bool:
        """Whether any step is ever due."""
        return bool(self.every or self.steps or self.per_decade)


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """What is watched of the run itself: gradients, Adam's RMS_t, log Z, loss spikes."""

    every: int = 10
    """0 switches it off."""

    def __post_init__(self) -> None:
        _require(self.every >= 0, "watch", "every must be >= 0", self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmConfig:
    """One training run, fully described."""

    model: ModelConfig
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    precision: str = "bf16-mixed"
    """`64-true`, `32-true`, `bf16-mixed`, `bf16-true`, `16-mixed` or `emulated:<format>`."""
    seed: SeedConfig = field(default_factory=SeedConfig)
    nudge: NudgeConfig = field(default_factory=NudgeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        _check_precision(self.precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """What a study's candidates must hold to, on each of the four levels of evidence."""

    candidates: tuple[str, ...] = ()
    """The arms that are judged; none: every arm whose role is `candidate`."""
    step: int = 0
    """A step with a snapshot, where the weights are compared; 0: the window rule picks it."""
    window_limit: float = 0.04
    """The window ends before the first snapshot at which a nudge has |log E| above this."""
    max_error_ratio: float = 2.0
    """Operator: most of the error of plain attention, both against FP64."""
    max_gain: float = 1e-3
    """Operator: most that the slope of a result on the golden may differ from 1."""
    max_bias_ulp: float = 0.05
    """Operator: most of the mean signed error, in units of the last place."""
    max_gradient_ratio: float = 2.0
    """Gradient: most of the baseline's error in the whole model's gradient."""
    max_share: float = 0.01
    """Gradient: most of the error's power that repeats from look to look, (C - 1) / (N - 1)."""
    max_excess: float = 1.10
    """Training: most of the baseline's distance to the reference."""
    margin_nats: float = 0.005
    """Outcome: a held-out loss this much higher is a loss that matters."""
    alpha: float = 0.05
    """The chance of a wrong answer, over all looks and in each direction."""

    def __post_init__(self) -> None:
        _require(self.step >= 0, "policy", "step must be >= 0", self.step)
        for name in ("window_limit", "max_gain", "max_bias_ulp", "margin_nats"):
            value = getattr(self, name)
            _require(0 < value < math.inf, "policy", f"{name} must be > 0 and finite", value)
        for name in ("max_error_ratio", "max_gradient_ratio", "max_excess"):
            value = getattr(self, name)
            rule = f"{name} must be above 1, which is the baseline's own, and finite"
            _require(1 < value < math.inf, "policy", rule, value)
        _require(0 < self.max_share < 1, "policy", "max_share must be in (0, 1)", self.max_share)
        _require(0 < self.alpha < 0.5, "policy", "alpha must be in (0, 0.5)", self.alpha)
        _require(
            len(set(self.candidates)) == len(self.candidates),
            "policy",
            "candidates must name each arm once",
            list(self.candidates),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """A baseline, its candidates and the seeds each is repeated over.

    `arms` maps each arm's name to what it overrides in `base`, and to its `role` and `until` where
    these are given; the arm called `baseline` overrides nothing. `yardstick` names the arm that
    drifts are put in ratio to.
    """

    name: str
    question: str
    base: ArmConfig
    arms: dict[str, dict[str, Any]]
    seeds: tuple[int, ...] = (0,)
    yardstick: str = ""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    allow_many: bool = False
    """Let an arm change several axes; it is then called confounded wherever it is shown."""
    early_step: int = 0
    """The early, matched step the ladder reads; 0 means the first snapshot after step 0."""
