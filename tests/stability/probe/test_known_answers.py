"""Known answers: the same bits each time, other bits where something computes otherwise."""

import torch

from stability.probe.known_answers import known_answers

CPU = torch.device("cpu")


def test_known_answers_repeat_to_the_bit_and_draw_nothing():
    before = torch.get_rng_state()
    first = known_answers(CPU)
    torch.manual_seed(3)
    assert known_answers(CPU) == first
    torch.set_rng_state(before)
    known_answers(CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert 20 < first["fp32_product_bits"] < 30


def test_autocast_of_a_whole_process_changes_the_product_and_its_bits():
    alone = known_answers(CPU)
    with torch.autocast("cpu", torch.bfloat16):
        found = known_answers(CPU)
    assert found["gemm_fp32"] != alone["gemm_fp32"]
    assert found["exp_fp32"] == alone["exp_fp32"]
    assert found["fp32_product_bits"] < 12


def test_an_operation_of_other_bits_changes_its_own_answer_alone(monkeypatch):
    alone, own = known_answers(CPU), torch.exp
    monkeypatch.setattr(torch, "exp", lambda x: own(x).nextafter(torch.tensor(9e9)))
    found = known_answers(CPU)
    assert {name for name in alone if alone[name] != found[name]} == {"exp_fp32"}
