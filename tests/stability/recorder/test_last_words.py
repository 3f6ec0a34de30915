"""What is told of a command that has failed: its error, not the code or the bar around it."""

import pytest

from stability.recorder.launch import Launched

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError(f"{lr} is too high")
"""


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (
            TRACEBACK + "ValueError: 3 is too high\n  0%|          | 0/20 [00:02<?, ?it/s]",
            ["ValueError: 3 is too high"],
        ),
        (
            TRACEBACK + "torch.OutOfMemoryError: no room\nasked: 3 GB",
            ["torch.OutOfMemoryError: no room", "asked: 3 GB"],
        ),
        ("Downloading: 100%|####| 3/3\nno space left", ["no space left"]),
        (
            "torch._dynamo.exc.Unsupported: can't trace\n  Developer debug context: raised 3\n"
            "  more of it\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace\n",
            ["torch._dynamo.exc.Unsupported: can't trace", "raised 3"],
        ),
        (
            TRACEBACK + "ValueError: 3 is too high\nE1126 04:00:52.1 local.py] failed\n"
            "Traceback (most recent call last):\ntorch.distributed.ChildFailedError: \n===\n",
            ["ValueError: 3 is too high"],
        ),
        (
            "torch.distributed.ChildFailedError:\n===",
            ["torch.distributed.ChildFailedError:", "==="],
        ),
        (
            "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lr\n"
            "W1126 04:00:52 api.py] Sending SIGTERM",
            ["train.py: error: unrecognized arguments: --lr"],
        ),
        ("a\nb\n\nc\nd\n", ["b", "c", "d"]),
        ("", []),
    ],
)
def test_the_last_words_of_a_command_are_its_error_or_its_last_lines(
    printed: str, told: list[str]
) -> None:
    assert Launched(code=1, last_lines=printed).last_words == told
