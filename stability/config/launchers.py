"""Which words of a program say in how many processes it trains, and not what.

`torchrun --nproc-per-node 2 train.py` and `python train.py` run one script in two layouts. Known
are torchrun, by its name or as `torch.distributed.run`, `mpirun`, `mpiexec` and `srun`, which only
start processes, and `accelerate launch` and `deepspeed`, which also decide other things: of these
only the options that name processes and where they meet are layout. Leaves out layouts that a
script makes by flags of its own.
"""

import shlex
from collections.abc import Sequence
from pathlib import PurePath

__all__ = ["layout_change"]

_WITH_VALUE = frozenset(
    (
        *("nproc_per_node", "nnodes", "node_rank", "num_processes", "num_machines", "num_nodes"),
        *("machine_rank", "num_gpus", "ntasks", "np", "n", "nodes", "rdzv_backend", "rdzv_conf"),
        *("rdzv_endpoint", "rdzv_id", "master_addr", "master_port", "main_process_ip"),
        *("main_process_port", "max_restarts", "monitor_interval"),
    )
)
_WITHOUT_VALUE = frozenset(("standalone", "multi_gpu"))
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_STARTERS = ("torchrun", "mpirun", "mpiexec", "srun")
_KEPT = ("accelerate", "deepspeed")


def layout_change(before: str, after: str) -> tuple[str, str] | None:
    """Return the words that say the layouts of two programs; None if they differ in others too.

    Of a program that no launcher starts they are empty.
    """
    try:
        one, other = (_split(shlex.split(program)) for program in (before, after))
    except ValueError:  # no words of a shell
        return None
    interpreters = {each[0] for each in (one, other) if each[0]}
    if one[1] != other[1] or one[2] == other[2] or len(interpreters) > 1:
        return None
    return " ".join(one[2]), " ".join(other[2])


def _split(words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the interpreter, if one is named, the words less the launcher's, and its layout."""
    rest, layout, interpreter = list(words), [], ""
    while rest:
        name = PurePath(rest[0]).name
        if name.startswith("python"):
            interpreter = rest.pop(0)
            if rest[:1] != ["-m"] or rest[1:2] not in ([each] for each in _TORCHRUN):
                break
            del rest[:2]
        elif name in _STARTERS:
            del rest[0]
        elif name in _KEPT:
            count = 2 if name == "accelerate" else 1
            kept = rest[:count]
            del rest[:count]
            layout += _taken(rest)
            while rest and any(map(_is_script, rest)) and not _is_script(rest[0]):
                kept.append(rest.pop(0))
                layout += _taken(rest)
            return interpreter, [*kept, *rest], layout
        else:
            break
        layout += _taken(rest)
    return interpreter, rest, layout


def _is_script(word: str) -> bool:
    """Whether a launcher's own options end here."""
    return word.endswith(".py") or word in ("-m", "--module")


def _taken(rest: list[str]) -> list[str]:
    """Take the options of the layout out of the words that `rest` begins with, and return them."""
    taken = []
    while rest and rest[0].startswith("-"):
        name, equals, _ = rest[0].lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name not in _WITH_VALUE | _WITHOUT_VALUE:
            break
        count = 2 if name in _WITH_VALUE and not equals else 1
        taken += rest[:count]
        del rest[:count]
    return taken
