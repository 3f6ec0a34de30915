"""A planted fault does to each result what the formulas of the fault say, and touches no other."""

import inspect
from typing import NamedTuple

import pytest
import torch

from attention_kernels import flash_attention, golden_attention
from attention_kernels.formats import FORMATS
from attention_kernels.rounding import round_into, round_to
from attention_kernels.testing import FAULT_NAMES, FAULTS, make_packed, plant, with_gradients
from attention_kernels.testing.golden_faults import biased, spacing

RESULTS = ("out", "lse", "dq", "dk", "dv")
IN_FP64 = [name for name in FAULTS if name != "bias_tenth_ulp"]


class Problem(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    causal: bool

    def to(self, dtype):
        return Problem(*(x.to(dtype) for x in self[:4]), self.causal)


def _problem(query_len, key_len, causal, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(query_len)

    def draw(heads, length):
        return torch.randn(2, heads, length, 16, generator=generator, dtype=torch.float64)

    q, dout = draw(heads, query_len), draw(heads, query_len)
    return Problem(q, draw(kv_heads, key_len), draw(kv_heads, key_len), dout, causal)


PROBLEMS = {
    "q70-k70-causal": _problem(70, 70, True),
    "q33-k100": _problem(33, 100, False),
    "q33-k100-causal": _problem(33, 100, True),
    "q40-k21-causal": _problem(40, 21, True),  # its first 19 rows attend nothing
    "q5-k5-causal": _problem(5, 5, True, kv_heads=4),
    "q128-k128": _problem(128, 128, False, kv_heads=1),
}


@pytest.fixture(params=PROBLEMS, name="problem")
def _a_problem(request):
    return PROBLEMS[request.param]


def _formulas(problem, *, k_source=None, seen=None, delta=1.0, scale=1.0, leak=0):
    """The textbook's formulas on whole matrices, with the backward written out."""
    q, k, v, dout, causal = problem
    group, (query_len, key_len) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    scale = scale / 4  # 1/sqrt(head_dim)
    source = torch.arange(key_len) if k_source is None else k_source
    k_wide, v_wide = (x[:, :, source].repeat_interleave(group, 1) for x in (k, v))
    shown = torch.ones(query_len, key_len, dtype=torch.bool) if seen is None else seen
    if causal:
        shown = shown & torch.ones(query_len, key_len).tril(key_len - query_len + leak).bool()
    scores = (scale * q @ k_wide.mT).masked_fill(~shown, -torch.inf)
    lse = scores.logsumexp(-1)
    p = torch.where(shown, (scores - lse.unsqueeze(-1)).exp(), 0.0)
    out = p @ v_wide
    ds = p * (dout @ v_wide.mT - delta * (dout * out).sum(-1, keepdim=True)) * scale
    dk, dv = ds.mT @ q, p.mT @ dout
    back = torch.zeros(key_len, key_len, dtype=torch.float64)
    back[source, torch.arange(key_len)] = 1  # a stale key's gradient goes to the key it holds
    dk, dv = ((back @ x).unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return {"out": out, "lse": lse, "dq": ds @ k_wide, "dk": dk, "dv": dv}


def _expected(name, problem):
    keys = torch.arange(problem.k.shape[2])
    if name.partition("_gain")[0] in ("out", "dq", "dk", "dv"):
        right, of = _formulas(problem), name.partition("_")[0]
        return {**right, of: right[of] * (1.01 if name == "out_gain_1pct" else 1.005)}
    if name == "scale_gain":
        return _formulas(problem, scale=1.005)
    if name == "dropped_key":
        seen = torch.ones(len(keys), dtype=torch.bool)
        seen[31::32] = False
        if len(keys) < 32:
            seen[-1] = False
        return _formulas(problem, seen=seen.expand(problem.q.shape[2], -1))
    if name == "stale_block":
        block = 32 if len(keys) >= 64 else (len(keys) + 1) // 2
        source = keys.clone()
        source[block : 2 * block] = keys[: len(source[block : 2 * block])]
        return _formulas(problem, k_source=source)
    return _formulas(problem, delta=0.95) if name == "delta_off" else _formulas(problem, leak=1)


def _results(attention, problem):
    found = {}

    def keep_lse(q, k, v, **options):
        out, found["lse"] = attention(q, k, v, return_lse=True, **options)
        return out

    found.update(with_gradients(keep_lse, *problem[:4], causal=problem.causal))
    return found


def _assert_equal(found, expected, atol=1e-12):
    for name in RESULTS:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol, msg=name)


def test_the_names_are_the_table_s():
    assert tuple(FAULTS) == FAULT_NAMES
    assert all(fault.name == name for name, fault in FAULTS.items())


def test_what_the_whole_gradient_hardly_shows_is_asked_of_the_operator_alone():
    early = {"scale_gain", "dq_gain", "dk_gain", "delta_off"}
    assert {name for name, fault in FAULTS.items() if fault.levels == ("operator",)} == early
    assert all(fault.levels[0] == "operator" for fault in FAULTS.values())


@pytest.mark.parametrize("name", IN_FP64)
def test_planted_on_golden_every_result_is_as_the_formulas_say(name, problem):
    _assert_equal(_results(plant(golden_attention, name), problem), _expected(name, problem))


@pytest.mark.parametrize("name", IN_FP64)
def test_a_fault_moves_the_results_that_it_names_and_no_other(name, problem):
    right, wrong = _formulas(problem), _expected(name, problem)
    moved = {key for key in RESULTS if (wrong[key] - right[key]).nan_to_num().abs().max() > 1e-6}
    fault = FAULTS[name]
    if fault.causal_only and not problem.causal:
        assert not moved
    else:
        assert moved == set(fault.results)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_a_fault_does_not_name_keeps_its_bits_and_all_keep_their_dtypes(name, dtype):
    problem = PROBLEMS["q70-k70-causal"].to(dtype)
    wrong, right = (_results(x, problem) for x in (plant(flash_attention, name), flash_attention))
    for key in RESULTS:
        assert wrong[key].dtype == right[key].dtype
        assert torch.equal(wrong[key], right[key]) == (key not in FAULTS[name].results), key


def _rounded_golden(q, k, v, **mask):
    """Golden correctly rounded to q's dtype: torch's own cast of FP64 would round twice."""
    out = golden_attention(q, k, v, **mask)
    with torch.no_grad():
        rounded = round_into(out, "bf16", q.dtype)
    return rounded + (out - out.detach()).to(q.dtype)


def test_a_gain_on_a_rounded_out_is_the_gain_before_its_rounding():
    problem = PROBLEMS["q70-k70-causal"].to(torch.bfloat16)
    golden = golden_attention(*problem[:3], causal=True)
    out = plant(_rounded_golden, "out_gain")(*problem[:3], causal=True)
    assert torch.equal(out, round_into(1.005 * golden, "bf16", torch.bfloat16))
    slope = (out.double() * golden).sum() / golden.square().sum() - 1
    assert slope.item() == pytest.approx(5e-3, abs=1e-4)


def test_the_bias_is_a_tenth_of_a_spacing_before_the_rounding():
    problem = PROBLEMS["q128-k128"].to(torch.bfloat16)
    golden = golden_attention(*problem[:3], causal=False)
    out = plant(_rounded_golden, "bias_tenth_ulp")(*problem[:3], causal=False)
    ulp = spacing(golden, FORMATS["bf16"])
    assert torch.equal(out, round_into(golden + 0.1 * ulp, "bf16", torch.bfloat16))
    # 16384 errors, each uniform over a spacing: a standard error of 0.0023
    assert ((out.double() - golden) / ulp).mean().item() == pytest.approx(0.1, abs=0.01)


def test_the_bias_reaches_dq_and_dk_through_delta(problem):
    q, k, v, dout, causal = problem
    right = _formulas(problem)
    ulp = spacing(right["out"], FORMATS["bf16"])
    read = round_to(right["out"] + 0.1 * ulp, "bf16") - round_to(right["out"], "bf16")

    def attend(q, k, v):
        return biased(0.1)(q, k, v, {"causal": causal}, torch.bfloat16).out

    found = with_gradients(attend, q, k, v, dout)
    torch.testing.assert_close(found["out"], right["out"] + 0.1 * ulp, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["dv"], right["dv"], rtol=0, atol=1e-12)
    # dS moves by -P * rowsum(dO * read)
    off = -(dout * read).sum(-1, keepdim=True) / 4
    group = q.shape[1] // k.shape[1]
    k_wide = k.repeat_interleave(group, 1)
    shown = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        shown = shown.tril(k.shape[2] - q.shape[2])
    scores = (q @ k_wide.mT / 4).masked_fill(~shown, -torch.inf)
    p = scores.softmax(-1).nan_to_num()
    dq = right["dq"] + off * (p @ k_wide)
    dk = right["dk"] + (p.mT @ (off * q)).unflatten(1, (-1, group)).sum(2)
    torch.testing.assert_close(found["dq"], dq, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["dk"], dk, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", IN_FP64)
def test_packed_sequences_have_the_fault_each(name):
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": torch.float64}
    generator = torch.Generator().manual_seed(0)
    q, k, v, mask = make_packed((3, 0, 70), (9, 4, 70), **sizes, generator=generator)
    planted = plant(golden_attention, name)
    dout = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    found = with_gradients(planted, q, k, v, dout, **mask)
    for rows, keys in ((slice(0, 3), slice(0, 9)), (slice(3, None), slice(13, None))):
        parts = (q[rows], k[keys], v[keys], dout[rows])
        one = (x.transpose(0, 1)[None] for x in parts)
        alone = with_gradients(planted, *one, causal=True)
        for result, at in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
            expected = alone[result][0].transpose(0, 1)
            torch.testing.assert_close(found[result][at], expected, rtol=0, atol=1e-12)
    lse = planted(q, k, v, return_lse=True, **mask).lse
    assert lse.shape == (4, 73)
    assert not found["dk"][9:13].any()


def test_a_padded_key_stays_hidden_and_a_window_leaks_on_its_right_alone():
    q, k, v, _, _ = PROBLEMS["q70-k70-causal"]
    padding = (torch.arange(70) < 60).expand(2, -1)
    dropped = plant(golden_attention, "dropped_key")(q, k, v, causal=True, key_padding=padding)
    seen = padding & (torch.arange(70) % 32 != 31)
    expected = golden_attention(q, k, v, causal=True, key_padding=seen)
    torch.testing.assert_close(dropped, expected, rtol=0, atol=1e-12)
    leak = plant(golden_attention, "causal_leak")(q, k, v, causal=True, window=(5, None))
    expected = golden_attention(q, k, v, window=(5, 1))
    torch.testing.assert_close(leak, expected, rtol=0, atol=1e-12)


def test_alibi_slopes_of_packed_sequences_stay_with_their_sequence():
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": 16, "dtype": torch.float64}
    q, k, v, mask = make_packed((3, 5), (9, 5), **sizes, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    found = plant(golden_attention, "dropped_key")(q, k, v, alibi_slopes=slopes, **mask)
    last = [x[start:].transpose(0, 1)[None] for x, start in ((q, 3), (k, 9), (v, 9))]
    seen = (torch.arange(5) < 4)[None]
    alone = golden_attention(*last, causal=True, alibi_slopes=slopes[1], key_padding=seen)
    torch.testing.assert_close(found[3:], alone[0].transpose(0, 1), rtol=0, atol=1e-12)


def test_a_gradient_that_nobody_asks_for_is_not_made():
    q, k, v, dout, _ = PROBLEMS["q70-k70-causal"]
    leaf = q.detach().requires_grad_()
    out = plant(golden_attention, "dropped_key")(leaf, k, v, causal=True)
    (dq,) = torch.autograd.grad(out, leaf, dout)
    expected = _expected("dropped_key", PROBLEMS["q70-k70-causal"])["dq"]
    torch.testing.assert_close(dq, expected, rtol=0, atol=1e-12)
    assert not plant(golden_attention, "dq_gain")(q, k, v, causal=True).requires_grad


def test_a_planted_attention_keeps_the_signature_and_the_strides_of_its_own():
    def own(q, k, v, *, causal, scale=None):
        return golden_attention(q, k, v, causal=causal, scale=scale).transpose(1, 2).clone()

    def strided(q, k, v, *, causal, scale=None):
        return own(q, k, v, causal=causal, scale=scale).transpose(1, 2)

    q, k, v = PROBLEMS["q70-k70-causal"][:3]
    for name in FAULTS:
        assert inspect.signature(plant(own, name)) == inspect.signature(own)
    planted = plant(strided, "dropped_key")(q, k, v, causal=True)
    assert planted.stride() == strided(q, k, v, causal=True).stride()


def test_an_unknown_fault_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"must be a planted fault, got 'scale_gian'; nearest: sc"):
        plant(flash_attention, "scale_gian")


def test_golden_has_no_rounding_to_bias_and_delta_no_softcap():
    q, k, v, dout, _ = PROBLEMS["q5-k5-causal"]
    with pytest.raises(ValueError, match=r"out must be narrower than FP64, got float64; there mus"):
        plant(golden_attention, "bias_tenth_ulp")(q, k, v, causal=True)
    with pytest.raises(ValueError, match=r"softcap must be 0, got 30\.0; plant another fault"):
        with_gradients(
            plant(golden_attention, "delta_off"), q, k, v, dout, causal=True, softcap=30.0
        )


def _compiled(name):
    torch.compiler.reset()
    planted = plant(flash_attention, name)
    return planted, torch.compile(
        lambda q, k, v: planted(q, k, v, causal=True, scale=0.3),
        backend="aot_eager",
        fullgraph=True,
    )


@pytest.mark.parametrize("name", ["out_gain_1pct", "dq_gain", "delta_off"])
def test_a_compiled_graph_holds_the_fault_bit_for_bit(name):
    problem = PROBLEMS["q5-k5-causal"].to(torch.float32)
    planted, compiled = _compiled(name)
    results = []
    for attend in (lambda q, k, v: planted(q, k, v, causal=True, scale=0.3), compiled):
        leaves = [x.clone().requires_grad_() for x in problem[:3]]
        out = attend(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, problem.dout)))
    for eager, in_graph in zip(*results, strict=True):
        assert torch.equal(eager, in_graph)
    leaves = [x.clone().requires_grad_() for x in problem[:3]]
    right = flash_attention(*leaves, causal=True, scale=0.3)
    right = (right, *torch.autograd.grad(right, leaves, problem.dout))
    assert any(not torch.equal(x, y) for x, y in zip(right, results[1], strict=True))


def test_in_a_graph_a_planted_attention_takes_no_other_options():
    torch.compiler.reset()
    planted = plant(flash_attention, "out_gain_1pct")
    q, k, v, *_ = PROBLEMS["q5-k5-causal"].to(torch.float32)
    compiled = torch.compile(
        lambda q, k, v: planted(q, k, v, softcap=2.0), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="given causal and scale alone, got soft"
    ):
        compiled(q, k, v)
