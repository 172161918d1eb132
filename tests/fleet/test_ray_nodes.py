"""Fleets on Ray: several nodes on this machine that come, die and are slow, and a head that dies."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.fleet.executor import RunState
from support.paths import ROOT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs penstock[ray]"),
    pytest.mark.filterwarnings("default"),
]
TRAINING = str(ROOT / "tests" / "support" / "scripts" / "plain_training.py")
# A node whose process is gone is found soon, and one that is only slow is not taken for dead.
CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 60_000,
    "health_check_failure_threshold": 3,
    "gcs_rpc_server_reconnect_timeout_s": 5,
}
PROGRAM = """
import sys
from penstock.fleet import *
fleet = FleetFile.load(sys.argv[1])
nodes = RayNodes(sys.argv[3])
FleetExecutor(fleet, max_min_fairness, sys.argv[2], round_seconds=float(sys.argv[4]), report=print, nodes=nodes).run()
"""


def start_cluster() -> Any:
    return import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": CHECKS}
    )


@pytest.fixture
def cluster() -> Iterator[Any]:
    found = start_cluster()
    yield found
    found.shutdown()


def add_node(cluster: Any, **resources: int) -> Any:
    return cluster.add_node(num_cpus=0, num_gpus=1, resources=resources)


def execute(folder: Path, cluster: Any, round_seconds: float) -> "subprocess.Popen[str]":
    words = [str(folder / "fleet.yaml"), str(folder / "run"), cluster.address, str(round_seconds)]
    with (folder / "lines.txt").open("a") as lines:
        return subprocess.Popen(
            [sys.executable, "-uc", PROGRAM, *words], stdout=lines, stderr=subprocess.STDOUT, text=True
        )


def wait(condition: Callable[[], bool], executor: "subprocess.Popen[str]", folder: Path) -> None:
    while not condition():
        assert executor.poll() is None, (folder / "lines.txt").read_text()
        time.sleep(0.05)


def test_nodes_die_and_come(cluster: Any, tmp_path: Path) -> None:
    def job(name: str, workers: int, steps: int) -> str:
        words = f'["{TRAINING}", "{{directory}}", "{{steps}}", "0.05"]'
        return (
            f"- {{name: {name}, workers: {workers}, steps: {steps}, throughputs: {{big: 20}}, command: {words}, "
            "processes: {big: 1}}\n"
        )

    kinds = "format: penstock-fleet/1\nkinds:\n- {name: big, workers: 2}\njobs:\n"
    (tmp_path / "fleet.yaml").write_text(kinds + job("a", 1, 100) + job("b", 1, 100) + job("both", 2, 40))
    nodes = [add_node(cluster, big=1), add_node(cluster, big=1)]
    executor = execute(tmp_path, cluster, 3.0)
    begun = [tmp_path / "run" / name / "begun" for name in "ab"]
    wait(lambda: all(path.exists() for path in begun), executor, tmp_path)
    cluster.remove_node(nodes[1], allow_graceful=False)
    wait(lambda: "big: 1 of 2" in (tmp_path / "lines.txt").read_text(), executor, tmp_path)
    add_node(cluster, big=1)
    lines = (tmp_path / "lines.txt").read_text
    assert executor.wait() == 0, lines()
    state = RunState.load(tmp_path / "run" / "state.json", ["a", "b", "both"])

    assert {found.failures for found in state.jobs.values()} == {0}
    sums = [
        (tmp_path / "run" / name / "checkpoints" / f"step-{steps:06}" / "sum").read_text()
        for name, steps in (("a", 100), ("b", 100), ("both", 40))
    ]
    assert sums == ["5050", "5050", "820"]
