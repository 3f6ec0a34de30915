"""`stability record --attention`: another attention in a script that knows nothing of it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stability.recorder.inside.attention import replace_attention, replace_eager
from stability.records.witness import read_witness
from tests.sampling import others_long
from tests.stability.recorder.recording import Recording, code_of, compiled_study, words

ATTENTION = functional.scaled_dot_product_attention

OWN = """
import torch

def attend(q, k, v, *, causal, scale=None):
    assert q.dtype == torch.{dtype}, q.dtype
    scores = q.float() @ k.float().transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)

def wrong(q, k, v, *, causal, scale=None):
    return attend(q, k, v, causal=False, scale=scale)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(OWN.format(dtype="float32"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)  # what later tests record would have it, too


@pytest.mark.slow
def test_an_attention_takes_the_place_of_the_scripts_own(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("attends.py"))
    assert study.record("baseline") == 0
    for arm, name in {"math": "sdpa:math", "mine": "mine:attend", "wrong": "mine:wrong"}.items():
        assert study.record(arm, options=("--attention", name)) == 0
        assert f"4 attention calls were replaced by {name}" in capsys.readouterr().out
        assert study.manifest(arm).axis == "attention"
        assert study.manifest(arm).resolved["keys"] == [32, 32]
    assert "keys" not in study.manifest("baseline").resolved
    # causality as it was asked for, and rounding alone
    assert 0 < study.drift("math")[4] < 1e-6
    assert 0 < study.drift("mine")[4] < 1e-6
    assert study.drift("wrong")[4] > 1e-3
    assert "module.mine" in study.manifest("mine").environment
    assert code_of("verify", str(study.folder)) == 0
    assert "3 of 3 planned pairs keep the contract" in capsys.readouterr().out
    own_rows, other = (read_witness(study.paths(arm).witness).rows for arm in ("baseline", "math"))
    differs = {row.part for row in {*own_rows} ^ {*other} if row.operands}
    assert differs == {"attention"}, "of another attention nothing else is another"


WRAPS = """
from torch.nn import functional as F

def same(q, k, v, *, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

def hot(q, k, v, *, causal, scale=None):
    scale = 1.1 * (scale or q.shape[-1] ** -0.5)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], pytest.param(["--compiled"], marks=pytest.mark.long)])
def test_an_attention_that_wraps_pytorchs_own_calls_that_and_not_itself(
    flags: list[str], own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own.write_text(WRAPS)
    study = Recording(tmp_path, words("attends.py", *flags))
    assert study.record("baseline") == 0
    for arm in ("same", "hot"):
        assert study.record(arm, options=("--attention", f"mine:{arm}")) == 0
        if not flags:
            assert f"4 attention calls were replaced by mine:{arm}" in capsys.readouterr().out
    if not flags:
        assert study.drift("same")[4] == 0
    assert study.drift("same")[4] < 1e-6
    assert study.drift("hot")[4] > 1e-4


RECOMPUTES = """
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = F.scaled_dot_product_attention(*given)
            return torch.autograd.grad(out, given, grad)

def again(q, k, v, *, causal, scale=None):
    return Again.apply(q, k, v)

def inner(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)

def saved(q, k, v, *, causal, scale=None):
    return checkpoint(inner, q, k, v, use_reentrant=False)

def saved_reentrant(q, k, v, *, causal, scale=None):
    return checkpoint(inner, q, k, v, use_reentrant=True)
"""


@pytest.mark.parametrize("name", ["again", "saved", "saved_reentrant"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_an_attention_computes_once_more_for_its_gradients_is_pytorchs_own(
    name: str, is_checkpointed: bool, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.write_text(RECOMPUTES)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", original := ATTENTION)
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    expected = torch.autograd.grad(original(q, k, v).square().sum(), (q, k, v))
    calls = replace_attention(f"mine:{name}")
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out = checkpoint(model, *given, use_reentrant=False) if is_checkpointed else model(*given)
    out.square().sum().backward()
    for x, wanted in zip(given, expected, strict=True):
        torch.testing.assert_close(x.grad, wanted)
    assert calls.count == 1 + is_checkpointed


def test_the_fewest_and_the_most_keys_of_what_trains_are_told(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", ATTENTION)
    calls = replace_attention("sdpa:math")
    assert "keys" not in calls.told(), "there was no call"
    for keys, trains in ((8, True), (5, True), (12, True), (90, False), (2, False)):
        q, k = (torch.randn(1, 2, n, 4, requires_grad=trains) for n in (3, keys))
        functional.scaled_dot_product_attention(q, k, value=k)
    assert calls.told()["keys"] == [5, 12]
    functional.scaled_dot_product_attention(query=q, key=k.requires_grad_(), value=k)
    assert calls.told()["keys"] == [2, 12]
    monkeypatch.setattr(type(calls), "traced", 1)
    assert "keys" not in calls.told(), "of a graph they are not known"


def test_the_dtypes_of_what_trains_are_told_as_autocast_makes_them(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "scaled_dot_product_attention", ATTENTION)
    calls = replace_attention("sdpa:math")
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    functional.scaled_dot_product_attention(q.detach(), q.detach(), q.detach())
    assert "dtypes" not in calls.told(), "an evaluation may be of another one"
    with torch.autocast("cpu", torch.bfloat16):
        functional.scaled_dot_product_attention(q, q, q)
    assert calls.told()["dtypes"] == ["bfloat16"]
    functional.scaled_dot_product_attention(q.half(), q.half(), q.half())
    assert calls.told()["dtypes"] == ["bfloat16", "float16"]


@pytest.mark.slow
def test_under_autocast_it_gets_what_sdpa_would_compute_in(own: Path, tmp_path: Path) -> None:
    own.write_text(OWN.format(dtype="bfloat16"))
    study = Recording(tmp_path, words("attends.py"))
    assert study.record("baseline", "--bf16") == 0
    assert study.record("mine", "--bf16", options=("--attention", "mine:attend")) == 0
    assert study.drift("mine")[4] < 0.01


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", others_long(["sdpa", "eager"], slow=["sdpa"]))
def test_it_takes_the_place_in_a_model_of_hugging_face(
    kind: str, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("hugging_face.py", "--attention", kind))
    assert study.record("baseline") == 0
    assert study.record("math", options=("--attention", "sdpa:math")) == 0
    # two layers, two micro-batches in each of six updates, and three evaluations of one batch
    replaced = "24 attention calls were replaced by {}, and 6 without a backward pass, "
    assert replaced.format("sdpa:math") in capsys.readouterr().out
    assert study.manifest("math").axis == "attention"
    assert study.batches("math") == study.batches("baseline")
    assert 0 < study.drift("math")[6] < 1e-4
    wrong = study.record("wrong", options=("--attention", "mine:wrong"))
    said = capsys.readouterr().out
    if kind == "sdpa":
        assert (wrong, replaced.format("mine:wrong") in said) == (0, True)
        assert study.drift("wrong")[6] > 10 * study.drift("math")[6]
    else:  # an eager model says by a mask that it is causal
        assert (wrong, "a call has a mask: it takes none" in said) == (1, True)


class _Interface:
    """What is of transformers' interface here: a register of attentions."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.register = self.known.__setitem__


def _swapped() -> Any:
    def forward(module: Any, query: Any, scaling: Any = None, position_bias: Any = None, **_: Any):
        return query, scaling, position_bias

    interface = _Interface()
    replace_eager(SimpleNamespace(AttentionInterface=interface, sdpa_attention_forward=forward))
    return interface.known["eager"]


@pytest.mark.parametrize("name", ["s_aux", "sinks", "softcap", "head_mask"])
def test_an_eager_attention_with_more_than_sdpa_has_is_never_trained_without_it(name: str) -> None:
    said = f"eager attention is given {name}, which scaled_dot_product_attention can't take"
    with pytest.raises(ValueError, match=said):
        _swapped()(None, 1, scaling=2, **{name: 0.0})
    assert _swapped()(None, 1, scaling=2, **{name: None}) == (1, 2, None)


def test_what_an_eager_attention_makes_nothing_of_is_handed_on() -> None:
    words = {"position_ids": 1, "sliding_window": 4, "num_items_in_batch": 8, "use_cache": False}
    assert _swapped()(None, 1, scaling=2, position_bias=3, **words) == (1, 2, 3)


@pytest.mark.long
def test_a_model_of_hugging_face_that_asks_no_interface_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words("hugging_face.py", "--attention", "eager", "--reordered")
    study = Recording(tmp_path, command)
    assert study.record("baseline") == 0
    assert study.record("math", options=("--attention", "sdpa:math")) == 1
    assert "0 attention calls were replaced: this script does not call" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "attention", "broken"),
    [
        pytest.param("inductor", "flash:fa2", "flash:fa2+out_gain_1pct", marks=pytest.mark.long),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("aot_eager", "flash:fa2", "flash:fa2+out_gain_1pct"),
                ("aot_eager", "sdpa:math", "mine:wrong"),
                ("inductor", "sdpa:math", "mine:wrong"),
                ("inductor", "mine:attend", "mine:wrong"),
            )
        ),
    ],
)
def test_it_is_replaced_inside_a_compiled_graph_too(
    backend: str,
    attention: str,
    broken: str,
    own: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = compiled_study(tmp_path, monkeypatch, "attends.py", "--compiled", backend)
    swapped = ("--attention", attention)
    assert study.record("baseline") == 0
    assert study.record("swapped", options=(*swapped, "--check-observer", "true")) == 0
    said = f"0 attention calls were replaced by {attention}, and 1 in compiled graphs"
    assert said in capsys.readouterr().out
    assert study.manifest("swapped").observer["equal"] is True, "observing changes no bit"
    assert "keys" not in study.manifest("swapped").resolved, "a graph's are not known"
    assert study.record("again", options=swapped) == 0
    finals = [study.manifest(arm).hashes["final_weights"] for arm in ("swapped", "again")]
    assert finals[0] == finals[1], "A/A"
    assert study.record("broken", options=("--attention", broken)) == 0
    assert 0 < study.drift("swapped")[4] < 1e-6
    assert study.drift("broken")[4] > 1e-5, "what was put in is what computes"
    for arm in ("swapped", "broken"):
        assert study.manifest(arm).axis == "attention"
        assert study.batches(arm) == study.batches("baseline")
    capsys.readouterr()
    assert code_of("verify", str(study.folder)) == 1
    proof = " ".join(capsys.readouterr().out.split())
    assert "3 unproven" in proof
    lacks = (
        "swapped/seed-0: unproven: not on record: what baseline, seed 0 multiplied: torch.compile"
    )
    assert lacks in proof, "and nothing else"


@pytest.mark.parametrize(
    ("script", "attention", "said"),
    [
        pytest.param(
            ["plain.py"],
            "sdpa:math",
            "0 attention calls were replaced: this script does not call",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["attends.py", "--masked"],
            "mine:attend",
            "a call has a mask: it takes none",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # what dynamo advises is not quoted, but what was raised in the graph
            ["attends.py", "--masked", "--compiled"],
            "mine:attend",
            "exception ValueError('attention mine:attend: a call has a mask: it takes none,",
            marks=pytest.mark.long,
        ),
        pytest.param(["attends.py"], "mine:missing", "missing", marks=pytest.mark.slow),
    ],
)
def test_what_was_not_replaced_does_not_count(
    script: list[str],
    attention: str,
    said: str,
    own: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = Recording(tmp_path, words(*script))
    assert study.record("baseline") == 0
    assert study.record("swapped", options=("--attention", attention)) == 1
    assert said in capsys.readouterr().out
    assert study.manifest("swapped").state == "failed"


@pytest.mark.slow
def test_an_attention_that_is_missing_is_told_where_the_script_evaluates_first(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("attends.py", "--evaluates-first"))
    assert study.record("baseline", options=("--attention", "mine:missing")) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "a function that mine has, got 'missing'" in said
    assert "a function that mine has, got 'missing'" in study.manifest("baseline").message
    assert "no training was seen" not in said


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        ("sdpa", "attention must be one of sdpa:math"),
        ("sdpa:maths", "got 'sdpa:maths'"),
        ("flash:fa9", "profile of flash must be one of its profiles, got 'fa9'"),
        ("flush", "nearest: flash"),
        (
            "flash:fa2+dq_gian",
            "what follows + must be a planted fault, got 'dq_gian'; nearest: dq_",
        ),
        ("sdpa:math+dq_gain", "a fault must be planted on another attention than PyTorch's"),
    ],
)
def test_a_name_that_is_none_is_refused_before_anything_runs(
    attention: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("attends.py"))
    assert study.record("baseline", options=("--attention", attention)) == 2
    assert said in capsys.readouterr().err
    assert not study.folder.exists()


@pytest.mark.slow
def test_an_attention_that_is_called_in_evaluation_alone_proves_no_pair(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Recording(tmp_path, words("attends.py", "--evaluates"))
    assert study.record("baseline") == 0
    assert study.record("wrong", options=("--attention", "mine:wrong")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "0 attention calls were replaced by mine:wrong, and 4 without a backward pass" in said
    assert "unproven: that the attention which was replaced trains: none of its 4 calls" in said
    assert code_of("verify", str(study.folder)) == 1
    assert "1 unproven" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["flash:fa2", "sdpa:math"])
def test_a_causal_call_with_more_keys_than_queries_is_pytorchs_own_or_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", own)
    calls = replace_attention(name)
    q, kv = torch.randn(1, 1, 4, 16), torch.randn(1, 1, 6, 16, requires_grad=True)
    swapped = torch.nn.functional.scaled_dot_product_attention
    if name == "sdpa:math":
        right = own(q, kv, kv, is_causal=True)
        assert torch.allclose(swapped(q, kv, kv, is_causal=True), right, atol=1e-6)
        told = {"replaced": 1, "compiled": 0, "without_gradient": 0, "keys": [6, 6]}
        assert calls.told() == {**told, "dtypes": ["float32"]}
        return
    with pytest.raises(ValueError, match="a causal mask over more or fewer keys than queries"):
        swapped(q, kv, kv, is_causal=True)
    swapped(kv.detach(), kv.detach(), kv.detach(), is_causal=True)
    assert calls.told()["without_gradient"] == 1
