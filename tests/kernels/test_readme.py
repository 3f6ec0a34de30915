"""The numerics contract on paper is the one in the code: points, dials, profiles, examples."""

import ast
import re
from fractions import Fraction
from pathlib import Path

import pytest

from attention_kernels import BASELINE_PROFILES, PROFILES
from attention_kernels.block_recipes import BLOCK_RECIPES
from attention_kernels.formats import FORMATS
from attention_kernels.linear_recipes import LINEAR_RECIPES
from attention_kernels.points import FIELDS, POINTS, UNROUNDED
from attention_kernels.tensor_core_models import MODELS
from tests.pages import blocks_for

KERNELS = Path(__file__).parents[2] / "kernels"
README = (KERNELS / "README.md").read_text(encoding="utf-8")
EXAMPLES = blocks_for(
    "kernels/test_readme.py::test_the_examples_run", "kernels/README.md", "python"
)


def tables():
    """Header cell -> rows of cells, of every table."""
    found, rows = {}, None
    for line in README.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            rows = None
        elif rows is None:
            rows = found.setdefault(cells[0], [])
        elif not set(line) <= set("|-"):
            rows.append(cells)
    return found


def named(cell):
    return re.findall(r"`([^`]+)`", cell)


def source_of(place):
    """The text of a function called `file.py:function`."""
    file, _, function = place.partition(":")
    text = (KERNELS / "attention_kernels" / file).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.get_source_segment(text, node)
    raise AssertionError(f"{place} is in the README and not in the code")


def test_each_rounding_point_is_listed_in_the_order_it_occurs():
    rows = tables()["forward point"] + tables()["backward point"]
    assert [named(row[0])[0] for row in rows] == list(FIELDS)


def test_the_steps_that_round_nothing_by_default_are_marked():
    rows = tables()["forward point"] + tables()["backward point"]
    marked = {named(row[0])[0] for row in rows if "◦" in row[0]}
    plain = PROFILES["fa2"].to_dict()
    assert marked == {field for field in FIELDS if plain[field] == UNROUNDED}


@pytest.mark.parametrize(
    "row",
    tables()["forward point"] + tables()["backward point"],
    ids=lambda row: named(row[0])[0],
)
def test_each_rounding_point_is_where_the_table_says(row):
    (field,) = named(row[0])
    names = [name for name, point in POINTS.items() if point.field == field]
    rounds = rf"\.{field}\b" if field == "operands" else rf'"({"|".join(names)})"'
    for cell in row[2:]:
        (place,) = named(cell)
        assert re.search(rounds, source_of(place)), f"{place} does not round {field}"


def test_each_baseline_point_is_listed_with_its_formats():
    header, *_ = (line for line in README.splitlines() if line.startswith("| baseline point"))
    columns = [cell.strip() for cell in header.strip("|").split("|")][2:]
    assert columns == list(BASELINE_PROFILES)
    flat = {name: BASELINE_PROFILES[name].to_dict() for name in columns}
    others = ("scale_order", "softmax_rounding", "scaling")
    assert [(named(row[0])[0], row[2:]) for row in tables()["baseline point"]] == [
        (point, [flat[name][point] for name in columns])
        for point in flat["plain"]
        if point not in others
    ]


def test_each_dial_is_listed_and_where_the_table_says():
    rows = tables()["dial"]
    listed = [name for row in rows for name in named(row[0])]
    assert sorted(listed) == sorted(set(PROFILES["fa2"].to_dict()) - set(FIELDS))
    for row in rows:
        for place in named(row[2]):
            assert source_of(place)


@pytest.mark.parametrize("row", tables()["profile"], ids=lambda row: named(row[0])[0])
def test_each_profile_differs_from_fa2_in_what_the_table_says(row):
    (name,) = named(row[0])
    changes = dict(pair.split("=") for pair in row[1].split() if "=" in pair)
    every = re.match(r"every point( and ◦)? (\w+)", row[1])
    if every:
        plain = PROFILES["fa2"].to_dict()
        changes |= {f: every[2] for f in FIELDS if every[1] or plain[f] != UNROUNDED}
    expected = {k: str(v) for k, v in (PROFILES["fa2"].to_dict() | changes).items()}
    assert {k: str(v) for k, v in PROFILES[name].to_dict().items()} == expected


def test_every_profile_is_in_the_table():
    assert [named(row[0])[0] for row in tables()["profile"]] == list(PROFILES)


def test_every_format_is_in_the_table_with_its_largest_value_and_its_overflow():
    rows = tables()["format"]
    assert sorted(n for row in rows for n in named(row[0]) if n != "eXmY") == sorted(FORMATS)
    for row in rows:
        names = [name for name in named(row[0]) if name in FORMATS]
        if row[1]:
            largest = [float(Fraction(value)) for value in row[1].split(", ")]
            assert largest == [FORMATS[name].max_value for name in names]
        for format in map(FORMATS.get, names):
            beyond = "infinity" if format.infinities else "NaN"
            assert row[3] == ("saturates" if format.saturate else beyond), format.name


def test_every_block_recipe_is_in_the_table_as_it_is():
    listed = {}
    for elements, block, scales, rule, source, names in (
        (*row[1:6], named(row[0])) for row in tables()["recipe"]
    ):
        blocks = block.split(", ") if ", " in block else [block] * len(names)
        parts = elements.split(", ") if ", " in elements else [elements] * len(names)
        for name, element, size in zip(names, parts, blocks, strict=True):
            listed[name] = element, size, scales, rule, source
    assert list(listed) == list(BLOCK_RECIPES)
    for name, recipe in BLOCK_RECIPES.items():
        block = recipe.block if isinstance(recipe.block, str) else "x".join(map(str, recipe.block))
        element, size, scales, rule, source = listed[name]
        assert (element, size, scales) == (recipe.elements, block, recipe.scales)
        rule_name, _, to = rule.partition(", to ")
        assert rule_name == recipe.rule + " or 3/2 of it" * recipe.four_over_six
        assert float(to or 0) == recipe.largest_scale
        assert source == recipe.source


def _told(operand):
    """An operand as the table has it."""
    drawn, again = operand.rounding == "stochastic", operand.of_forward
    rotated = {0: "", 16: " rotated"}[operand.rotation]
    stored = " of the forward's" * again
    return f"`{operand.name}`{' stochastic' * drawn}{rotated}{stored}"


def test_every_linear_recipe_is_in_the_table_as_it_is():
    rows = {named(row[0])[0]: row[1:] for row in tables()["linear recipe"]}
    assert list(rows) == list(LINEAR_RECIPES)
    for name, recipe in LINEAR_RECIPES.items():
        products = (recipe.forward, recipe.dgrad, recipe.wgrad)
        share = f"last {recipe.last_blocks:.0%}".replace("%", " %")
        assert rows[name] == [
            *(", ".join(map(_told, product)) for product in products),
            share if recipe.last_blocks else "none",
            recipe.source,
        ]
        assert (recipe.output, recipe.weight_gradient) == ("bf16", "fp32")


def test_every_tensor_core_is_in_the_table_as_it_is():
    rows = {named(row[0])[0]: row[1:] for row in tables()["tensor core"]}
    assert list(rows) == list(MODELS)
    for name, model in MODELS.items():
        numbers = model.products, model.fraction_bits, model.accumulator, model.zero_exponent
        assert rows[name] == [", ".join(model.operands), *map(str, numbers), model.source]


@pytest.mark.slow
def test_the_examples_run(capsys):
    namespace = {}
    for _, block in EXAMPLES:
        exec(block, namespace)
        said = re.search(r"print\(.*\)  # (.*)", block)
        printed = capsys.readouterr().out
        assert said is None or said[1] in printed
    assert namespace["lse"].shape == (1, 4, 128)
