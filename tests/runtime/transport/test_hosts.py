"""Pipelines over the links between hosts: network namespaces on this machine, where they are allowed."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from hosts.networks import Network, joined_hosts
from penstock.torch_internals.distributed import INTERFACE
from penstock.values import Cluster
from support import models
from support.hosts import on_hosts, require_hosts, start_on_hosts

pytestmark = pytest.mark.processes
RATE = 1e8
"""Bits per second."""


def _pipeline(timeout_seconds: float = 60.0) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, dtype=torch.float64) for _ in range(4)))
    sample, options = (torch.ones(2, 16, dtype=torch.float64),), dict[str, Any](stages=2, microbatches=4)
    return penstock.Pipeline(model, sample, F.mse_loss, models.plain, timeout_seconds=timeout_seconds, **options)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, target = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return inputs, target


def train(steps: int = 3) -> tuple[list[float], int, str]:
    """The losses of some steps, the bytes that this host has sent, and the interface of Gloo."""
    pipe = _pipeline()
    losses = [float(pipe.step(*_batch()).loss) for _ in range(steps)]
    pipe.close()
    return losses, _sent_bytes(), os.environ.get(INTERFACE, "")


def train_until_the_link_ends(folder: str, timeout_seconds: float) -> str:
    """Trains until an error, and returns it. Rank 0 writes a file when the first steps are done."""
    pipe = _pipeline(timeout_seconds)
    try:
        for step in range(100_000):
            float(pipe.step(*_batch()).loss)
            if step == 2:
                Path(folder, f"begun-{os.environ['RANK']}").touch()
            time.sleep(0.01)
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def probe_links() -> Cluster:
    return penstock.probe(progress=False)


def _sent_bytes() -> int:
    """What has left this host by its link."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "link0":
            return int(numbers.split()[8])
    return 0


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with joined_hosts(2, RATE) as made:
        yield made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("named", [True, False], ids=["interface named", "interface chosen"])
def test_hosts_meet_and_train_over_their_link(network: Network, named: bool) -> None:
    """The losses have the bits of one process. Without a word about it, Gloo would take the loopback interface."""
    alone, _, _ = train()
    (first, sent, interface), (second, returned, _) = on_hosts(network, train, interface=named)

    assert first == second == alone
    assert interface == "link0"
    # At least the activations and the gradients: 3 steps of 4 microbatches of 2 samples.
    assert min(sent, returned) > 3 * 4 * 2 * 16 * 8


def test_a_host_that_vanishes_ends_the_training_of_the_others(network: Network, tmp_path) -> None:
    """No process gets a signal when a cable is pulled. Each side ends in time; its error names the other one."""
    answers = start_on_hosts(network, train_until_the_link_ends, str(tmp_path), 12.0)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    network.cut(network.hosts[1])
    first, second = answers(240.0)

    assert first.startswith("TransportError: ") and "rank 1" in first
    assert second.startswith("TransportError: ") and "rank 0" in second


def test_the_probe_finds_a_slow_link_and_what_its_messages_cost(network: Network) -> None:
    """A token bucket passes no more than its rate; a machine under load passes less."""
    # The seconds of an action are a difference of times: on a busy machine it may come out as none.
    for _ in range(4):
        first, second = on_hosts(network, probe_links)
        assert first == second
        if first.action_seconds > 0:
            break
    for way in ((0, 1), (1, 0)):
        assert RATE / 8 / 20 < first.bandwidth(*way) < RATE / 8 * 1.1
        assert 0 < first.latency(*way) < 1
    assert first.has_message_costs
    assert first.action_seconds > 0
