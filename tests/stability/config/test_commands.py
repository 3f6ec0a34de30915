"""What a command's own flags say of its training."""

import pytest

from stability.config.commands import own_steps


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--steps", "120"], [("--steps 120", 120)]),
        (["--steps=120", "--lr", "1"], [("--steps=120", 120)]),
        (["--max-steps", "7"], [("--max-steps 7", 7)]),
        (["--max_iters=9"], [("--max_iters=9", 9)]),
        (["max_steps=9"], [("max_steps=9", 9)]),
        (["trainer.max_steps=9"], [("trainer.max_steps=9", 9)]),
        (["+max_steps=9"], [("+max_steps=9", 9)]),
        (["++trainer.max_steps=9"], [("++trainer.max_steps=9", 9)]),
        (["--steps", "1e3", "--iters=1_000"], [("--steps 1e3", 1000), ("--iters=1_000", 1000)]),
        (["--steps", "120", "conf.yaml"], [("--steps 120", 120)]),
        (
            ["--train-steps", "3", "--num-iters", "4"],
            [("--train-steps 3", 3), ("--num-iters 4", 4)],
        ),
        # not how long it trains, no limit, or no number of updates
        (["--warmup-steps", "5", "--eval.steps", "6"], []),
        (["--max_steps", "-1"], []),
        (["--max_steps=-1", "--iters", "0"], []),
        (["--steps", "0.5", "--iters=1.5e0", "--steps", "1", "2", "--steps", "a", "3"], []),
        # often a sampler's, or a solver's
        (["--num-steps", "5", "--n_steps=6", "--iterations", "7"], []),
    ],
)
def test_how_many_updates_a_command_is_told_to_make(flags, found):
    assert own_steps(["python", "train.py", *flags]) == found
    assert own_steps(["torchrun", "--max-restarts", "3", "train.py", *flags]) == found
