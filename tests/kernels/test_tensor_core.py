"""The emulated tensor core equals the published rule, written here again in exact fractions."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels import round_to
from attention_kernels.formats import format_named
from attention_kernels.tensor_core import tensor_core_matmul
from attention_kernels.tensor_core_models import MODELS, TensorCoreModel, tensor_core_named

MIN_EXPONENTS = {"e4m3": -6, "e5m2": -14, "fp16": -14, "bf16": -126, "tf32": -126, "fp32": -126}
PATTERNS = {"e4m3": 8, "e5m2": 8, "fp16": 16, "bf16": 16, "tf32": 19}
ACCUMULATOR_BITS = {"fp32": 23, "e8m13": 13}
FRACTION_BITS = {"volta": 23, "turing": 24, "ampere": 24, "ada": 24, "hopper": 25, "blackwell": 25}


def cut(x, unit, down=False):
    """x as a multiple of unit, toward zero or down."""
    steps = x / unit
    whole = steps.numerator // steps.denominator
    return (whole if down or steps >= 0 else -(-steps.numerator // steps.denominator)) * unit


def exponent(x, least):
    """e of |x| in [2**e, 2**(e + 1)), and at least the format's smallest; x is not 0."""
    found = abs(x.numerator).bit_length() - x.denominator.bit_length()
    found -= Fraction(2) ** found > abs(x)
    return max(found, least)


def defined(a, b, c, model, formats):
    """The sum of products of one row and one column, by the rule of arXiv 2511.10909."""
    least = [MIN_EXPONENTS[name] for name in formats]
    for k in range(0, len(a), model.products):
        terms = [(Fraction(c), exponent(Fraction(c), -126) if c else model.zero_exponent)]
        for x, y in zip(a[k : k + model.products], b[k : k + model.products], strict=True):
            x, y = Fraction(x), Fraction(y)
            exponents = x * y and exponent(x, least[0]) + exponent(y, least[1])
            terms.append((x * y, exponents if x * y else model.zero_exponent))
        unit = Fraction(2) ** (max(e for _, e in terms) - model.fraction_bits)
        c = sum(cut(term, unit, model.cut == "down") for term, _ in terms)
        if c:
            last = exponent(c, -126) - ACCUMULATOR_BITS[model.accumulator]
            c = cut(c, Fraction(2) ** last)
    return c


def values(format, min_size):
    """Lists of finite values of a format, from its bit patterns: of any size, and subnormal."""
    of = format_named(format)
    pattern = st.integers(0, 2 ** PATTERNS[format] - 1).map(of.value_of)
    return st.lists(pattern.filter(lambda x: abs(x) <= of.max_value), min_size=min_size)


@st.composite
def sums(draw, model):
    formats = [draw(st.sampled_from(model.operands)) for _ in range(2)]
    count = draw(st.integers(1, 2 * model.products + 3))
    pairs = [draw(values(format, count))[:count] for format in formats]
    near = draw(st.booleans())
    if near:  # exponents so close that every term counts
        pairs = [[round_near(x, f) for x in row] for row, f in zip(pairs, formats, strict=True)]
    start = draw(st.floats(width=32, allow_nan=False, allow_infinity=False) | st.just(0.0))
    return formats, *pairs, start * (2.0**-100 if near else 1.0) if start else 0.0


def round_near(x, format):
    """A value of the format with the mantissa of x, near 1."""
    mantissa, _ = torch.frexp(torch.tensor(x, dtype=torch.float32))
    return round_to(mantissa * 4, format).item()


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15)
@given(data=st.data())
def test_a_sum_is_the_one_defined_in_fractions(name, data):
    model = MODELS[name]
    formats, a, b, start = data.draw(sums(model))
    c = torch.tensor([[start]], dtype=torch.float32)
    found = tensor_core_matmul(
        torch.tensor([a]), torch.tensor([b]).T, name, c=c, formats=tuple(formats)
    )
    wanted = defined(a, b, c.item(), model, formats)
    if abs(wanted) >= Fraction(2) ** 128:
        assert found.item() == (float("inf") if wanted > 0 else -float("inf"))
    else:
        assert Fraction(found.item()) == wanted


@pytest.mark.parametrize("cut_to", ["toward_zero", "down"])
@pytest.mark.parametrize("name", ["ampere_tf32", "hopper_fp8", "hopper_bf16", "blackwell_fp8"])
def test_each_element_of_a_batch_is_its_row_and_its_column(name, cut_to):
    model = replace(MODELS[name], cut=cut_to)
    formats = (model.operands[0], model.operands[-1])
    draws = torch.Generator().manual_seed(3)
    spread = 2.0 ** torch.randint(-7, 7, (2, 3, 70), generator=draws)
    a = round_to(torch.randn(2, 3, 70, generator=draws) * spread, formats[0])
    b = round_to(torch.randn(2, 70, 5, generator=draws), formats[1])
    c = torch.randn(2, 3, 5, generator=draws) * 20
    kept = [x.clone() for x in (a, b, c)]
    found = tensor_core_matmul(a, b, model, c=c, formats=formats)
    for matrix in range(2):
        for row in range(3):
            for column in range(5):
                at = a[matrix, row].tolist(), b[matrix, :, column].tolist()
                wanted = defined(*at, c[matrix, row, column].item(), model, formats)
                assert Fraction(found[matrix, row, column].item()) == wanted
    assert all(map(torch.equal, (a, b, c), kept)), "the arguments stay as they were"


def test_rows_are_the_same_however_many_go_at_once(monkeypatch):
    draws = torch.Generator().manual_seed(4)
    a, b = (round_to(torch.randn(37, 37, generator=draws), "e4m3") for _ in range(2))
    whole = tensor_core_matmul(a, b, "hopper_fp8")
    for products in (1, 37 * 32 * 5):
        monkeypatch.setattr("attention_kernels.tensor_core.PRODUCTS_AT_ONCE", {"cpu": products})
        assert torch.equal(tensor_core_matmul(a, b, "hopper_fp8"), whole)


@pytest.mark.parametrize("name", MODELS)
def test_the_published_example_of_a_sum_that_differs_by_architecture(name):
    """arXiv 2511.10909: 2**23 - 2**23 - 0.5 - 0.25 - 0.125, which is -0.875."""
    a = torch.tensor([[-(2.0**13), -0.5, -0.25, -0.125]])
    b = torch.tensor([[2.0**10], [1.0], [1.0], [1.0]])
    formats = (MODELS[name].operands[-1],) * 2
    found = tensor_core_matmul(a, b, name, c=torch.tensor([[2.0**23]]), formats=formats)
    # below 2**23 a term keeps 23, 24 or 25 bits: a unit of 1, 0.5 or 0.25; in FP8, 13
    short = name in ("ada_fp8", "hopper_fp8")
    wanted = {23: 0.0, 24: -0.5, 25: -0.75}[FRACTION_BITS[name.split("_")[0]]]
    assert found.item() == (0.0 if short else wanted)


def one_sum(products, name="hopper_fp8", **options):
    """The sum of products x * 1, each at its place."""
    a, b = torch.zeros(1, 64), torch.ones(64, 1)
    for place, x in products.items():
        a[0, place] = x
    return tensor_core_matmul(a, b, name, **options).item()


def test_fp8_on_hopper_keeps_13_bits_below_the_largest_product():
    assert one_sum({0: 16.0, 1: -16.0, 2: 2.0**-9}) == 2.0**-9
    assert one_sum({0: 32.0, 1: -32.0, 2: 2.0**-9}) == 0.0
    # 28 is 1.75 * 2**4: the exponent counts, not the value
    assert one_sum({0: 28.0, 1: -28.0, 2: 2.0**-9}) == 2.0**-9


def test_a_product_of_3_counts_by_its_operands_exponents():
    a = torch.tensor([[1.5, -1.5, 2.0**-7]])
    b = torch.tensor([[1.5], [1.5], [2.0**-6]])
    assert tensor_core_matmul(a, b, "hopper_fp8").item() == 2.0**-13


def test_what_is_cut_off_is_cut_toward_zero_on_either_side():
    assert one_sum({0: 16.0, 1: -16.0, 2: 3 * 2.0**-9}) == 3 * 2.0**-9
    assert one_sum({0: 32.0, 1: -32.0, 2: 3 * 2.0**-9}) == 2.0**-8
    assert one_sum({0: 32.0, 1: -32.0, 2: -3 * 2.0**-9}) == -(2.0**-8)
    down = replace(MODELS["hopper_fp8"], cut="down")
    assert one_sum({0: 32.0, 1: -32.0, 2: -3 * 2.0**-9}, down) == -(2.0**-7)


def test_32_products_are_added_at_once_and_the_next_after_them():
    pair = {0: 256.0, 1: -256.0}
    assert one_sum(pair | {31: 2.0**-9}) == 0.0
    assert one_sum(pair | {32: 2.0**-9}) == 2.0**-9


def test_the_accumulator_absorbs_what_lies_14_bits_below():
    """256 and 2**-6 are 14 bits apart, so the accumulator stays where it is forever."""
    a, b = torch.full((1, 4096), 2.0**-3), torch.full((4096, 1), 2.0**-3)
    a[0, 0], b[0, 0] = 16.0, 16.0
    assert tensor_core_matmul(a, b, "hopper_fp8").item() == 256.0
    assert tensor_core_matmul(a, b, "blackwell_fp8").item() == 256 + 4095 / 64


@pytest.mark.parametrize("name", MODELS)
def test_a_block_of_the_largest_products_does_not_overflow(name):
    """Terms just below 4 units of the largest exponent, and an accumulator just below 2."""
    model = MODELS[name]
    of = format_named(model.operands[0])
    most = 2 - 2.0**-of.mantissa_bits
    count = model.products
    a, b = torch.full((1, count), most), torch.full((count, 1), most)
    for sign in (1, -1):
        c = torch.tensor([[sign * (2 - 2.0**-23)]])
        wanted = defined([sign * most] * count, [most] * count, c.item(), model, [of.name] * 2)
        assert Fraction(tensor_core_matmul(sign * a, b, name, c=c).item()) == wanted


def test_promotion_adds_sums_of_128_in_fp32():
    draws = torch.Generator().manual_seed(5)
    a = round_to(torch.randn(3, 300, generator=draws), "e4m3")
    b = round_to(torch.randn(300, 4, generator=draws), "e4m3")
    c = torch.randn(3, 4, generator=draws)
    wanted = c
    for k in (0, 128, 256):
        wanted = wanted + tensor_core_matmul(a[:, k : k + 128], b[k : k + 128], "hopper_fp8")
    found = tensor_core_matmul(a, b, "hopper_fp8", c=c, promote_every=128)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, tensor_core_matmul(a, b, "hopper_fp8", c=c))


def test_the_exponent_of_a_subnormal_is_that_of_its_format():
    a = torch.tensor([[2.0**-9, -(2.0**-9), 2.0**-6]])
    b = torch.tensor([[2.0**8], [2.0**8], [2.0**-6]])
    # 2**-9 is a normal value of e5m2. In e4m3 it is a subnormal, whose exponent is -6: its product
    # counts as 2**2, and 2**-12 is below the unit of 2**-11.
    assert tensor_core_matmul(a, b, "hopper_fp8", formats=("e5m2", "e5m2")).item() == 2.0**-12
    assert tensor_core_matmul(a, b, "hopper_fp8", formats=("e4m3", "e5m2")).item() == 0.0
    assert tensor_core_matmul(b.T, a.T, "hopper_fp8", formats=("e5m2", "e4m3")).item() == 0.0
    assert tensor_core_matmul(b.T, a.T, "hopper_fp8", formats=("e4m3", "e5m2")).item() == 2.0**-12


@pytest.mark.parametrize("name", ["volta_fp16", "ampere_bf16", "hopper_bf16"])
def test_a_term_that_is_zero_has_an_exponent_too(name):
    # The accumulator is zero, and so nothing is kept below its exponent less the fraction bits.
    last = {"volta": -154, "ampere": -156, "hopper": -158}[name.split("_")[0]]
    model = replace(MODELS[name], operands=("bf16",))  # whose products go further down than FP16's
    for exponent, kept in ((last, True), (last - 1, False)):
        a = torch.tensor([[2.0**-89, -(2.0 ** (exponent + 60))]])
        b = torch.full((2, 1), 2.0**-60)
        # 2**-149, FP32's smallest, is left whole, or is cut to zero where anything is taken from it
        assert tensor_core_matmul(a, b, model).item() == (0.0 if kept else 2.0**-149)


def test_sums_beyond_fp32_are_infinite_and_nan_stays():
    huge = torch.tensor([[2.0**127, 2.0**127]])
    one = torch.ones(2, 1)
    assert tensor_core_matmul(huge, one, "hopper_bf16").item() == float("inf")
    assert tensor_core_matmul(-huge, one, "hopper_bf16").item() == -float("inf")
    infinite = torch.tensor([[float("inf"), 1.0]])
    for name in ("hopper_bf16", "blackwell_bf16", "hopper_fp8"):
        assert tensor_core_matmul(infinite, one, name).item() == float("inf")
        assert tensor_core_matmul(infinite, one - 1, name).isnan().all()
        nan = torch.full((1, 1), torch.nan)
        assert tensor_core_matmul(one.T, one, name, c=nan).isnan().all()
        assert tensor_core_matmul(one.T * torch.nan, one, name).isnan().all()


@pytest.mark.parametrize("model", ["ada_fp8", "blackwell_fp8"])
@pytest.mark.parametrize("cut_to", ["toward_zero", "down"])
def test_a_sum_of_zero_has_no_sign(model, cut_to):
    model, zeros = replace(MODELS[model], cut=cut_to), torch.full((1, 40), -0.0)
    found = tensor_core_matmul(zeros, torch.ones(40, 1), model, c=torch.tensor([[-0.0]]))
    assert str(found.item()) == "0.0"


def test_empty_products_leave_the_accumulator():
    c = torch.tensor([[1 + 2.0**-20]])
    assert torch.equal(tensor_core_matmul(torch.ones(1, 0), torch.ones(0, 1), "ada_fp8", c=c), c)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: tensor_core_matmul(x.double(), x, "hopper_bf16"), "a must be float32, got"),
        (lambda x: tensor_core_matmul(x, x.half(), "hopper_bf16"), "b must be float32, got"),
        (lambda x: tensor_core_matmul(x, x[:1], "hopper_bf16"), r"a and b must be \(\.\.\., M, K"),
        (lambda x: tensor_core_matmul(x[0], x, "hopper_bf16"), r"a and b must be \(\.\.\., M, K"),
        (
            lambda x: tensor_core_matmul(x, x, "hopper_bf16", c=x[:1]),
            r"c must be \(2, 2\), got \(1, 2\)",
        ),
        (
            lambda x: tensor_core_matmul(x, x + x.triu(1) * 2.0**-9, "hopper_bf16"),
            "b must hold values of bf16, got 1.001953125; round it first",
        ),
        (
            lambda x: tensor_core_matmul(500 * x, x, "hopper_fp8"),
            "a must hold values of e4m3, got 500.0",
        ),
        (
            lambda x: tensor_core_matmul(x, x, "hopper_fp8", promote_every=48),
            "promote_every must be a multiple of 32, the products that hopper_fp8 adds at once, "
            "got 48",
        ),
        (
            lambda x: tensor_core_matmul(x, x, "hopper_fp8", promote_every=0),
            "promote_every must be a multiple of 32",
        ),
        (
            lambda x: tensor_core_matmul(x, x, "hopper_fp8", formats=("e4m3", "bf16")),
            "formats must be held by e4m3, e5m2, the operands of hopper_fp8, got 'bf16'",
        ),
        (
            lambda x: tensor_core_matmul(x, x, "hoper_fp8"),
            "must be a known tensor core, got 'hoper_fp8'; nearest: hopper_fp8",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operands": ()}, "operands must be a tuple of at least one format"),
        ({"operands": ("e4m4x",)}, "must be a known format"),
        ({"products": 0}, "products must be at least 1, got 0 in 'hopper_fp8'"),
        ({"fraction_bits": 46}, "fraction_bits must be from 1 to what FP64 adds exactly, got 46"),
        ({"cut": "up"}, "cut must be one of toward_zero, down, got 'up'"),
        ({"accumulator": "fp64"}, "accumulator must be a format that FP32 holds, got 'fp64'"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(MODELS["hopper_fp8"], **changes)


def test_every_model_says_where_it_is_from_and_what_is_wider():
    for name, model in MODELS.items():
        assert tensor_core_named(name) is model
        assert model.name == name
        assert "arXiv 2511.10909" in model.source
        assert isinstance(model, TensorCoreModel)
        if model.wider:
            wider = MODELS[model.wider]
            assert all(map(wider.takes, model.operands)), "it takes what the narrow one does"
        assert bool(model.wider) == name.endswith("fp8")


def test_a_narrower_format_is_read_as_the_operand_that_holds_it():
    assert MODELS["hopper_fp8"].operand_format("e3m2").name == "e4m3"
    assert MODELS["hopper_fp8"].operand_format("e5m2").name == "e5m2"
    assert MODELS["hopper_fp8"].operand_format("e5m3") is None
    assert MODELS["hopper_bf16"].operand_format("e4m3").name == "bf16"
    assert not MODELS["hopper_bf16"].takes("fp16")
    assert MODELS["hopper_tf32"].takes("fp32")
