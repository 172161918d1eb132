"""Fleets on Ray: several nodes on this machine that come, die and are slow, and a head that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.fleet.run_states import RunState
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
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": CHECKS}
    for _ in range(3):
        with suppress(Exception):
            return import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    pytest.skip("no head of Ray starts in 30 seconds on this machine")


@pytest.fixture
def cluster() -> Iterator[Any]:
    found = start_cluster()
    yield found
    end(found)


def end(cluster: Any) -> None:
    for node in [*cluster.worker_nodes, cluster.head_node]:
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def add_node(cluster: Any) -> Any:
    """With one device, which Ray takes for a GPU. Ray gives a node 30 seconds to start: little on a busy machine."""
    for _ in range(3):
        with suppress(Exception):
            return cluster.add_node(num_cpus=0, num_gpus=1, resources={"big": 1})
    pytest.skip("no node of Ray starts in 30 seconds on this machine")


def execute(folder: Path, cluster: Any, round_seconds: float) -> "subprocess.Popen[str]":
    words = ["-uc", PROGRAM, str(folder / "fleet.yaml"), str(folder / "run"), cluster.address, str(round_seconds)]
    with (folder / "lines.txt").open("a") as lines:
        return subprocess.Popen([sys.executable, *words], stdout=lines, stderr=subprocess.STDOUT, text=True)


def write_fleet(folder: Path, *jobs: str) -> None:
    kinds = "format: penstock-fleet/1\nkinds:\n- {name: big, workers: 2}\njobs:\n"
    (folder / "fleet.yaml").write_text(kinds + "".join(jobs))


def job(name: str, workers: int, steps: int, words: list[str]) -> str:
    return f"- {{name: {name}, workers: {workers}, steps: {steps}, throughputs: {{big: 20}}, command: {words}}}\n"


def plain(name: str, steps: int) -> str:
    return job(name, 1, steps, [TRAINING, "{directory}", "{steps}", "0.05"])


def result(folder: Path, name: str, steps: int) -> int:
    return int((folder / "run" / name / "checkpoints" / f"step-{steps:06}" / "sum").read_text())


def test_nodes_die_and_come_and_are_slow(cluster: Any, tmp_path: Path) -> None:
    """A job has a rank on each node, and loses one of them: it ends with the bits of a training that loses nothing."""
    nodes = [add_node(cluster), add_node(cluster)]
    real = [str(ROOT / "examples" / "fleet" / "train.py"), "{directory}", "{steps}", "--step-seconds", "big=0.02"]
    write_fleet(tmp_path, plain("a", 60), plain("b", 60), job("both", 2, 400, real))
    executor, lines = execute(tmp_path, cluster, 3.0), tmp_path / "lines.txt"

    def wait(condition: Callable[[], bool]) -> None:
        while not condition():
            assert executor.poll() is None, lines.read_text()
            time.sleep(0.05)

    raylet = nodes[0].all_processes["raylet"][0].process.pid
    wait((tmp_path / "run" / "a" / "begun").exists)
    os.kill(raylet, signal.SIGSTOP)
    time.sleep(2)
    os.kill(raylet, signal.SIGCONT)
    wait((tmp_path / "run" / "both" / "begun").exists)
    cluster.remove_node(nodes[1], allow_graceful=False)
    wait(lambda: "big: 1 of 2 workers" in lines.read_text())
    add_node(cluster)
    assert executor.wait() == 0, lines.read_text()
    state = RunState.load(tmp_path / "run" / "state.json", ["a", "b", "both"])
    alone = tmp_path / "alone" / "checkpoints"
    subprocess.run([sys.executable, real[0], str(alone), "400"], check=True)

    assert [result(tmp_path, name, 60) for name in "ab"] == [1830, 1830]
    folders = (tmp_path / "run" / "both", tmp_path / "alone")
    found, expected = (json.loads((folder / "result.json").read_text()) for folder in folders)
    assert found == expected
    assert {job.failures for job in state.jobs.values()} == {0}
    assert lines.read_text().count("its end was not seen") == 1, "that of the job on the node that was killed"
    assert len(set(next(lease.nodes for lease in state.leases if lease.job == "both"))) == 2


def test_an_executor_and_a_head_die(tmp_path: Path) -> None:
    write_fleet(tmp_path, plain("a", 400))
    # A kind that Ray counts itself.
    (tmp_path / "fleet.yaml").write_text((tmp_path / "fleet.yaml").read_text().replace("big", "GPU"))
    first = start_cluster()
    begun, lines = tmp_path / "run" / "a" / "begun", tmp_path / "lines.txt"
    try:
        add_node(first)
        executor = execute(tmp_path, first, 60.0)
        while not begun.exists():
            assert executor.poll() is None, lines.read_text()
            time.sleep(0.05)
        executor.kill()
        executor.wait()
        executor = execute(tmp_path, first, 60.0)
        while "took over" not in lines.read_text():
            assert executor.poll() is None, lines.read_text()
            time.sleep(0.05)
        first.head_node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        assert executor.wait() != 0
    finally:
        end(first)
    state = RunState.load(tmp_path / "run" / "state.json", ["a"])
    assert [(lease.stop, lease.steps_after) for lease in state.leases] == [(None, 0)]

    second = start_cluster()
    try:
        add_node(second)
        assert execute(tmp_path, second, 60.0).wait() == 0, lines.read_text()
    finally:
        end(second)
    state = RunState.load(tmp_path / "run" / "state.json", ["a"])
    assert result(tmp_path, "a", 400) == 80200
    assert (state.jobs["a"].leases, state.jobs["a"].failures) == (2, 0)
