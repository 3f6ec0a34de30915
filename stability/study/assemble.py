"""The composition root: builds the model, attention, probe, data and Trainer that a config names.

This is the one place that binds names in a config to objects. It leaves out the course of a run
(`train_run`) and every decision about files.
"""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from attention_kernels.delayed_scaling import DelayedScales
from attention_kernels.fp_environment import settle_vector_math
from stability.callbacks.delayed_scales import DelayedScaling
from stability.callbacks.gradient_callback import GradientProbe
from stability.callbacks.instability_watch import InstabilityWatch
from stability.callbacks.probe_callbacks import DeviationProbe
from stability.callbacks.random_numbers import RandomNumbers
from stability.callbacks.rounding_steps import RoundingSteps
from stability.config.model import BUILDERS, HUGGINGFACE, ModelConfig
from stability.config.parallel import ParallelConfig
from stability.config.precision import emulated_format, parse_precision
from stability.config.schema import ArmConfig
from stability.data.datamodule import Share, TextDataModule
from stability.intercept.replacement import Replacement
from stability.model.compiled import compiled
from stability.model.decoder import attentions_of, blocks_of, build_decoder
from stability.model.decoder_parts import shared_state
from stability.model.initial_weights import initialise, nudge_weights
from stability.model.layouts import check_layout
from stability.model.lightning_module import LanguageModel
from stability.model.module_precision import attention_in_default, with_module_precision
from stability.model.precision import precision_plugins
from stability.model.ranks import ALONE, Ranks
from stability.probe.attention_probe import AttentionProbe, DualAttention, as_shadows
from stability.probe.attention_registry import (
    ResolvedAttention,
    is_users,
    resolve_attention,
    with_input_format,
)
from stability.probe.double_precision import computing_in_double
from stability.probe.measurements import query_weight
from stability.probe.rounding_keys import RoundingKeys, keyed
from stability.probe.schedule import Schedule
from stability.records.run_files import RunFiles
from stability.records.snapshots import hash_state
from stability.study.checkpoints import CheckpointFiles
from stability.study.layout_strategy import LayoutStrategy
from stability.study.model_gradients import gradients_of_arm
from stability.study.start_state import Start, begin, read_start_state

__all__ = [
    "PROCESS_COUNTS",
    "Parts",
    "assemble",
    "check_alone",
    "describe_attention",
    "fit",
    "imports_user_modules",
    "load_data",
    "make_trainer",
    "quieten_lightning",
    "resolve_device",
]

HARMLESS_WARNINGS = (
    # a resumed run finds its checkpoints there
    r"Checkpoint directory .* is not empty",
    # a resumed run may have been moved with its folder
    r"The dirpath has changed",
    # a loss scaler may skip the very first update
    r"Detected call of `lr_scheduler.step",
    # Lightning 2.6.6 looks for `srun` when a fit starts, whatever the environment that it was given
    # (pytorch/trainer/connectors/checkpoint_connector.py)
    r"The `srun` command is available",
)


def quieten_lightning() -> None:
    """Silence Lightning in this process: its logs below errors, and its own warnings."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning(\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The objects of one run."""

    model: nn.Module
    module: LanguageModel
    attention: ResolvedAttention
    shadows: tuple[ResolvedAttention, ...]
    """What the probe calls beside it."""
    init_hash: str
    """Hash of the initial weights, before a nudge."""
    shared_hash: str
    """The same, less the weights that an arm of another `qk_norm` has not."""
    start_hash: str
    """Checksum of the state that the config's `start` names; empty where weights were drawn."""
    callbacks: list[Callback]


def resolve_device(config: ArmConfig) -> torch.device:
    """Return the device to train on; ValueError if a GPU is asked for and there is none."""
    accelerator = config.train.accelerator
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("train.accelerator must be auto or cpu here, got 'gpu'; no CUDA device")
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


PROCESS_COUNTS = (
    "WORLD_SIZE",  # torchrun, and most operators of clusters
    "SLURM_STEP_NUM_TASKS",  # srun: not SLURM_NTASKS, which a batch script of one process has too
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
)
"""The variables in which launchers tell a process how many of its kind they have started."""


def check_alone() -> None:
    """ValueError if a launcher has started this process as one of several.

    A run trains in one process, so each of them would train the same batches.
    """
    for name in PROCESS_COUNTS:
        count = os.environ.get(name, "")
        if count not in ("", "1"):
            raise ValueError(
                f"{name} must be 1 where a study trains, got {count!r}; a run trains in one "
                "process, and several would train the same batches: start one (--jobs trains "
                f"several runs at once), or unset {name} if this one is alone"
            )


def load_data(config: ArmConfig, ranks: Ranks = ALONE) -> TextDataModule:
    """Return the data module of a run, or of its part in a rank; its text is read and tokenised.

    ValueError for a text that is missing, empty or too short, or for more kinds of tokens than the
    model embeds.
    """
    data = TextDataModule(
        config.data,
        context=config.model.context,
        batch_size=config.train.batch_size,
        steps=config.train.steps,
        order_seed=config.seed.base + config.seed.order_offset,
        held_out=config.held_out,
        share=_share(config.parallel, ranks),
    )
    data.setup("fit")
    if data.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size must be at least the {data.vocab_size} of tokenizer "
            f"{config.data.tokenizer!r}, got {config.model.vocab_size}"
        )
    return data


def _share(parallel: ParallelConfig, ranks: Ranks) -> Share:
    """Return the parts of a batch that a rank computes; those that share layers have the same."""
    held = parallel.accumulate
    return Share(parts=parallel.parts, first=ranks.rank // parallel.tensor * held, held=held)


def assemble(config: ArmConfig) -> Parts:
    """Build the model of a run with its attention, probe, initial weights and nudge.

    ValueError as `check_alone`, `resolve_device`, `resolve_attention` and `build_decoder`.
    """
    check_alone()
    settle_vector_math()  # before the initial weights, which must be those of the pair
    device = resolve_device(config)
    check_layout(config)
    config = _with_emulated_attention(config)
    primary = resolve_attention(config.attention, device)
    modules: dict[str, nn.Module] = {}
    probed = config.probe.shadows if config.probe.is_on else ()
    shadows = tuple(resolve_attention(shadow, device) for shadow in probed)
    probe = _probe(config, shadows, modules) if shadows else None
    precision, keys = config.precisions, RoundingKeys(seed=config.seed.base)
    attention = _attention_by_layer(config, device, primary, probe, keys)
    attention = [attention_in_default(each, precision, device) for each in attention]
    if config.train.compile:
        # the attention stays outside of the graph, so its bits are the same compiled or not
        eager: Any = torch.compiler.disable
        attention = [eager(function) for function in attention]
    model, start = _model(config, attention)
    init_hash, shared_hash = hash_state(model.state_dict()), hash_state(shared_state(model))
    if config.precision == "64-true":
        model.double()
        if not config.model.is_ours:
            model.forward = _in_double(model)
    nudge_weights(model, config.nudge.ulps, config.seed.base, config.nudge.draw)
    scales = DelayedScales(config.parallel.replicas)
    with_module_precision(model, precision, device, keys.of_module, scales.of)
    callbacks = [
        RoundingSteps(keys, config.parallel.tensor),
        *([DelayedScaling(scales)] if precision.is_delayed else []),
        *_instruments(config, device, model, probe, modules, keys, scales),
    ]
    if config.train.compile:
        # not the module itself: hooks on it stay outside of the graph
        model.forward = compiled(model.forward, config.train)
    return Parts(
        model=model,
        module=_trained(model, config, start),
        attention=primary,
        shadows=shadows,
        init_hash=init_hash,
        shared_hash=shared_hash,
        start_hash=start.checksum if start else "",
        callbacks=callbacks,
    )


def _instruments(
    config: ArmConfig,
    device: torch.device,
    model: nn.Module,
    probe: AttentionProbe | None,
    modules: dict[str, nn.Module],
    keys: RoundingKeys,
    scales: DelayedScales,
) -> list[Callback]:
    """Return the callbacks that look at a run; `modules` get those that the probe looks inside."""
    callbacks: list[Callback] = []
    if probe is not None:
        modules.update(_query_modules(model, config.model))
        callbacks.append(_probing(config, probe, model))
    if config.watch.every:
        callbacks.append(InstabilityWatch(config.watch.every))
    gradients = None
    if config.probe.gradient_every:
        gradients = gradients_of_arm(config, device, keys, scales)
    if gradients is not None:
        callbacks.append(
            GradientProbe(
                model,
                gradients.of,
                config.probe.gradient_every,
                sequences=config.probe.gradient_sequences,
            )
        )
    return callbacks


def _model(config: ArmConfig, attention: list[Any]) -> tuple[nn.Module, Start | None]:
    """Return the model of `config` with its initial weights, and the state that they are of."""
    seed = config.seed.base + config.seed.init_offset
    is_given = config.model.options.get("weights") == "given" and not config.model.is_ours
    if is_given and config.seed.init_offset:
        raise ValueError(
            "seed.init_offset must be 0 where model.weights are given, got "
            f"{config.seed.init_offset}: no weight is drawn"
        )
    # an arm of its own attention, or a probe that looks at the attention, needs the model's calls
    is_asked = config.probe.is_on or config.probe.shadows_are == "baseline"
    model = build_decoder(config.model, attention, seed=seed, may_ignore_attention=not is_asked)
    _refuse_emulation(model, config.precision)
    start = read_start_state(model, config.start) if config.start else None
    if start is None:
        initialise(model, seed, config.model)
    else:
        begin(model, start)
    return model, start


def _refuse_emulation(model: nn.Module, precision: str) -> None:
    """ValueError for a model that multiplies by other means than emulation rounds."""
    # by its name: transformers, which has it, need not be installed
    kinds = {type(module).__name__ for module in model.modules()}
    if parse_precision(precision).emulates and "Conv1D" in kinds:
        raise ValueError(
            f"precision must not be emulated for {type(model).__name__}, got {precision!r}: its "
            "Conv1D is no F.linear, and would not be rounded"
        )


def _in_double(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the forward of a model that is not ours, whose code may cast to FP32, in FP64."""
    forward = model.forward

    def computed(tokens: Tensor) -> Tensor:
        with computing_in_double(attentions_of(model)):
            return forward(tokens)

    return computed


def _trained(model: nn.Module, config: ArmConfig, start: Start | None) -> LanguageModel:
    """Return the module that trains `model`, with the optimizer's state of `start`.

    Its optimizer is built once, so that what is wrong with one of the user's own is told early.
    """
    module = LanguageModel(model, config.optimizer, config.train.steps)
    module.take_over(start.optimizer if start else None)
    module.configure_optimizers()
    return module


def imports_user_modules(config: ArmConfig) -> bool:
    """Whether `assemble` would import code that is not this package's."""
    builder, known = config.model.builder, (*BUILDERS, HUGGINGFACE)
    is_own = any(":" in name for name in (config.optimizer.name, config.model.init))
    return (
        builder not in known
        or is_own
        or any(map(is_users, (config.attention, *config.probe.shadows)))
    )


def describe_attention(config: ArmConfig) -> dict[str, Any]:
    """Return what the manifest of a run says of its attention, which is resolved but not called.

    ValueError as `resolve_device` and `resolve_attention`.
    """
    device = resolve_device(config)
    return resolve_attention(_with_emulated_attention(config).attention, device).description


def _with_emulated_attention(config: ArmConfig) -> ArmConfig:
    """Return `config` with the emulated format as the "input" of its attention and shadows."""
    format = emulated_format(config.precision)
    if config.train.compile and parse_precision(config.precision).emulates:
        raise ValueError(
            f"train.compile must be empty with an emulated precision, got "
            f"{config.train.compile!r}; the compiled graph would not be rounded"
        )
    if format is None:
        return config
    shadows = tuple(with_input_format(shadow, format) for shadow in config.probe.shadows)
    return replace(
        config,
        attention=with_input_format(config.attention, format),
        probe=replace(config.probe, shadows=shadows),
    )


def _attention_by_layer(
    config: ArmConfig,
    device: torch.device,
    primary: ResolvedAttention,
    probe: AttentionProbe | None,
    keys: RoundingKeys,
) -> list[Any]:
    """Return each layer's attention; layers that the arm does not change have the baseline's.

    ValueError if no layer's name matches the arm's globs.
    """
    names = config.model.layer_names
    changed = config.attention
    own = resolve_attention(config.probe.shadows[0], device) if changed.is_partial else primary
    replacement = Replacement(candidate=primary, layers=changed.layers, direction=changed.direction)
    parts = {name: replacement.mixed(own) for name in names if replacement.covers(name)}
    if not parts:
        raise ValueError(
            f"attention.layers must match one of {', '.join(names)}, got "
            f"{', '.join(changed.layers)}"
        )
    if probe is None:
        attentions = (parts.get(name, own) for name in names)
        return [keyed(each, i, keys).function for i, each in enumerate(attentions)]
    return [
        DualAttention(layer=name, primary=parts[name], probe=probe, rounding=partial(keys.at, i))
        if name in parts
        else keyed(own, i, keys).function
        for i, name in enumerate(names)
    ]


def _probe(
    config: ArmConfig, shadows: Sequence[ResolvedAttention], modules: dict[str, nn.Module]
) -> AttentionProbe:
    is_candidate = config.probe.shadows_are == "candidates"
    return AttentionProbe(
        config.probe, as_shadows(shadows), shadow_is_candidate=is_candidate, modules=modules
    )


def _query_modules(model: nn.Module, shape: ModelConfig) -> dict[str, nn.Module]:
    """Return the modules that hold W_Q, by layer; a layer's own where none is known to."""
    rows = shape.heads * shape.head_dim
    return {
        name: next((m for m in block.modules() if query_weight(m, rows) is not None), block)
        for name, block in blocks_of(model, shape.depth).items()
    }


def _probing(config: ArmConfig, probe: AttentionProbe, model: nn.Module) -> DeviationProbe:
    wanted = config.probe
    schedule = Schedule(every=wanted.every, steps=wanted.steps, per_decade=wanted.per_decade)
    return DeviationProbe(probe, schedule, model, inherited=wanted.inherited)


def make_trainer(
    config: ArmConfig,
    files: RunFiles,
    loggers: list[Logger],
    callbacks: list[Callback],
    last_step: int = 0,
    ranks: Ranks = ALONE,
) -> Trainer:
    """Return a Trainer that keeps its last checkpoints in the run's folder.

    It stops at `last_step`, or at the config's last step if that is 0. The learning rate follows
    the config's schedule in both cases. Of several `ranks` each has a Trainer; the first one's
    writes. ValueError if it would train in other processes than these.
    """
    checkpoints = ModelCheckpoint(
        dirpath=files.paths.checkpoints_dir,
        filename="step-{step:08d}",
        auto_insert_metric_name=False,
        every_n_train_steps=config.train.checkpoint_every,
        save_top_k=-1,  # CheckpointFiles drops the old ones
    )
    device = resolve_device(config)
    plugins = precision_plugins(config.precision, device)
    native: Any = None if plugins else parse_precision(config.precision).default
    checkpoint_files = CheckpointFiles(files, config.train.keep_checkpoints)
    given = dict(config.train.trainer)
    micro_batches = given.pop("accumulate_grad_batches", 1) * config.parallel.accumulate
    trainer = Trainer(
        accelerator=device.type,
        devices=1,
        precision=native,
        **_processes(config.parallel, ranks, device, [checkpoint_files, *plugins]),
        accumulate_grad_batches=micro_batches,
        max_steps=last_step or config.train.steps,
        max_epochs=1,  # else batches that run out would begin again, and no one would see it
        gradient_clip_val=config.train.grad_clip,
        deterministic=config.train.deterministic,
        logger=loggers,
        callbacks=[RandomNumbers(config.seed.base, ranks.rank), *callbacks, checkpoints],
        log_every_n_steps=config.train.log_every,
        default_root_dir=files.paths.root,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **given,
    )
    if trainer.world_size != ranks.count:
        raise ValueError(
            f"the world size must be {ranks.count}, got {trainer.world_size}; a run "
            "trains in the processes that its layout names"
        )
    return trainer


def _processes(
    parallel: ParallelConfig, ranks: Ranks, device: torch.device, plugins: list[Any]
) -> dict[str, Any]:
    """Return what tells a Trainer in which processes it trains."""
    if ranks.count > 1:
        where = torch.device("cuda", 0) if device.type == "cuda" else device
        return {"strategy": LayoutStrategy(parallel, ranks, where), "plugins": plugins}
    # one device; left to itself, Lightning takes the tasks of a Slurm job for its ranks
    return {"plugins": [LightningEnvironment(), *plugins]}


def fit(
    trainer: Trainer, parts: Parts, data: TextDataModule, checkpoint: Path | None = None
) -> None:
    """Train until the Trainer's last step, from `checkpoint` if there is one."""
    with warnings.catch_warnings():
        for message in HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message, UserWarning)
        trainer.fit(parts.module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
