"""`train.trainer` takes a short list of keys; every other one is refused with where it belongs."""

import inspect

import pytest
from lightning.pytorch import Trainer

from stability.config.convert import ConfigError, from_dict
from stability.config.schema import TrainConfig
from stability.config.trainer_keys import ALLOWED, ELSEWHERE


def _read(trainer):
    return from_dict(TrainConfig, {"trainer": trainer}, "study.yaml")


def test_every_argument_of_the_trainer_is_either_allowed_or_has_a_place_elsewhere():
    arguments = set(inspect.signature(Trainer).parameters)
    assert arguments == {*ALLOWED, *ELSEWHERE}
    assert not ALLOWED.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("max_steps", 3, "it is train.steps"),
        ("max_epochs", 1, "it is train.steps"),
        ("precision", "16-mixed", "it is the arm's own precision"),
        ("gradient_clip_val", 0.5, "it is train.grad_clip"),
        ("accelerator", "cpu", "it is train.accelerator"),
        ("log_every_n_steps", 5, "it is train.log_every"),
        ("fast_dev_run", True, "it would end the run early"),
        ("fast_dev_run", False, "it would end the run early"),
        ("limit_train_batches", 0.5, "it would end the run early"),
        ("max_time", "00:00:01:00", "the clock would decide the last step"),
        ("num_nodes", 2, "a run is laid out over ranks"),
        ("strategy", "ddp", "a run is laid out over ranks"),
        ("devices", [0, 1], "a run is laid out over ranks"),
        ("overfit_batches", 1, "it would repeat batches"),
        ("callbacks", [], "it is an object"),
        ("barebones", True, "it would switch off"),
    ],
)
def test_a_key_of_the_trainer_that_belongs_elsewhere_is_refused_with_its_place(key, value, place):
    with pytest.raises(ConfigError) as refusal:
        _read({key: value})
    said = str(refusal.value)
    assert said.startswith(f"study.yaml: trainer.{key}: must not be given, got {value!r}: {place}")
    assert said.endswith("; allowed: accumulate_grad_batches, gradient_clip_algorithm")
    assert "\n" not in said


@pytest.mark.parametrize("key", sorted(ELSEWHERE))
def test_no_argument_that_is_not_allowed_passes_whatever_its_value(key):
    for value in (None, 0, 1, True, "auto", {}):
        with pytest.raises(ConfigError, match=f"trainer.{key}: must not be given, got "):
            _read({key: value})


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"acumulate_grad": 2}, "trainer.acumulate_grad: unknown key, got 2; nearest: accumulate"),
        ({"max_stepz": 2}, "trainer.max_stepz: unknown key, got 2; nearest: max_steps"),
        ({"a: b": 2}, "trainer.a: b: unknown key, got 2"),
        ({"accumulate_grad_batches": 0}, "_grad_batches: must be a whole number from 1, got 0"),
        ({"accumulate_grad_batches": 2.0}, "_batches: must be a whole number from 1, got 2.0"),
        ({"accumulate_grad_batches": True}, "_batches: must be a whole number from 1, got True"),
        ({"accumulate_grad_batches": "2"}, "_batches: must be a whole number from 1, got '2'"),
        ({"accumulate_grad_batches": {0: 2}}, r"_batches: must be .* from 1, got \{0: 2\}"),
        ({"gradient_clip_algorithm": "norn"}, "_algorithm: must be norm or value, got 'norn'"),
        ({"gradient_clip_algorithm": ["norm"]}, r"must be norm or value, got \['norm'\]"),
    ],
)
def test_an_unknown_key_and_a_wrong_value_are_refused(trainer, message):
    with pytest.raises(ConfigError, match=f"study.yaml: .*{message}"):
        _read(trainer)


def test_what_is_allowed_reaches_the_trainer_as_it_is():
    given = {"accumulate_grad_batches": 2, "gradient_clip_algorithm": "value"}
    assert _read(given).trainer == given
    assert Trainer(**given, logger=False, enable_checkpointing=False).accumulate_grad_batches == 2


def test_a_config_made_in_python_is_refused_alike():
    with pytest.raises(ValueError, match=r"^trainer.fast_dev_run: must not be given, got True"):
        TrainConfig(trainer={"fast_dev_run": True})
