"""The order-free hash: the same under any sharding, another one for any change of bits."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics import numbered_values
from stability.metrics.numbered_values import NumberedValues
from stability.metrics.weight_hash import (
    _add_on_cpu,
    add_by_torch,
    finished_weight_hash,
    local_weight_hash,
    weight_hash,
)
from tests.stability.random_pieces import shardings

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.bool,
    torch.int64,
)


def some_state(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(7, 3, generator=draw),
        "double": torch.randn(5, generator=draw, dtype=torch.float64),
        "half": torch.randn(2, 3, 2, generator=draw).bfloat16(),
        "mask": torch.randint(2, (4,), generator=draw).bool(),
        "count": torch.tensor(-3),
        "empty": torch.empty(0, 4),
    }


STATE = some_state()


@settings(max_examples=40)
@given(shardings(STATE), st.integers(1, 9), st.randoms())
def test_any_sharding_and_any_order_give_the_same_hash(held, portion, shuffler):
    expected = weight_hash(STATE)
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(numbered_values, "_PORTION", portion)
        lanes = []
        for pieces in held:
            names = list(pieces)
            shuffler.shuffle(names)
            lanes.append(local_weight_hash({name: pieces[name] for name in names}))
    assert finished_weight_hash(sum(lanes), held[-1]) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("places", [None, torch.tensor([4, 0, 2**40])], ids=["range", "places"])
def test_torch_gives_the_bits_of_the_loop(dtype, places):
    bits = torch.tensor([-1, 0, 1], dtype=torch.int64).view(torch.uint8)
    values = torch.arange(3).to(dtype)
    if dtype != torch.bool:
        values = bits[: 3 * dtype.itemsize].clone().view(dtype)
    part = NumberedValues(values, 0 if places is not None else 2**35, places)
    assert torch.equal(_add_on_cpu(part, 2**63 + 5), add_by_torch(part, 2**63 + 5))


def changed(name, index, to):
    state = some_state()
    state[name].view(-1)[index] = to
    return state


def swapped(name, one, other):
    values = STATE[name].view(-1)
    state = changed(name, one, values[other])
    state[name].view(-1)[other] = values[one]
    return state


def nan_of(payload):
    return torch.tensor(payload, dtype=torch.int32).view(torch.float32)


ZEROS = {"a": torch.zeros(3), "b": torch.ones(3)}
VARIANTS = {
    "as it is": STATE,
    "swapped values": swapped("wide", 0, 4),
    "less an empty tensor": {k: x for k, x in STATE.items() if k != "empty"},
    "empty of another shape": {**STATE, "empty": torch.empty(4, 0)},
    "empty of another dtype": {**STATE, "empty": torch.empty(0, 4).double()},
    "other shape": {**STATE, "wide": STATE["wide"].reshape(3, 7)},
    "transposed": {**STATE, "wide": STATE["wide"].reshape(3, 7).T.contiguous()},
    "other name": {("other" if k == "wide" else k): x for k, x in STATE.items()},
    "bits of another dtype": {**STATE, "wide": STATE["wide"].view(torch.int32)},
    "flipped mask": {**STATE, "mask": ~STATE["mask"]},
    "nan": changed("wide", 1, nan_of(0x7FC00000)),
    "other nan": changed("wide", 1, nan_of(0x7FC00001)),
    "nothing": {},
    "zeros": ZEROS,
    "a minus zero": {**ZEROS, "a": torch.tensor([0.0, -0.0, 0.0])},
    "zeros and ones swapped": {"a": ZEROS["b"], "b": ZEROS["a"]},
}


def test_whatever_differs_in_bits_names_or_shapes_has_another_hash():
    found = {what: weight_hash(state) for what, state in VARIANTS.items()}
    assert len(set(found.values())) == len(found), found
    # neither lane stands alone
    for lane in (slice(0, 16), slice(16, 32)):
        assert len({text[lane] for text in found.values()}) == len(found)


def test_every_single_bit_counts():
    base = torch.randn(50).view(torch.int32)
    lanes = set()
    for place, bit in itertools.product(range(50), range(32)):
        flipped = base.clone()
        flipped[place] ^= -(2**31) if bit == 31 else 1 << bit
        lanes.add(weight_hash({"a": flipped.view(torch.float32)}))
    assert len(lanes | {weight_hash({"a": base.view(torch.float32)})}) == 50 * 32 + 1


def test_structured_changes_do_not_cancel():
    base = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).view(torch.int32)
    seen, tried = {weight_hash({"a": base})}, 1
    for constant in range(1, 500):  # every weight xor, and plus, one constant
        seen |= {weight_hash({"a": base ^ constant}), weight_hash({"a": base + constant})}
        tried += 2
    draw, pairs = random.Random(1), itertools.combinations(range(32 * 32), 2)
    for one, other in draw.sample(list(pairs), 1000):  # a unit up and one down; two flips
        moved, flipped = base.flatten().clone(), base.flatten().clone()
        moved[one] += 1
        moved[other] -= 1
        # the last bit would be the same as a unit up and down, where it is free
        flipped[[one, other]] ^= 1 << draw.randrange(1, 31)
        seen |= {weight_hash({"a": x.view(32, 32)}) for x in (moved, flipped)}
        tried += 2
    for shift in range(1, 32 * 32, 2):  # all values turned round
        seen.add(weight_hash({"a": base.flatten().roll(shift).view(32, 32)}))
        tried += 1
    assert len(seen) == tried


def test_each_bit_of_the_words_is_even_handed():
    # 2^16 places of one value: 128 bits, each set half of the time within 6 sd
    part = NumberedValues(torch.ones(1), 0)
    ones = torch.zeros(128)
    for place in range(2**13):
        lanes = _add_on_cpu(NumberedValues(part.values, place), 12345)
        ones += torch.tensor([(word >> bit) & 1 for word in lanes.tolist() for bit in range(64)])
    assert ((ones / 2**13 - 0.5).abs() < 6 * 0.5 / 2**6.5).all()


def test_known_state_has_known_hash():
    # records of years are compared by it: it must never change
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(-0.0).double()}
    assert weight_hash(state) == "55aeb620e6330f325edc6117c9a5501c"


def test_values_of_16_bytes_are_refused():
    with pytest.raises(ValueError, match=r"weight_hash: z must hold values of 1, 2, 4 or 8 bytes"):
        weight_hash({"z": torch.zeros(2, dtype=torch.complex128)})
