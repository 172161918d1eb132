"""The probe: its arithmetic, the order of its measurements, and its results between real processes."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.cli import main
from penstock.commands.descriptions import describe_cluster
from penstock.profiling.links import arrange_rounds, fit_link, measure_host_bandwidth
from penstock.values import Cluster
from support.fork_server import ForkServer
from support.jobs.device_jobs import probe_directly
from support.processes import Pool

SIZES = (2**16, 2**18, 2**20, 2**22)


def probe_here(offload_to: str = "host") -> Cluster:
    """The cluster that this rank gets."""
    return penstock.probe(offload_to=offload_to, progress=False)


def probe_with_a_failing_rank(failing: int) -> str:
    """The error of this rank, if the failing one probes a device that does not exist."""
    device = "cuda:99" if dist.get_rank() == failing else "cpu"
    try:
        penstock.probe(device=device, progress=False, timeout_seconds=20.0)
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "probed"


@given(st.floats(1e-7, 1e-1), st.floats(1e6, 1e12))
def test_the_fit_gives_back_the_link_that_made_the_seconds(latency, bandwidth):
    series = [(size, [2 * latency + size / bandwidth] * 3) for size in SIZES]
    found_latency, found_bandwidth = fit_link([2 * latency] * 5, series)

    assert found_latency == pytest.approx(latency)
    # If the bytes take no time beside the latency, only a difference of nearly equal seconds is left.
    tolerance = 1e-6 + 1e-15 * 2 * latency * bandwidth / SIZES[-1]
    assert found_bandwidth == pytest.approx(bandwidth, rel=tolerance)


def test_the_fit_is_not_led_astray_by_interruptions_and_small_messages():
    latency, bandwidth = 1e-4, 1e9
    series = [(size, [2 * latency + size / bandwidth] * 4 + [1.0, 2.0]) for size in SIZES]
    # The second size came back faster than the smallest message, as on a busy machine.
    series[1] = (SIZES[1], [1.9 * latency] * 5)
    found_latency, found_bandwidth = fit_link([2 * latency] * 9 + [3.0] * 8, series)

    assert found_latency == latency
    assert found_bandwidth == pytest.approx(bandwidth, rel=1e-9)


def test_a_link_that_is_too_fast_to_be_measured_still_has_a_bandwidth():
    _, bandwidth = fit_link([1e-4], [(size, [0.9e-4]) for size in SIZES])

    assert 0 < bandwidth < math.inf


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=14))
def test_every_pair_is_measured_once_and_a_host_takes_part_in_one_at_a_time(hosts):
    rounds = arrange_rounds(hosts)

    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(len(hosts)), 2))
    for pairs in rounds:
        taken = [host for pair in pairs for host in {hosts[rank] for rank in pair}]
        assert len(taken) == len(set(taken))
        assert pairs


@pytest.mark.parametrize("ranks", range(2, 17))
def test_hosts_of_one_rank_take_a_tournament(ranks):
    assert len(arrange_rounds([f"host{rank}" for rank in range(ranks)])) == ranks - 1 + ranks % 2
    assert len(arrange_rounds(["host"] * ranks)) == ranks * (ranks - 1) // 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_processes_find_the_same_cluster(pool: Pool, ranks: int):
    first, *rest = pool.run(ranks, probe_here)

    assert all(other == first for other in rest)
    assert (first.devices, first.memory_bytes, first.host_bandwidth) == (ranks, None, None)
    for a, b in itertools.permutations(range(ranks), 2):
        # Slower than a satellite or faster than memory would be a mistake in the arithmetic.
        assert 1e-6 < first.latency(a, b) < 1
        assert 1e5 < first.bandwidth(a, b) < math.inf


def test_the_way_to_a_directory_is_measured(pool: Pool, tmp_path: Path):
    first, second = pool.run(2, probe_here, str(tmp_path))

    assert first == second
    assert first.host_bandwidth is not None
    assert 1e6 < first.host_bandwidth < math.inf
    assert "offloads pass at" in describe_cluster(first)
    assert not list(tmp_path.iterdir())


def test_a_place_for_offloads_that_cannot_be_used_is_refused(tmp_path: Path):
    with pytest.raises(penstock.PenstockError, match=r"expected a directory that this process"):
        measure_host_bandwidth(torch.device("cpu"), tmp_path / "nowhere")
    with pytest.raises(penstock.ProfileError, match="expected 'host' or a directory, found 3"):
        penstock.probe(offload_to=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_cannot_probe_ends_the_others(pool: Pool, failing: int):
    answers = pool.run(3, probe_with_a_failing_rank, failing)

    message = "probe(device=): expected cpu, cuda or cuda:N that is there, found 'cuda:99'"
    for rank, answer in enumerate(answers):
        where = "" if rank == failing else f"rank {failing}, while it looked for its device: "
        assert answer.startswith(f"ProfileError: {where}{message}")


def test_links_between_devices_are_measured_over_what_they_send_by(pool: Pool):
    for cluster, messages in pool.run(2, probe_directly):
        assert all(1e5 < cluster.bandwidth(a, b) < math.inf for a, b in ((0, 1), (1, 0)))
        assert messages > 0
        assert 1e6 < (cluster.host_bandwidth or 0) < math.inf


def test_a_single_process_has_no_links(capsys):
    with pytest.raises(penstock.ProfileError, match="this process is alone"):
        penstock.probe()
    assert main(["probe"]) == 1
    assert "torchrun --nproc-per-node 2 --no-python penstock probe" in capsys.readouterr().err


def launch(fork_server: ForkServer, folder: Path, *options: str) -> str:
    """What ``penstock probe`` prints in two processes."""
    program = folder / "probe.py"
    program.write_text(f"import sys; from penstock.cli import main; sys.exit(main({['probe', *options]}))")
    ranks = fork_server.start_ranks([str(program)], 2, folder)
    printed, errors = zip(*(child.communicate(timeout=120) for child in ranks), strict=True)
    assert [child.returncode for child in ranks] == [0, 0], errors
    return "".join(printed)


@pytest.mark.slow
def test_the_command_writes_the_cluster_and_says_it_once(fork_server: ForkServer, tmp_path: Path):
    printed = launch(fork_server, tmp_path, "-o", "cluster.yaml", "--device", "cpu")

    cluster = Cluster.load(tmp_path / "cluster.yaml")
    title, bandwidths, _, second, latencies, *_, last = printed.splitlines()
    assert title == "cluster: 2 devices, no memory limit"
    assert bandwidths.split() == ["bandwidth", "to", "0", "to", "1"]
    assert second.startswith("from 1")
    assert latencies.split() == ["latency", "to", "0", "to", "1"]
    assert last == "wrote cluster.yaml"
    assert cluster.latency(0, 1) > 0


def test_the_command_speaks_json(fork_server: ForkServer, tmp_path: Path):
    printed = launch(fork_server, tmp_path, "--json", "--no-progress")

    assert len(json.loads(printed)["links"]["latency_rows"]) == 2
