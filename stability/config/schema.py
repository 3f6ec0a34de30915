"""What an arm is: the frozen dataclasses whose values a YAML file holds.

From the inside out: the groups of an arm that decide its bits (model, attention, precision, data,
held-out text, optimizer, training, ranks, seeds), the groups that only look and change no bit
(probe, watch), and the arm they make. Each class checks its own values. Leaves out the model
(`model`), what a study is (`study`), reading YAML and naming where a mistake stands (`load`), the
comparison of two arms (`diff`), and every object that a name stands for (`study.assemble`).
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from attention_kernels.formats import FORMATS, format_named
from stability.config.model import INIT_SCHEMES, ModelConfig
from stability.config.parallel import ParallelConfig
from stability.config.precision import Precision, parse_precision
from stability.config.requirement import require
from stability.config.trainer_keys import check_trainer

__all__ = [
    "BASELINE",
    "DEFAULT_MATMUL",
    "INIT_SCHEMES",
    "OPTIMIZERS",
    "ArmConfig",
    "AttentionConfig",
    "DataConfig",
    "HeldOutConfig",
    "ModelConfig",
    "NudgeConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProbeConfig",
    "Role",
    "SeedConfig",
    "TrainConfig",
    "WatchConfig",
    "require",
]

Role = Literal["baseline", "candidate", "reference", "rerun", "nudge", "broken", "yardstick"]
"""What an arm is there for (`config.roles` says what each means and how it is recognised)."""

BASELINE = "baseline"
"""The arm that every other arm of its study is paired with."""


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
    """What computes `flash`: `triton`, or `twin` in plain PyTorch; `auto`: `triton` on CUDA."""
    layers: tuple[str, ...] = ("*",)
    """In an arm: globs of the layers that attend so; the others attend as the baseline does."""
    direction: Literal["both", "forward", "backward"] = "both"
    """In an arm: the direction that is computed so; the other is as the baseline's."""
    fault: str = ""
    """A known error planted on the attention, by its name in `attention_kernels.testing.FAULTS`."""

    def __post_init__(self) -> None:
        require(bool(self.layers), "attention", "layers must name at least one", self.layers)

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
    """The column that holds the documents, of a file or data set with columns."""
    split: str = "train"
    """Which split of a data set of the hub is read."""
    tokenizer: str = "bytes"
    """`bytes`, or the name or path of a Hugging Face tokenizer."""
    workers: int = 0
    """Processes of each rank that load batches, from 0 to 1024; 0: the rank loads them itself."""

    def __post_init__(self) -> None:
        rule = f"workers must be from 0 to {MOST_WORKERS}, each is a process of its own"
        require(0 <= self.workers <= MOST_WORKERS, "data", rule, self.workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutConfig:
    """The part of the text that no arm trains on, and how much of it is evaluated at snapshots.

    It changes which blocks are trained on, so it belongs to what decides a run's bits.
    """

    share: float = 0.05
    """Of the text's blocks; 0 trains on all of them and measures no loss on held-out text."""
    batches: int = 8
    """How many batches `eval/loss` is the mean over."""
    batch_size: int = 0
    """Of how many blocks each; 0: as many as the study's base trains on at once."""
    prediction_batches: int = 1
    """How many of these batches' token log-probabilities are kept with each snapshot."""

    def __post_init__(self) -> None:
        require(0 <= self.share < 1, "held_out", "share must be in [0, 1)", self.share)
        require(self.batches >= 1, "held_out", "batches must be >= 1", self.batches)
        require(self.batch_size >= 0, "held_out", "batch_size must be >= 0", self.batch_size)
        require(
            0 <= self.prediction_batches <= self.batches,
            "held_out",
            f"prediction_batches must be between 0 and batches ({self.batches})",
            self.prediction_batches,
        )


OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps"),
    "sgd": ("momentum",),
    "muon": ("betas", "eps", "momentum"),
}
"""Each optimizer that has a name, and the settings that it alone takes; all take the others."""


def _check_state(name: str) -> None:
    """ValueError unless `name` is that of a format which FP32 holds."""
    try:
        fits = format_named(name).fits(FORMATS["fp32"])
    except ValueError as error:
        said = str(error).removeprefix("format_named: ")
        raise ValueError(f"optimizer: state: {said}") from error
    require(fits, "optimizer", "state must be a format that FP32 holds", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer; its learning rate warms up linearly and falls, a cosine, to a tenth."""

    name: str = "adamw"
    """`adamw`, `sgd`, `muon` (AdamW for what is no matrix of a block), or `module:Class`."""
    lr: float = 1e-3
    """The peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""
    momentum: float = 0.95
    """Of SGD and of Muon."""
    weight_decay: float = 0.1
    """Of matrices alone."""
    warmup_steps: int = 20
    """Updates until the learning rate is at its peak; 0: it begins there."""
    state: str = ""
    """A format that the optimizer's state is held in, e.g. `bf16`; empty: that of the weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of a class of one's own."""

    def __post_init__(self) -> None:
        known = self.name in OPTIMIZERS or ":" in self.name
        rule = f"name must be {', '.join(OPTIMIZERS)} or MODULE:CLASS"
        require(known, "optimizer", rule, self.name)
        own = self.name not in OPTIMIZERS
        rule = "options must be empty but for a class of one's own"
        require(own or not self.options, "optimizer", rule, self.options)
        require(0 <= self.momentum < 1, "optimizer", "momentum must be in [0, 1)", self.momentum)
        if self.state:
            _check_state(self.state)
        for name in ("lr", "eps"):
            value = getattr(self, name)
            require(0 < value < math.inf, "optimizer", f"{name} must be > 0 and finite", value)
        require(
            all(0 <= beta < 1 for beta in self.betas),
            "optimizer",
            "betas must be in [0, 1)",
            self.betas,
        )
        decay, rule = self.weight_decay, "weight_decay must be >= 0 and finite"
        require(0 <= decay < math.inf, "optimizer", rule, decay)
        require(self.warmup_steps >= 0, "optimizer", "warmup_steps must be >= 0", self.warmup_steps)


DEFAULT_MATMUL = "highest"
"""The `matmul_precision` of torch, and of arms that say nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long an arm trains and what it writes down when."""

    steps: int = 200
    """How many updates of the weights, at least 1."""
    batch_size: int = 8
    """Blocks in a batch, over all ranks together, each of `model.context` tokens and the next one.
    An update takes one batch, or as many as `trainer.accumulate_grad_batches` says."""
    grad_clip: float = 1.0
    """Most of the gradient's norm; 0 clips nothing."""
    log_every: int = 1
    """Every so many steps `train/loss` is logged, at least 1."""
    snapshot_steps: tuple[int, ...] = ()
    """Steps with a snapshot besides 0 and the last; steps past the end are left out."""
    checkpoint_every: int = 50
    """Every so many steps a checkpoint is written, from which a run can go on; at least 1."""
    keep_checkpoints: int = 2
    """The last so many are kept; 0 keeps all, to fork from any of them."""
    compile: str = ""
    """A backend of torch.compile, e.g. `inductor`; empty is eager. Attention stays eager."""
    compile_options: dict[str, Any] = field(default_factory=dict)
    """`mode` of torch.compile, or options of the backend, e.g. `{fallback_random: true}`."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """The device that trains, `gpu` being CUDA; `auto`: that if it is there, else the CPU."""
    matmul_precision: Literal["highest", "high", "medium"] = DEFAULT_MATMUL
    """What FP32 products keep of their operands: `torch.set_float32_matmul_precision`."""
    deterministic: bool = True
    """Whether torch's deterministic algorithms are on; without them A/A need not be 0."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of `lightning.Trainer`: `accumulate_grad_batches`, `gradient_clip_algorithm`."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, "train", f"{name} must be >= 1", getattr(self, name))
        require(
            self.keep_checkpoints >= 0,
            "train",
            "keep_checkpoints must be >= 0",
            self.keep_checkpoints,
        )
        steps = list(self.snapshot_steps)
        require(min(steps, default=0) >= 0, "train", "snapshot_steps must be >= 0", steps)
        clip, rule = self.grad_clip, "grad_clip must be >= 0 and finite (0 clips nothing)"
        require(0 <= clip < math.inf, "train", rule, clip)
        rule = "compile_options must be empty where compile is empty and the model is eager"
        require(bool(self.compile or not self.compile_options), "train", rule, self.compile_options)
        check_trainer(self.trainer)

    def late_snapshots(self) -> list[int]:
        """Return those of `snapshot_steps` that lie past the end, so that none is taken."""
        return sorted(step for step in self.snapshot_steps if step > self.steps)

    def planned_snapshots(self) -> list[int]:
        """Return the steps with a snapshot, sorted: the first, the last and those asked for."""
        return sorted({0, self.steps, *(s for s in self.snapshot_steps if 0 <= s <= self.steps)})


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedConfig:
    """`base` is the study's seed; the offsets move initial weights or data order alone."""

    base: int = 0
    """Set by the study: each of its `seeds` in turn, from 0 to 2**32 - 1."""
    init_offset: int = 0
    """Added to the seed that initial weights are drawn with; another one draws other weights."""
    order_offset: int = 0
    """Added to the seed that shuffles the batches; another one trains in another order."""

    def __post_init__(self) -> None:
        # torch's CPU generator keeps the low 32 bits of a seed, so that 2**32 would be 0 again to
        # models that are not ours, which draw their weights from it
        require(0 <= self.base < 2**32, "seed", "base must be from 0 to 2**32 - 1", self.base)
        offset, rule = self.init_offset, "init_offset must be between -2**32 and 2**32"
        require(abs(offset) < 2**32, "seed", rule, offset)


MOST_ULPS = 1024
"""A weight is moved ULP by ULP, so that a number without a bound would never end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NudgeConfig:
    """Move every initial weight by `ulps` units in the last place, up or down by a seeded coin."""

    ulps: int = 0
    """Units in the last place, from 0 to 1024; 0 moves nothing."""
    draw: int = 0
    """Which coin: with another draw the same seed sends each weight another way."""

    def __post_init__(self) -> None:
        rule = f"ulps must be from 0 to {MOST_ULPS}: a nudge is the least that can be changed"
        require(0 <= self.ulps <= MOST_ULPS, "nudge", rule, self.ulps)
        require(self.draw >= 0, "nudge", "draw must be >= 0", self.draw)
        require(
            self.ulps > 0 or self.draw == 0,
            "nudge",
            "draw must be 0 where ulps is 0 and no weight moves",
            self.draw,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """The dual-attention hook: when and where it looks, and at what.

    Due are those in `steps`, where none is given the multiples of `every`, and step 0 and
    `per_decade` log-spaced steps to a power of ten; with none of them the probe is off.
    """

    every: int = 10
    """Every so many steps the probe looks, where `steps` is empty; 0: not at such steps."""
    steps: tuple[int, ...] = ()
    """The steps it looks at, in place of the multiples of `every`."""
    per_decade: int = 0
    """Log-spaced steps to a power of ten, and step 0, that it looks at, too: 3 is 0, 1, 2, 5, 10,
    22, 46, 100, ...; 0: none."""
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
            require(getattr(self, name) >= 0, "probe", f"{name} must be >= 0", getattr(self, name))
        require(min(self.steps, default=0) >= 0, "probe", "steps must be >= 0", list(self.steps))
        share = self.overhead_share
        require(
            share is not None and 0 <= share < 1,
            "probe",
            "overhead must be in [0, 1) or below 100%",
            self.overhead,
        )
        require(bool(self.layers), "probe", "layers must name at least one", self.layers)
        if self.is_on:
            require(bool(self.shadows), "probe", "shadows must name at least one", self.shadows)

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
        require(self.every >= 0, "watch", "every must be >= 0", self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmConfig:
    """One training run, fully described."""

    model: ModelConfig
    """The model: its builder, its shape and how its weights begin."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """The attention that the model trains with."""
    precision: str = "bf16-mixed"
    """`64-true`, `32-true`, `bf16-mixed`, `bf16-true`, `16-mixed`, `emulated:<format>` or
    `recipe:<name or parts>`; single modules' own as `config.precision` says, e.g.
    `bf16-mixed, *.mlp_*=fp32`."""
    seed: SeedConfig = field(default_factory=SeedConfig)
    """What of the study's seed an arm moves."""
    start: str = ""
    """A trained state to begin from, as `stability compare` reads it; empty draws the weights."""
    nudge: NudgeConfig = field(default_factory=NudgeConfig)
    """The smallest change of the initial weights, which shows what chaos makes of it."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text that is trained on."""
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    """The part of the text that is kept for evaluation."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its learning rate."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long it trains, on what device, and when it writes."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the run is laid out over ranks."""
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    """When and how attentions are compared inside the run."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    """How often signs of instability are logged."""

    def __post_init__(self) -> None:
        # one text for one precision, however it was spaced
        precision = parse_precision(self.precision)
        object.__setattr__(self, "precision", precision.text)
        if precision.of_blocks and not self.model.is_ours:
            raise ValueError(
                f"precision: {precision.of_blocks} of all blocks must be of a model of ours, got "
                f"one of {self.model.builder}; name its layers: {{default: bf16-mixed, "
                f'"GLOB": {precision.of_blocks}}}'
            )
        precision.over(self.model.layer_names)
        parts, size = self.parallel.parts, self.train.batch_size
        rule = f"data x shard x accumulate must divide train.batch_size, {size}"
        require(size % parts == 0, "parallel", rule, parts)

    @property
    def precisions(self) -> Precision:
        """The precision taken apart, a recipe of all blocks as globs that name them."""
        return parse_precision(self.precision).over(self.model.layer_names)
