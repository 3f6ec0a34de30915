"""A witness: what contradicts a label, what is missing, and what is no whole record."""

from dataclasses import asdict, replace

import pytest

from stability.records.sealed_json import write_sealed
from stability.records.witness import (
    ExecutedRow,
    Label,
    Stretch,
    Witness,
    contradictions,
    gap,
    read_witness,
    write_witness,
)

SWITCHES = {"float32_matmul_precision": "highest"}
ANSWERS = {"gemm_fp32": "aa", "fp32_product_bits": 23.5}


def _row(dtype, module="blocks.layer_0.query", during="forward", part="linear", op="aten::mm"):
    return ExecutedRow(
        part=part,
        module=module,
        during=during,
        operator=op,
        operands=(dtype, dtype),
        result=dtype,
    )


def _stretch(*rows, **changes):
    values = {
        "first": 0,
        "last": 4,
        "steps": [0, 1, 3],
        "executed": [list(asdict(row).values()) for row in rows],
        "switches": {"at_start": SWITCHES, "at_end": SWITCHES},
        "answers": {"at_start": ANSWERS, "at_end": ANSWERS},
    }
    return Stretch(**(values | changes))


def _witness(*stretches):
    return Witness(stretches=[asdict(each) for each in stretches])


LABEL = Label(arm="fp32", precision="32-true", implementation="baseline")


def test_products_of_another_dtype_contradict_the_label():
    rows = [_row("bfloat16"), _row("bfloat16", during="backward")]
    assert contradictions(_witness(_stretch(*rows)), LABEL) == [
        "arm fp32 is labelled 32-true, its linear layers multiplied BF16"
    ]


def test_one_layer_of_another_dtype_is_named():
    rows = [_row("float32"), _row("float16", module="blocks.layer_1.mlp_up", during="backward")]
    assert contradictions(_witness(_stretch(*rows)), LABEL) == [
        "arm fp32 is labelled 32-true, 1 of 2 kinds of product in its linear layers multiplied "
        "FP16 (first: blocks.layer_1.mlp_up, backward)"
    ]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("64-true", "float64"),
        ("32-true", "float32"),
        ("bf16-mixed", "bfloat16"),
        ("bf16-true", "bfloat16"),
        ("16-mixed", "float16"),
        ("emulated:e4m3", "float32"),
    ],
)
def test_each_precision_has_its_own_operands(precision, dtype):
    label = replace(LABEL, precision=precision)
    assert contradictions(_witness(_stretch(_row(dtype))), label) == []
    other = "float32" if dtype != "float32" else "bfloat16"
    assert len(contradictions(_witness(_stretch(_row(other))), label)) == 1


def test_attentions_and_optimizers_have_numerics_of_their_own():
    rows = [
        _row("float32"),
        _row("bfloat16", part="attention", module="layer_0.attention"),
        _row("bfloat16", part="optimizer", module="", during="update"),
    ]
    assert contradictions(_witness(_stretch(*rows)), LABEL) == []


def test_what_belongs_to_no_module_contradicts_no_label():
    rows = [_row("float32"), _row("float64", part="unowned", module="", during="backward")]
    witness = _witness(_stretch(*rows))
    assert contradictions(witness, LABEL) == []
    assert {row.part for row in witness.rows} == {"linear", "unowned"}


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool"])
def test_integers_that_are_multiplied_without_rounding_contradict_no_label(dtype):
    assert contradictions(_witness(_stretch(_row("float32"), _row(dtype))), LABEL) == []
    packed = replace(_row("float32"), operands=("float32", dtype))
    assert len(contradictions(_witness(_stretch(packed)), LABEL)) == 1
    assert len(contradictions(_witness(_stretch(_row("int8"))), LABEL)) == 1


def test_a_complex_product_is_one_of_its_parts_dtype():
    assert contradictions(_witness(_stretch(_row("complex64"))), LABEL) == []
    assert len(contradictions(_witness(_stretch(_row("complex128"))), LABEL)) == 1


def test_what_autocast_lowers_nowhere_may_be_wide_in_a_mixed_precision_alone():
    mixed, left = replace(LABEL, precision="bf16-mixed"), _row("float32", op="aten::dot")
    narrow = replace(LABEL, precision="bf16-true")
    assert contradictions(_witness(_stretch(left, _row("complex64"))), mixed) == []
    for label, row in [
        (mixed, _row("float32")),
        (mixed, _row("float64", op="aten::dot")),
        (mixed, _row("complex128")),
        (narrow, left),
        (LABEL, _row("bfloat16", op="aten::dot")),
    ]:
        assert len(contradictions(_witness(_stretch(row)), label)) == 1


def test_a_backend_other_than_the_one_named_contradicts_the_label():
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    witness = _witness(_stretch(_row("float32", part="attention", op=flash)))
    assert witness.backends == ["flash"]
    assert contradictions(witness, replace(LABEL, implementation="sdpa:flash")) == []
    assert contradictions(witness, replace(LABEL, implementation="sdpa:math")) == [
        "arm fp32 is labelled sdpa:math, its attention took the backend flash"
    ]


def test_fp32_products_of_few_bits_contradict_fp32_and_say_nothing_of_bf16():
    coarse = {"at_start": {**ANSWERS, "fp32_product_bits": 12.0}}
    witness = _witness(_stretch(_row("float32"), answers=coarse))
    assert contradictions(witness, LABEL) == [
        "arm fp32 is labelled 32-true, its FP32 products keep 12 bits: a switch rounds what they "
        "multiply"
    ]
    witness = _witness(_stretch(_row("bfloat16"), answers=coarse))
    assert contradictions(witness, replace(LABEL, precision="bf16-mixed")) == []


def test_a_switch_that_is_turned_while_a_run_trains_is_named():
    turned = {"at_start": SWITCHES, "at_end": {"float32_matmul_precision": "medium"}}
    assert contradictions(_witness(_stretch(_row("float32"), switches=turned)), LABEL) == [
        "arm fp32: switch float32_matmul_precision was 'highest' when training began, 'medium' by "
        "update 4"
    ]


def test_a_resume_on_a_host_with_other_bits_is_named():
    other = {"at_start": {**ANSWERS, "gemm_fp32": "bb"}}
    later = _stretch(_row("float32"), first=4, last=4, answers=other)
    assert contradictions(_witness(_stretch(_row("float32")), later), LABEL) == [
        "arm fp32: known answer gemm_fp32 was 'aa' when training began, 'bb' by update 4"
    ]


def test_updates_that_no_stretch_covers_are_named():
    first, second = _stretch(last=3), _stretch(first=3, last=6)
    assert gap(_witness(first, second), 0, 6) == ""
    assert gap(_witness(second), 3, 6) == ""
    assert gap(_witness(second), 0, 6) == "nothing is on record of updates 0 to 3"
    assert gap(_witness(first), 0, 6) == "nothing is on record of updates 3 to 6"


def test_a_witness_is_read_as_it_was_written_and_a_flipped_letter_is_found(tmp_path):
    path = tmp_path / "witness.json"
    witness = _witness(_stretch(_row("float32")))
    write_witness(path, witness)
    read = read_witness(path)
    assert (read.all, read.rows) == (
        [replace(_stretch(), executed=read.stretches[0]["executed"])],
        [_row("float32")],
    )
    path.write_text(path.read_text().replace("float32", "float64", 1))
    with pytest.raises(ValueError, match=r"witness\.json: must have the checksum"):
        read_witness(path)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"color": 3}, " must be a stretch's fields and no others"),
        ({"executed": [["linear"]]}, "executed.0 must be a row of ExecutedRow"),
        ({"executed": [["linear", "", "forward", "mm", 3, ""]]}, "executed.0 must be a row"),
        ({"executed": [["linear", "", "forward", "mm", [3], ""]]}, "executed.0 must be a row"),
        ({"executed": [["other", "", "forward", "mm", ["float32"], ""]]}, "executed.0 must be"),
        ({"executed": [[{}, "", "forward", "mm", ["float32"], ""]]}, "executed.0 must be a row"),
        ({"executed": [3]}, "executed.0 must be of type list, is 3"),
        ({"first": "0"}, "first must be of type int, is '0'"),
        ({"first": True}, "first must be of type int, is True"),
        ({"last": -1}, "last must be >= 0, is -1"),
        ({"steps": [0, None]}, "steps.1 must be of type int, is None"),
        ({"modules": {"m": 3}}, "modules.m must be of type str, is 3"),
        ({"answers": {"at_start": 3}}, "answers.at_start must be of type dict, is 3"),
        (
            {"answers": {"at_start": {"fp32_product_bits": "many"}}},
            "answers.at_start must be empty",
        ),
        ({"answers": {"at_start": {"fp32_product_bits": True}}}, "answers.at_start must be empty"),
        ({"switches": []}, "switches must be of type dict"),
    ],
)
def test_other_fields_under_a_valid_seal_are_one_line_that_names_file_and_key(
    tmp_path, wrong, said
):
    path = tmp_path / "witness.json"
    write_sealed(path, {"stretches": [asdict(_stretch(_row("float32"))) | wrong]})
    with pytest.raises(ValueError, match=rf"witness\.json: stretches\.0.*{said}") as caught:
        read_witness(path)
    assert "\n" not in str(caught.value)
