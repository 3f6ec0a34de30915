"""What `stability init` says comes next, once it has written a study."""

from pathlib import Path

import pytest

from stability.cli.init import _may_evaluate, _print_next, _print_seen
from stability.recorder.held_out import NO_LOSS, NONE_SEEN, SEEN_ONCE


@pytest.mark.parametrize(
    ("attention", "is_ours"),
    [("flash:fa2", True), ("flash", True), ("flash_attn:flash_attn_func", False)],
)
def test_what_is_this_packages_own_kernel_is_said_of_that_alone(
    attention: str, is_ours: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _print_next(Path("study.yaml"), [], attention)
    said = " ".join(capsys.readouterr().out.split())
    assert (f"{attention} is this package's own kernel, on a CPU its twin" in said) == is_ours


@pytest.mark.parametrize(
    ("note", "may"),
    [
        (f"no held-out loss: {NONE_SEEN}; name a function", True),
        ("no held-out loss: the script evaluates once, so that which part can't be told", True),
        ("no held-out loss: the script evaluates other samples at each step", False),
        ("held out: 2 samples that the script evaluates at 2 steps", False),
    ],
)
def test_more_evaluations_may_come_where_too_few_were_seen(note: str, *, may: bool) -> None:
    assert _may_evaluate({"notes": ["the attention is swapped", note]}) == may


@pytest.mark.parametrize("few", [NONE_SEEN, SEEN_ONCE])
def test_what_was_evaluated_is_said_of_the_trial_alone(
    few: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that evaluates three times was told that it does so once."""
    found = {"models": ["GPT"], "names": ["weight"], "notes": [f"{NO_LOSS}{few}, so name it"]}
    _print_seen(found, [])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{few} in 2 updates (later ones are found in the runs), so name it; no PASS" in said
