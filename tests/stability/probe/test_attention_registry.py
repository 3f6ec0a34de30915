"""Attention by name: what is resolved, and what is refused."""

import linecache
import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention
from attention_kernels.peers.sdpa import BACKENDS
from attention_kernels.testing import FAULTS, plant, with_gradients
from stability.config.attentions import IMPLEMENTATIONS
from stability.config.schema import AttentionConfig
from stability.probe.attention_registry import (
    attention_from_text,
    resolve_attention,
)

CPU = torch.device("cpu")


def _inputs(heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(1, h, 20, 16, generator=generator).bfloat16()
        for h in (heads, kv_heads, kv_heads)
    ]


def test_names_resolve_to_the_functions_they_stand_for():
    q, k, v = _inputs()
    numerics = PROFILES["all_bf16"].with_(block_k=16)
    flash = AttentionConfig(implementation="flash", profile="all_bf16", numerics={"block_k": 16})
    expected = [
        (flash, flash_attention(q, k, v, causal=True, numerics=numerics)),
        (AttentionConfig(), baseline_attention(q, k, v, causal=True)),
        (
            AttentionConfig(implementation="sdpa"),
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        ),
    ]
    for config, out in expected:
        assert torch.equal(resolve_attention(config, CPU)(q, k, v, causal=True), out)


def test_auto_is_resolved_once_and_described():
    resolved = resolve_attention(AttentionConfig(implementation="flash"), CPU)
    assert resolved.name == "flash:fa2"
    assert resolved.description["engine"] == "twin"
    assert resolved.description["numerics"]["probabilities"] == "input"


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_a_study_may_name_is_resolved_with_each_of_its_profiles(name):
    for profile in ("", *IMPLEMENTATIONS[name].profiles):
        config = AttentionConfig(implementation=name, profile=profile)
        shown = profile or IMPLEMENTATIONS[name].default
        assert resolve_attention(config, CPU).name == f"{name}:{shown}".removesuffix(":")


def test_the_profiles_of_sdpa_are_pytorchs_backends():
    assert [f"sdpa:{name}" for name in IMPLEMENTATIONS["sdpa"].profiles] == [*BACKENDS]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            AttentionConfig(implementation="flsh"),
            "^attention must be .* got 'flsh'; nearest: flash",
        ),
        ("flash:fa22", "^attention.profile of flash .* got 'fa22'; nearest: fa2"),
        ("no_such_module:attend", "a module that imports, got 'no_such_module:attend'"),
        ("math:squirt", "a function that math has, got 'squirt'; nearest: sqrt"),
        (
            lambda q, k: q,
            "^attention must be a function of .q, k, v, ., causal, scale., got '<lambda>'",
        ),
        (AttentionConfig(implementation="flash", profile="fa22"), "got 'fa22'; nearest: fa2"),
        (
            AttentionConfig(implementation="flash", numerics={"blok_k": 32}),
            "no field 'blok_k'; nearest: block_k",
        ),
        (
            AttentionConfig(engine="triton"),
            "^attention.engine of baseline must be 'auto', got 'triton'",
        ),
        (
            AttentionConfig(implementation="sdpa", profile="fa2"),
            "^attention.profile of sdpa .* got 'fa2'",
        ),
        (
            AttentionConfig(implementation="golden", profile="fa2"),
            "^attention: golden takes no profile",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(config, message):
    with pytest.raises(ValueError, match=message):
        resolve_attention(config, CPU)


def test_text_names_what_a_config_does():
    def faulty(implementation, **values):
        return AttentionConfig(implementation=implementation, fault="dq_gain", **values)

    q, k, v = _inputs()
    for text, config in (
        ("flash", AttentionConfig(implementation="flash")),
        ("flash:all_bf16", AttentionConfig(implementation="flash", profile="all_bf16")),
        ("sdpa:math", AttentionConfig(implementation="sdpa", profile="math")),
        ("mypkg:attend", AttentionConfig(implementation="mypkg:attend")),
        ("flash:fa2+dq_gain", faulty("flash", profile="fa2")),
        ("mypkg:attend+dq_gain", faulty("mypkg:attend")),
    ):
        assert attention_from_text(text) == config
    assert torch.equal(
        resolve_attention("golden", CPU)(q, k, v, causal=True),
        golden_attention(q, k, v, causal=True).bfloat16(),
    )


def test_lse_comes_with_the_same_out_where_there_is_one():
    q, k, v = _inputs()
    for name, has_lse in (("flash:fa2", True), ("baseline", True), ("sdpa", False)):
        attention = resolve_attention(name, CPU)
        out, lse = attention.with_lse(q, k, v, causal=True)
        assert torch.equal(out, attention(q, k, v, causal=True))
        assert (lse is not None) == has_lse


def _write_package(folder, monkeypatch, body):
    (folder / "mypkg.py").write_text(body)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "mypkg", raising=False)


OWN = """
from torch.nn.functional import scaled_dot_product_attention
def my_attention(q, k, v, *, causal, scale=None, attn_mask=None):
    return scaled_dot_product_attention(q, k, v, attn_mask, is_causal=causal, scale=scale,
                                        enable_gqa=True)
"""


def test_a_function_of_ones_own_is_called_with_what_the_call_has(tmp_path, monkeypatch):
    _write_package(tmp_path, monkeypatch, OWN)
    own = resolve_attention("mypkg:my_attention", CPU)
    q, k, v = _inputs()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(own(q, k, v, causal=True, window=(None, None), softcap=0.0), expected)
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    masked = own(q, k, v, causal=False, attn_mask=seen, scale=0.5)
    assert torch.equal(masked, F.scaled_dot_product_attention(
        q, k, v, seen, scale=0.5, enable_gqa=True
    ))  # fmt: skip
    with pytest.raises(ValueError, match="the mask must be one that it takes, got softcap; it "):
        own(q, k, v, causal=True, softcap=3.0)
    changed = OWN.replace("is_causal=causal", "is_causal=bool(causal)")
    _write_package(tmp_path, monkeypatch, changed)
    assert (
        resolve_attention("mypkg:my_attention", CPU).description["source"]
        != (own.description["source"])
    )


def test_a_module_in_the_current_folder_is_found_and_hides_none_of_a_library(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in ("mine_here", "json"):
        (tmp_path / f"{name}.py").write_text(OWN)
    with pytest.raises(ValueError, match="No module named 'mine_here'"):
        resolve_attention("mine_here:my_attention", CPU)
    monkeypatch.chdir(tmp_path)
    assert resolve_attention("mine_here:my_attention", CPU).name == "mine_here:my_attention"
    with pytest.raises(ValueError, match="a function that json has, got 'my_attention'"):
        resolve_attention("json:my_attention", CPU)


def test_a_profile_in_the_implementation_is_told_where_it_goes():
    rule = "attention.implementation must be a name without its profile, got 'sdpa:math'"
    said = re.escape(f"{rule}; write {{implementation: sdpa, profile: math}}")
    with pytest.raises(ValueError, match=f"^{said}$"):
        resolve_attention(AttentionConfig(implementation="sdpa:math"), CPU)


def test_a_function_of_a_notebook_s_cell_is_told_by_its_lines_and_one_typed_by_nothing():
    def cell(body, name="<ipython-input-1>", known=True):
        text = f"def mine(q, k, v, *, causal, scale=None):\n    return {body}\n"
        scope = {"__name__": "__main__"}
        exec(compile(text, name, "exec"), scope)
        if known:
            lines = text.splitlines(keepends=True)
            linecache.cache[name] = (len(text), None, lines, name)
        return resolve_attention(scope["mine"], CPU).description["source"]

    first, second = cell("q"), cell("k", "<ipython-input-2>")
    assert len(first) == len(second) == 64
    assert first != second
    assert cell("q", "<typed>", known=False) == ""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def my_attention(q, k v):", r"SyntaxError: .*mypkg.py, line 1"),
        ("my_attention = nowhere", "NameError: name 'nowhere' is not defined"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise ValueError", "ValueError"),
    ],
    ids=lambda text: text.split()[0],
)
def test_a_module_that_does_not_import_is_told_with_its_reason(tmp_path, monkeypatch, body, said):
    _write_package(tmp_path, monkeypatch, body)
    asked = r"attention must be MODULE:FUNCTION of a module that imports, got 'mypkg:my_attention'"
    with pytest.raises(ValueError, match=f"{asked}; {said}"):
        resolve_attention("mypkg:my_attention", CPU)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mypkg.py:my_attention", "; did you mean mypkg:my_attention$"),
        ("./sub/mypkg.py:f", r"; did you mean sub\.mypkg:f$"),
        ("mypkg.py", "; did you mean mypkg:FUNCTION$"),
        ("mypkg.my_attention", "; did you mean mypkg:my_attention$"),
        ("sub.mypkg.f", r"; did you mean sub\.mypkg:f$"),
        ("sub.mypkg", r"; did you mean sub\.mypkg:FUNCTION$"),
        ("mypkg", "; did you mean mypkg:FUNCTION$"),
        ("json.loads", "; did you mean json:loads$"),
        ("mypgk.f", "got 'mypgk.f'; nearest: [a-z, ]*$"),
        ("mypkg.", "got 'mypkg.'; nearest: [a-z, ]*$"),
        ("mypgk.py:f", "'mypgk'; in this folder: mypkg$"),
        ("/there/mypkg.py:f", "MODULE:FUNCTION, got '/there/mypkg.py:f'; nearest: [a-z, ]*$"),
    ],
)
def test_a_files_name_in_the_place_of_a_modules_is_told(tmp_path, monkeypatch, given, said):
    _write_package(tmp_path, monkeypatch, OWN)
    monkeypatch.chdir(tmp_path)
    for place in ("mypkg.py", "sub/mypkg.py"):
        Path(place).parent.mkdir(exist_ok=True)
        Path(place).touch()
    with pytest.raises(ValueError, match=said):
        resolve_attention(given, CPU)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mypkgs:f", "No module named 'mypkgs'; in this folder: mypkg$"),
        ("atention.own:f", "No module named 'atention'; in this folder: attention$"),
        ("quite_another:f", "No module named 'quite_another'$"),
        # of these the module is there, and what it imports is not
        ("attention:f", "No module named 'mypkgs'$"),
        ("mypkg.sub:f", "'mypkg' is not a package$"),
    ],
)
def test_modules_of_the_folder_are_named_for_one_that_is_nowhere(
    tmp_path, monkeypatch, given, said
):
    _write_package(tmp_path, monkeypatch, OWN)
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "attention"
    package.mkdir()
    (package / "__init__.py").write_text("import mypkgs")
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match=said):
        resolve_attention(given, CPU)


def test_ctrl_c_while_a_module_is_imported_is_an_interrupt(tmp_path, monkeypatch):
    _write_package(tmp_path, monkeypatch, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        resolve_attention("mypkg:my_attention", CPU)


def test_an_entry_point_is_known_by_its_name(tmp_path, monkeypatch):
    _write_package(tmp_path, monkeypatch, OWN)
    info = tmp_path / "mypkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stability.attentions]\nmine = mypkg:my_attention\n")
    q, k, v = _inputs()
    found = resolve_attention("mine", CPU)
    assert found.name == "mine"
    assert found(q, k, v, causal=True).shape == q.shape
    with pytest.raises(ValueError, match="nearest: mine"):
        resolve_attention("minne", CPU)


@pytest.mark.parametrize(
    ("mask", "what"),
    [({"softcap": 2.0}, "softcap"), ({"causal": True, "attn_mask": torch.ones(20, 20)}, "causal")],
)
def test_sdpa_refuses_what_it_has_no_argument_for(mask, what):
    with pytest.raises(ValueError, match=f"sdpa: the mask must be one that it takes, got {what}"):
        resolve_attention("sdpa", CPU)(*_inputs(), **mask)


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_sdpa_keeps_the_padding_beside_a_mask(kind):
    q, k, v = (x.float() for x in _inputs())
    visible = torch.ones(20, 20, dtype=torch.bool).tril()
    mask = visible if kind == "bool" else torch.zeros(20, 20).masked_fill(~visible, -torch.inf)
    padding = (torch.arange(20) > 2)[None]
    padding = padding | (torch.arange(20) == 0)  # no row attends nothing
    out = resolve_attention("sdpa", CPU)(q, k, v, attn_mask=mask, key_padding=padding)
    exact = golden_attention(q, k, v, attn_mask=mask, key_padding=padding)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)


def test_an_attention_with_a_fault_is_the_attention_and_the_fault():
    q, k, v = _inputs()
    config = AttentionConfig(implementation="flash", fault="dropped_key")
    resolved = resolve_attention(config, CPU)
    assert resolved.name == "flash:fa2+dropped_key"
    assert resolved.description["fault"] == "dropped_key"
    planted = plant(flash_attention, "dropped_key")
    assert torch.equal(resolved(q, k, v, causal=True), planted(q, k, v, causal=True))
    out, lse = resolved.with_lse(q, k, v, causal=True)
    expected = planted(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["baseline", "sdpa", "golden", "tests.zoo_of_one:attend"])
def test_every_fault_can_be_planted_on_every_kind_of_attention(name, fault, monkeypatch):
    module = types.ModuleType("tests.zoo_of_one")
    module.attend = lambda q, k, v, *, causal, scale=None: F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    monkeypatch.setitem(sys.modules, "tests.zoo_of_one", module)
    right = resolve_attention(AttentionConfig(implementation=name), CPU)
    wrong = resolve_attention(AttentionConfig(implementation=name, fault=fault), CPU)
    dout = torch.randn(1, 4, 20, 16, generator=torch.Generator().manual_seed(2))
    before, after = (with_gradients(x, *_inputs(), dout, causal=True) for x in (right, wrong))
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved == set(FAULTS[fault].results) - {"lse"}


def test_an_unknown_fault_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="got 'dropped_kee'; nearest: dropped_key"):
        resolve_attention(AttentionConfig(fault="dropped_kee"), CPU)


def test_a_module_that_changes_the_folder_as_it_is_imported_leaves_it(tmp_path, monkeypatch):
    (tmp_path / "moving.py").write_text(
        f"import os\nos.chdir({str(tmp_path)!r})\n"
        "from attention_kernels import baseline_attention as attend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    here = os.getcwd()
    resolve_attention("moving:attend", CPU)
    assert os.getcwd() == here


@pytest.mark.parametrize("beside", [None, "bool", "float"])
@pytest.mark.parametrize("name", ["sdpa", "sdpa:math", "flash:golden", "baseline", "golden"])
def test_every_attention_takes_a_mask_mod(name, beside):
    q, k, v = (x.float() for x in _inputs())

    def mask_mod(batch, head, query, key):
        return (query + batch >= key) & (key != head)

    shape = (*q.shape[:3], k.shape[2])
    places = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    attn_mask = visible = mask_mod(*places)
    options = {}
    if beside == "bool":
        options["attn_mask"] = torch.rand(shape) < 0.8
        attn_mask = visible & options["attn_mask"]
    elif beside == "float":
        options["attn_mask"] = torch.randn(shape)
        attn_mask = options["attn_mask"].masked_fill(~visible, -torch.inf)
    attention = resolve_attention(name, torch.device("cpu"))
    expected = golden_attention(q, k, v, attn_mask=attn_mask)
    for out in (
        attention(q, k, v, mask_mod=mask_mod, **options),
        attention.with_lse(q, k, v, mask_mod=mask_mod, **options)[0],
    ):
        rows = visible.any(-1)  # torch's own kernels differ in what a row without keys gives
        assert torch.allclose(out.double()[rows], expected.double()[rows], atol=1e-5)


def test_a_function_without_a_default_scale_is_given_the_usual_one():
    def attend(q, k, v, *, causal, scale):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    q, k, v = torch.randn(3, 1, 2, 8, 16).unbind()
    attention = resolve_attention(attend, torch.device("cpu"))
    assert attention(q, k, v, causal=True).equal(attend(q, k, v, causal=True, scale=0.25))
    assert attention(q, k, v, scale=0.5).equal(attend(q, k, v, causal=False, scale=0.5))
