"""The keys of what was trained on, as one process keeps them over many epochs."""

import pytest
import torch

from stability.recorder.inside import evaluations
from stability.recorder.inside.evaluations import Evaluations


def test_epochs_over_the_same_samples_take_no_more_memory_and_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluations, "_LEAST_UNIQUE", 256)
    seen, samples, most = Evaluations(), torch.arange(1000), 0
    for _ in range(100):
        for batch in samples[torch.randperm(1000, generator=torch.Generator())].split(10):
            seen.trained_on([("x", batch), ("mask", torch.zeros(10, dtype=torch.int64))])
            kept = seen._trained["x"]
            most = max(most, sum(map(len, [*kept._settled, *kept._recent])))
    assert most <= 2 * 1000 + 65 * 10, "twice what is known, and what is yet to be moved"
    found = seen.keys()
    assert found["times"] == {"x": 100_000, "mask": 100_000}
    assert found["trained"]["x"].equal(samples)
    assert found["trained"]["mask"].tolist() == [0]


def test_samples_that_do_not_recur_are_all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "_LEAST_UNIQUE", 256)
    seen = Evaluations()
    for batch in torch.arange(20_003).split(7):
        seen.trained_on([("x", batch)])
    assert seen.keys()["trained"]["x"].equal(torch.arange(20_003))
    assert seen.keys()["times"] == {"x": 20_003}
