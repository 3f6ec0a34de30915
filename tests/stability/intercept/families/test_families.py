"""The instrument on many families: every attention seen or told, no bit changed, figures right.

The sample of `make test`; the whole is run by `make test-slow`, and `docs/families.md` has what
came of it.
"""

import random

import pytest
import torch
import torch.multiprocessing

from stability import shadow
from tests.stability.intercept.compiled_models import inductor
from tests.stability.intercept.families.families import FAMILIES, loss_of
from tests.stability.intercept.families.matrix import (
    DTYPES,
    cell_of_faults,
    cells_of_look,
    look,
    planted,
    rows_in_docs,
)
from tests.stability.intercept.families.planted import FAULTS
from tests.stability.intercept.families.set_ups import (
    COMPILED,
    IN_ONE_PROCESS,
    ON_TWO_RANKS,
    train_on_a_rank,
    trained,
    unmeasured,
)

pytestmark = pytest.mark.filterwarnings(
    # of transformers and of what it calls: nothing that these tests are about
    "ignore::UserWarning",
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
)

BY_HAND = ("gptj", "bloom", "deberta_v2")
"""The families whose attention is written in their layers, which therefore is told and not seen."""

CASES = [
    (name, implementation)
    for name, family in FAMILIES.items()
    for implementation in family.implementations
    if implementation != "flex_attention"  # has no backward on a CPU
]
SEEN = [case for case in CASES if case[0] not in BY_HAND]


def _sampled(count, cases):
    """Return all cases, of which all but `count` are long: always the same ones."""
    kept = set(random.Random(2).sample(range(len(cases)), count))
    return [
        case if index in kept else pytest.param(*case, marks=pytest.mark.long)
        for index, case in enumerate(cases)
    ]


def _trained_by(name):
    """Return the implementation that a family is trained with."""
    return "sdpa" if "sdpa" in FAMILIES[name].implementations else "eager"


@pytest.mark.parametrize(("name", "implementation"), _sampled(6, CASES))
def test_every_attention_is_seen_with_the_right_figures_or_told(name, implementation):
    family = FAMILIES[name]
    seen = look(family, implementation)
    assert seen.equal_bits
    assert len(seen.coverage) == family.attentions
    told_in_docs = rows_in_docs()[name, implementation]
    cells = cells_of_look(family, implementation, seen)
    assert cells[:4] == told_in_docs[:4]
    # how far the figures are apart is of the machine, how many they are is not
    assert cells[4].partition(",")[0] == told_in_docs[4].partition(",")[0]
    states = [one.state for one in seen.coverage]
    if name in BY_HAND:
        assert states == ["not seen"] * family.attentions
        assert all("attention_call" in one.mend for one in seen.coverage)
        return
    told = {one.layer for one in seen.coverage if one.state != "seen"}
    assert {layer.partition("#")[0] for layer in seen.missing} == told
    assert seen.figures or told
    # the figures are relative errors of some 1e-7
    assert not seen.figures or seen.difference <= 1e-14


@pytest.mark.parametrize(
    ("name", "implementation", "dtype"),
    _sampled(3, [(*case, dtype) for case in SEEN for dtype in DTYPES]),
)
def test_a_planted_fault_is_named_or_said_to_be_below_the_noise(name, implementation, dtype):
    found = planted(FAMILIES[name], implementation, dtype)
    assert found.equal_bits
    if dtype == torch.float32:  # in BF16 it may hang on the machine which lie below the noise
        assert cell_of_faults(found) == rows_in_docs()[name, implementation][5]
    for fault in FAULTS[dtype]:
        places = found.found[fault]
        if not places and dtype == torch.bfloat16:
            assert fault in found.below_the_noise
            continue
        assert {place.place.layer for place in places} == {found.layer}, fault
        # what query heads share has no head of its own, but may be all that is named
        of_heads = [place for place in places if place.what not in ("lse", "dk", "dv")]
        assert {place.place.head for place in of_heads or places} == {found.head}
        if fault.startswith("dq"):
            assert {place.what for place in places} == {"dq"}
        # a factor of the scores is wrong in every result, of which BF16 may show any
        elif fault.startswith("last") or dtype == torch.float32:
            assert "out" in {place.what for place in places}


@pytest.mark.parametrize(
    ("name", "way"),
    _sampled(4, [(name, way) for name in dict(SEEN) for way in IN_ONE_PROCESS]),
)
def test_a_way_to_train_ends_in_the_same_bits_with_every_layer_measured(name, way):
    family = FAMILIES[name]
    if "checkpointing" in way and not family.build("eager").supports_gradient_checkpointing:
        pytest.skip(f"transformers has no checkpointing for {name}")
    ends = [
        trained(family.build(_trained_by(name)), family, IN_ONE_PROCESS[way], watch=watch)
        for watch in (False, True)
    ]
    (weights, _), (watched, probe) = ends
    assert all(torch.equal(x, y) for x, y in zip(weights, watched, strict=True))
    assert not unmeasured(probe)


@pytest.mark.long
@pytest.mark.parametrize("way", ON_TWO_RANKS)
def test_two_ranks_end_in_the_same_bits_with_every_layer_measured(way, tmp_path):
    families = {name: _trained_by(name) for name in dict(SEEN)}
    if way == "FSDP2":
        del families["clip"]  # fully_shard takes no parameter without a dimension
    arguments = (str(tmp_path), way, families)
    torch.multiprocessing.spawn(train_on_a_rank, arguments, nprocs=2)
    for rank in range(2):
        ended = torch.load(tmp_path / f"{way}-{rank}.pt")
        assert ended == dict.fromkeys(families, (True, []))


@pytest.mark.long
@pytest.mark.usefixtures("one_thread_and_no_compiled_graphs")
@inductor
@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_a_compiled_model_ends_in_the_same_bits_with_every_layer_measured(name, way):
    family, ends = FAMILIES[name], []
    for watch in (False, True):
        torch.compiler.reset()
        ends.append(trained(family.build("sdpa"), family, COMPILED[way], watch=watch))
    (weights, _), (watched, probe) = ends
    assert all(torch.equal(x, y) for x, y in zip(weights, watched, strict=True))
    assert not unmeasured(probe)


@pytest.mark.long
@pytest.mark.usefixtures("one_thread_and_no_compiled_graphs")
@inductor
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, family in FAMILIES.items()
        # on a CPU flex takes no sinks, and Inductor reads beyond T5's bias (torch 2.13)
        if "flex_attention" in family.implementations and name not in ("gpt_oss", "t5")
    ],
)
def test_flex_attention_is_seen_forward(name):
    """On a CPU it has no backward, so it is looked at in an evaluation."""
    family = FAMILIES[name]
    model = family.build("flex_attention").eval()
    with torch.no_grad():
        plain = loss_of(model, family.inputs(0))
        with shadow(model, "flash:golden", evaluation=True) as probe:
            watched = loss_of(model, family.inputs(0))
            probe.step()
    assert torch.equal(plain, watched)
    assert [one.state for one in probe.coverage] == ["seen"] * family.attentions
    for layer in probe.layers:
        assert probe.metrics[f"deviation/{layer}/out/golden_baseline_rel_fro"] < 1e-6
