"""A command's words with a place for the flags that change: the rest stays as it was typed."""

import pytest

from stability.config.command_template import as_template, as_texts, with_dots


@pytest.mark.parametrize(
    ("words", "changed", "command", "flags"),
    [
        (
            "python train.py -x 1 --lr 0.1 --seed {seed}",
            {"lr": 0.2},
            "python train.py -x 1 --seed {seed} {flags}",
            {"lr": "0.1"},
        ),
        ("python train.py --lr=0.1", {"lr": 0.2}, "python train.py {flags}", {"lr": "0.1"}),
        ("python train.py --bf16", {"bf16": False}, "python train.py {flags}", {"bf16": True}),
        ("python -m train in.txt", {"lr": 0.2}, "python -m train in.txt {flags}", {}),
        (
            "python train.py --betas 0.9 0.95 --wd 0",
            {"betas": [0.8, 0.95]},
            "python train.py --wd 0 {flags}",
            {"betas": ["0.9", "0.95"]},
        ),
        (
            "python train.py --config-name x optimizer.lr=0.1",
            {"optimizer.lr": 0.2},
            "python train.py --config-name x {settings}",
            {"optimizer.lr": "0.1"},
        ),
        ("python train.py a=1", {"lr": 0.2}, "python train.py a=1 {settings}", {}),
    ],
)
def test_only_the_words_of_a_flag_that_changes_are_taken_out(words, changed, command, flags):
    assert as_template(words.split(), changed) == (command, flags)


def test_words_with_spaces_stay_one_word():
    assert as_template(["python", "train.py", "a b", "{out}/c d"], {}) == (
        "python train.py 'a b' '{out}/c d' {flags}",
        {},
    )


def test_what_is_dropped_is_gone_with_its_value():
    words = ["python", "train.py", "--resume", "old.pt", "--lr", "0.1"]
    assert as_template(words, {}, ["resume"])[0] == "python train.py --lr 0.1 {flags}"


@pytest.mark.parametrize("words", ["--lr 0.1 in.txt", "--lr 0.1 --lr 0.3"])
def test_a_flag_whose_values_can_not_be_told_is_refused(words):
    with pytest.raises(ValueError, match=r"flags.lr must be there once, with as many values"):
        as_template(["python", "train.py", *words.split()], {"lr": 0.2})


def test_values_are_texts_and_names_have_their_dots():
    assert as_texts({"lr": 0.2, "bf16": True, "betas": [0.9, 1]}) == {
        "lr": "0.2",
        "bf16": True,
        "betas": ["0.9", "1"],
    }
    assert with_dots({"optimizer": {"lr": 0.2}, "seed": 1}) == {"optimizer.lr": 0.2, "seed": 1}
