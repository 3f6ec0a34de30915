"""Which programs differ in nothing but their layout: how many processes train, and where."""

import pytest

from stability.config.arms import describe_change
from stability.config.axes import change_problem, groups_of
from stability.config.launchers import layout_change

SAME = [
    ("torchrun --nproc-per-node 2 train.py", "torchrun --nproc_per_node=4 train.py"),
    ("python train.py", "torchrun --standalone --nproc-per-node 2 train.py"),
    ("python train.py --seed {seed}", "mpirun -n 2 python train.py --seed {seed}"),
    (
        "/env/bin/python -m torch.distributed.run --nnodes 1 --nproc-per-node 2 train.py",
        "/env/bin/python train.py",
    ),
    ("torchrun --nproc-per-node 2 -m pkg.train", "torchrun --nproc-per-node 1 -m pkg.train"),
    ("torchrun --nproc-per-node 2 train.py {flags}", "torchrun --nnodes=2 train.py {flags}"),
    (
        "accelerate launch --num_processes 1 train.py",
        "accelerate launch --num_processes 2 train.py",
    ),
    (
        "accelerate launch --mixed_precision no --num_processes 1 train.py --n 1",
        "accelerate launch --num_processes 2 --mixed_precision no --multi_gpu train.py --n 1",
    ),
    ("srun --ntasks=2 python train.py", "srun --ntasks=4 python train.py"),
    ("deepspeed --num_gpus 2 train.py", "deepspeed --num_gpus 4 train.py"),
]
OTHER = [
    ("torchrun --nproc-per-node 2 train.py", "torchrun --nproc-per-node 4 other.py"),
    ("python train.py", "python other.py"),
    ("python train.py --gpus 1", "python train.py --gpus 2"),
    ("python train.py -n 1", "python train.py -n 2"),
    ("/a/python train.py", "/b/python -m torch.distributed.run --nproc-per-node 2 train.py"),
    (
        "accelerate launch --num_processes 1 train.py",
        "accelerate launch --num_processes 2 --mixed_precision bf16 train.py",
    ),
    ("python train.py", "accelerate launch --num_processes 2 train.py"),
    ("accelerate launch --dynamo_backend no t.py --n 1", "accelerate launch t.py --n 2"),
    ("accelerate launch -m train --n 1", "accelerate launch -m train --n 2"),
    ("python train.py", "python train.py"),
    ("python 'train.py", "torchrun 'train.py"),
    ("python -m train", "torchrun --nproc-per-node 2 train"),
]


@pytest.mark.parametrize(("before", "after"), SAME)
def test_the_same_script_in_other_processes_is_another_layout(before, after):
    for values in ((before, after), (after, before)):
        assert layout_change(*values)
        assert groups_of({"program": values}) == ["layout"]
        assert change_problem({"program": values}) == ""
        assert describe_change("x", "program", {"program": list(values)}, {"program": before})[
            :8
        ] == ("layout: ")


@pytest.mark.parametrize(("before", "after"), OTHER)
def test_another_script_interpreter_or_option_is_other_code(before, after):
    for values in ((before, after), (after, before)):
        assert layout_change(*values) is None
        assert groups_of({"program": values}) == ["code"]


def test_a_layout_is_told_in_the_words_that_say_it():
    change = {"program": ["python train.py", "torchrun --nproc-per-node 2 train.py"]}
    said = describe_change("two", "program", change, {"program": "python train.py"})
    assert said == "layout: one process -> --nproc-per-node 2"


def test_a_commit_beside_another_layout_stays_code():
    change = {"program": ["torchrun train.py", "torchrun --nnodes 2 train.py"], "ref": ["", "abc"]}
    assert groups_of(change) == ["layout", "code"]
    assert groups_of(["program"]) == ["code"], "without values nobody can tell"
    assert groups_of({"flags.devices": [1, 2]}, is_other_layout=True) == ["layout", "flags"]
