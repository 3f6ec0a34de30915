"""On a real Ray: a node that is removed in the middle, and the same bits."""

import pytest

from stability.execute.ray_tasks import ray_jobs
from tests.clusters.conftest import Command, is_under_way, variables
from tests.stability.study.recorded_bits import recorded_bits

pytestmark = pytest.mark.clusters


@pytest.fixture(scope="module")
def cluster():
    """A Ray of one head, on which nothing trains, and as many nodes as are added."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables().items():
            patch.setenv(name, value)
        # else a node counts as lost after half a minute
        settings = {"health_check_failure_threshold": 2, "health_check_period_ms": 500}
        found = pytest.importorskip("ray.cluster_utils").Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": settings}
        )
        try:
            yield found
        finally:
            ray.shutdown()
            found.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own, of sockets and processes that it leaves open
def test_a_node_that_is_removed_changes_no_bit(cluster, write_long, trained_here):
    study = write_long((0,), ("baseline", "nudge"))
    first = cluster.add_node(num_cpus=1)
    command = Command(study, "--executor", "ray", f"--ray.address={cluster.address}")
    disturbed = command.until(lambda runs: next(filter(is_under_way, runs.values()), None))
    assert disturbed.arm == "baseline"
    cluster.remove_node(first)
    assert command.interrupt() == 130
    cluster.add_node(num_cpus=2)
    again = Command(study, "--executor", "ray", f"--ray.address={cluster.address}")
    assert again.ended() == 0, again.log.read_text()
    assert "3 tasks found on Ray" in again.log.read_text()
    assert ray_jobs(command.folder) == {}
    found, expected = recorded_bits(command.folder), recorded_bits(trained_here)
    # a manifest says, too, under which protocol it was trained, and a part of a study has its own
    trained = [name for name in found if not name.endswith("manifest.json")]
    assert {name.split("/")[0] for name in trained} == {"baseline", "nudge"}
    assert [name for name in trained if found[name] != expected[name]] == []
