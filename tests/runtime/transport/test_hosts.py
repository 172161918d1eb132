"""Pipelines over the links between hosts: network namespaces on this machine, where they are allowed."""

import time
from collections.abc import Iterator

import pytest

from hosts.networks import Network, joined_hosts
from support.hosts import on_hosts, require_hosts, start_on_hosts
from support.jobs.host_jobs import probe_links, train, train_until_the_link_ends

pytestmark = pytest.mark.processes
RATE = 1e8
"""Bits per second."""


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with joined_hosts(2, RATE) as made:
        yield made


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
    answers = start_on_hosts(network, train_until_the_link_ends, str(tmp_path), 2.0)
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    network.cut(network.hosts[1])
    first, second = answers(60.0)

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
