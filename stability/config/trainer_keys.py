"""Which arguments of Lightning's Trainer a study may give in `train.trainer`.

A paired study fixes nearly all of them: one that ends a run early, repeats or skips batches, adds a
process, or writes beside the record would make its runs mean something else than their manifests
say. So two are allowed, which change what an update is and are the same for every arm, and each
other one is refused with the place where it belongs. Nothing heavy is imported: a mistake is told
while the YAML is read. Leaves out how the Trainer is built (`study.assemble`).
"""

from collections.abc import Mapping
from typing import Any

from stability.config.convert import nearest

__all__ = ["ALLOWED", "ELSEWHERE", "check_trainer"]

ALLOWED: Mapping[str, str] = {
    "accumulate_grad_batches": "a whole number from 1",
    "gradient_clip_algorithm": "norm or value",
}
"""The arguments that a study may give, and what each must be."""

_LAID_OUT = "a run is laid out over ranks by `parallel`: data, shard, tensor"
_ENDS_EARLY = "a run trains all of train.steps, or an arm up to its `until`"
_NO_LOOP = "Lightning's own loop over held-out text is not used; see held_out"
_OWN_OUTPUT = "it is the run's own, and its records go below --out"
_NO_OBJECT = "it is an object, which YAML can't hold, and the run's own"

ELSEWHERE: Mapping[str, str] = {
    "accelerator": "it is train.accelerator",
    "barebones": "it would switch off the run's checkpoints and records",
    "benchmark": "it would choose kernels by their speed, and two runs could have other bits",
    "callbacks": _NO_OBJECT,
    "check_val_every_n_epoch": _NO_LOOP,
    "default_root_dir": _OWN_OUTPUT,
    "detect_anomaly": "it would raise where a run diverges, which is a result and not a failure",
    "deterministic": "it is train.deterministic",
    "devices": _LAID_OUT,
    "enable_autolog_hparams": _OWN_OUTPUT,
    "enable_checkpointing": "checkpoints are always written; see train.checkpoint_every",
    "enable_model_summary": _OWN_OUTPUT,
    "enable_progress_bar": _OWN_OUTPUT,
    "fast_dev_run": f"it would end the run early; {_ENDS_EARLY}",
    "gradient_clip_val": "it is train.grad_clip",
    "inference_mode": _NO_LOOP,
    "limit_predict_batches": _NO_LOOP,
    "limit_test_batches": _NO_LOOP,
    "limit_train_batches": f"it would end the run early; {_ENDS_EARLY}",
    "limit_val_batches": "it is held_out.batches",
    "log_every_n_steps": "it is train.log_every",
    "logger": "where records go is said by --out and --wandb",
    "max_epochs": f"it is train.steps; {_ENDS_EARLY}",
    "max_steps": "it is train.steps",
    "max_time": f"the clock would decide the last step; {_ENDS_EARLY}",
    "min_epochs": "it is train.steps",
    "min_steps": "it is train.steps",
    "model_registry": _OWN_OUTPUT,
    "num_nodes": _LAID_OUT,
    "num_sanity_val_steps": _NO_LOOP,
    "overfit_batches": "it would repeat batches; each one is decided by text, order seed and step",
    "plugins": _NO_OBJECT,
    "precision": "it is the arm's own precision, beside train and not in it",
    "profiler": "it would write beside the record; profile the whole command instead",
    "reload_dataloaders_every_n_epochs": "batches are decided by text, order seed and step",
    "strategy": _LAID_OUT,
    "sync_batchnorm": _LAID_OUT,
    "use_distributed_sampler": "batches are decided by text, order seed and step",
    "val_check_interval": _NO_LOOP,
}
"""Every other argument of `lightning.pytorch.Trainer`, and where it belongs or why it can't be."""


def check_trainer(given: Mapping[Any, Any]) -> None:
    """ValueError `trainer.<key>: ...`, one line, for a key that is refused or a wrong value."""
    for key, value in given.items():
        problem = _problem(key, value)
        if problem:
            raise ValueError(f"trainer.{key}: {problem}")


def _problem(key: Any, value: Any) -> str:
    allowed = ", ".join(ALLOWED)
    if key in ELSEWHERE:
        return f"must not be given, got {value!r}: {ELSEWHERE[key]}; allowed: {allowed}"
    if key not in ALLOWED:
        near = nearest(key, [*ALLOWED, *ELSEWHERE])
        return f"unknown key, got {value!r}; nearest: {near}; allowed: {allowed}"
    is_right = (
        # a bool is an int to Python, and True would be taken for 1
        type(value) is int and value >= 1
        if key == "accumulate_grad_batches"
        else value in ("norm", "value")
    )
    return "" if is_right else f"must be {ALLOWED[key]}, got {value!r}"
