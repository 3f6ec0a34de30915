"""What a process can have is the least of the machine's memory and its control groups' limits."""

import resource

import pytest

from stability.study.machine_memory import Memory, host_memory

MACHINE, SWAP = 64 * 2**30, 2**30
VERSION_1 = "9:name=systemd:/\n4:memory:/jobs/17\n1:cpu,cpuacct:/jobs\n0::/\n"
VERSION_2 = "0::/jobs/17\n"


@pytest.fixture
def system(tmp_path):
    """Return a function that writes the system's files below a folder, which it returns."""

    def write(groups: str = "", **limits: str):
        (tmp_path / "proc/self").mkdir(parents=True)
        table = f"MemTotal: {MACHINE // 1024} kB\nMemFree: 17 kB\nSwapTotal: {SWAP // 1024} kB\n"
        (tmp_path / "proc/meminfo").write_text(table)
        (tmp_path / "proc/self/cgroup").write_text(groups)
        for name, limit in limits.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{limit}\n")
        return tmp_path

    return write


def test_without_a_limit_it_is_the_machine_and_its_swap(system):
    assert host_memory(system()) == Memory(MACHINE + SWAP, "this machine")


@pytest.mark.parametrize(
    ("groups", "file", "limit"),
    [
        (VERSION_2, "jobs/17/memory.max", 2**33),
        (VERSION_2, "jobs/memory.max", 2**33),  # of the group above, which holds as well
        (VERSION_2, "memory.max", 2**33),  # in a container: its own group is what is mounted
        (VERSION_1, "memory/jobs/17/memory.limit_in_bytes", 2**33),
        (VERSION_1, "memory/memory.limit_in_bytes", 2**33),
    ],
)
def test_a_lower_limit_of_a_control_group_is_what_counts(system, groups, file, limit):
    found = host_memory(system(groups, **{file: str(limit)}))
    assert found == Memory(limit + SWAP, "this process's control group")


@pytest.mark.parametrize(
    ("groups", "file", "limit"),
    [
        (VERSION_2, "jobs/17/memory.max", "max"),
        (VERSION_2, "jobs/18/memory.max", "4096"),  # another's
        (VERSION_1, "memory/jobs/17/memory.limit_in_bytes", "9223372036854771712"),
        (VERSION_1, "cpu/jobs/memory.limit_in_bytes", "4096"),
        ("torn", "memory.max", "4096"),
    ],
)
def test_a_limit_that_is_none_or_another_ones_does_not_count(system, groups, file, limit):
    assert host_memory(system(groups, **{file: limit})) == Memory(MACHINE + SWAP, "this machine")


def test_this_machine_has_more_than_this_process_holds():
    found = host_memory()
    assert found is not None
    assert found.bytes > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
