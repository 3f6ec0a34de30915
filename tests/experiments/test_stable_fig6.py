"""Flash against baseline attention by tile: the directions, at a size of seconds."""

import pytest

from stability.report.paper.style import paper_style


@pytest.fixture(scope="module")
def found(experiment):
    return experiment.measure(experiment.SIZES["quick"])


def test_tiles_are_those_of_flash_attention_1(experiment):
    tiles = [experiment.tile_for(sram) for sram in experiment.SRAM]
    assert tiles == [(16, 16), (32, 32), (64, 64), (64, 128), (64, 256)]


@pytest.mark.slow
def test_low_precision_prefers_larger_tiles_and_fp32_does_so_only_between_fp64(found):
    held = {test.statement: test.holds for test in found.tests}
    assert held["(a) BF16: 256x64 over 64x256 is above 1"]
    assert held["(c) BF16: each larger tile's max is below"]
    assert held["(b) an oblong tile made square, as many queries as keys, changes no bit of out"]
    assert not held["(c) FP32: each larger tile's max is below"]
    assert all(test.holds for test in found.tests if test.control)
    assert "FP64" in found.explanation


@pytest.mark.slow
def test_a_swapped_tile_is_another_tile(found):
    square, wide = ([r for r in found.rows if r["sram"] == sram] for sram in (4096, 65536))
    assert {row["swapped_from_it"] for row in square} == {0.0}
    assert 0.0 not in {row["swapped_from_it"] for row in wide}
    assert {row["made_square"] for row in found.rows} == {0.0}


@pytest.mark.slow
def test_figure_names_its_axes(experiment, found):
    with paper_style():
        (axes,) = experiment.draw(found.rows).axes
    assert "block_k" in axes.get_xlabel()
    assert "smallest tile" in axes.get_ylabel()
