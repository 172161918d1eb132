"""Clusters: the links that they describe, their files, and what is said of wrong ones."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.values import Cluster, LinkLevels, LinkMatrix
from penstock.values.link_tables import FREE, MessageCosts
from support.strategies import clusters


def test_the_innermost_level_that_joins_two_ranks_gives_their_bandwidth():
    cluster = Cluster.hierarchical([(2, 100.0), (3, 10.0), (2, 1.0)])

    assert cluster.devices == 12
    assert [cluster.bandwidth(0, rank) for rank in range(1, 12)] == [100.0] + [10.0] * 4 + [1.0] * 6
    assert cluster.bandwidth(3, 2) == 100.0
    assert cluster.bandwidth(7, 7) == math.inf
    assert cluster.levels == ((2, 100.0), (3, 10.0), (2, 1.0))
    assert cluster.slowest == 1.0


def test_a_uniform_cluster_is_one_level():
    assert Cluster.uniform(4, 5e9, memory_bytes=8e9).levels == ((4, 5e9),)
    assert Cluster.uniform(1, 5e9).slowest == math.inf


def test_a_matrix_may_differ_by_direction_and_its_diagonal_is_not_used():
    cluster = Cluster.from_matrix([[0, 7], [3, math.nan]])

    assert (cluster.bandwidth(0, 1), cluster.bandwidth(1, 0), cluster.slowest) == (7.0, 3.0, 3.0)


@given(clusters(), st.data())
def test_a_message_takes_the_latency_and_its_bytes_at_the_bandwidth(cluster, data):
    a, b = (data.draw(st.integers(0, cluster.devices - 1)) for _ in range(2))
    size = data.draw(st.integers(0, 10**9))

    if a == b:
        assert (cluster.latency(a, b), cluster.transfer_seconds(size, a, b)) == (0.0, 0.0)
    else:
        assert cluster.transfer_seconds(size, a, b) == cluster.latency(a, b) + size / cluster.bandwidth(a, b)


def test_the_innermost_level_that_joins_two_ranks_gives_their_latency():
    cluster = Cluster.hierarchical([(2, 100.0), (3, 10.0), (2, 1.0)], latency_seconds=[0.1, 0.2, 0.3])

    assert [cluster.latency(0, rank) for rank in range(12)] == [0.0, 0.1] + [0.2] * 4 + [0.3] * 6
    assert cluster.transfer_seconds(50, 0, 2) == 0.2 + 5.0
    assert Cluster.hierarchical([(2, 100.0), (3, 10.0)], latency_seconds=0.5).latency(0, 5) == 0.5


def test_latencies_are_zero_unless_they_are_given():
    for cluster in (Cluster.uniform(3, 1e9), Cluster.from_matrix([[1.0] * 3] * 3)):
        assert {cluster.latency(a, b) for a in range(3) for b in range(3)} == {0.0}
    assert Cluster.uniform(3, 1e9) == Cluster.uniform(3, 1e9, latency_seconds=0) == Cluster.hierarchical([(3, 1e9)])
    assert Cluster.uniform(3, 1e9) != Cluster.uniform(3, 1e9, latency_seconds=1e-6)


def test_the_latencies_of_a_matrix_may_differ_by_direction():
    cluster = Cluster.from_matrix([[0, 7], [3, 0]], latency_seconds=[[math.nan, 0.5], [0.25, -1]])

    assert (cluster.latency(0, 1), cluster.latency(1, 0), cluster.latency(1, 1)) == (0.5, 0.25, 0.0)
    assert Cluster.from_matrix([[0, 7], [3, 0]], latency_seconds=0.5).latency(1, 0) == 0.5


def test_a_file_speaks_of_latency_only_where_there_is_some(tmp_path):
    path = tmp_path / "machine.yaml"
    for links in ([(2, 1e9), (2, 1e8)], [(4, 1e9)]):
        Cluster.hierarchical(links).save(path)
        assert "latency" not in path.read_text()
    Cluster.from_matrix([[1, 1], [1, 1]]).save(path)
    assert "latency" not in path.read_text()
    Cluster.hierarchical([(2, 1e9), (2, 1e8)], latency_seconds=[0, 5e-6]).save(path)
    assert path.read_text().count("latency") == 1


HEAD = "format: penstock-cluster/1\n"


def test_a_person_may_write_12e9(tmp_path):
    """YAML 1.1 reads 12e9 as a string."""
    path = tmp_path / "machine.yaml"
    path.write_text(HEAD + "memory_bytes: 16e9\nlevels:\n- {count: 4, bytes_per_second: 12e9}\n")

    assert Cluster.load(path) == Cluster.uniform(4, 12e9, 16e9)


def test_a_person_may_write_one_latency_for_a_whole_matrix(tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(HEAD + "matrix: [[0, 1e9], [2e9, 0]]\nlatency_seconds: 5e-6\n")

    assert Cluster.load(path) == Cluster.from_matrix([[0, 1e9], [2e9, 0]], latency_seconds=5e-6)


def test_costs_of_messages_are_found_by_level_and_by_link(tmp_path):
    slow, fast = MessageCosts(1e-3, 1e-8), MessageCosts(1e-5)
    levels = Cluster(LinkLevels(((2, 1e9), (2, 1e8)), message_costs=(fast, slow)), action_seconds=2e-5)
    matrix = Cluster(LinkMatrix(((0.0, 1e9), (1e9, 0.0)), cost_rows=((FREE, slow), (fast, FREE))))

    assert [levels.message_costs(0, rank) for rank in range(4)] == [FREE, fast, slow, slow]
    assert [matrix.message_costs(0, 1), matrix.message_costs(1, 0), matrix.message_costs(1, 1)] == [slow, fast, FREE]
    assert Cluster.uniform(2, 1e9).with_costs(message_seconds=1e-5).message_costs(1, 0) == fast
    assert (levels.has_message_costs, Cluster.uniform(2, 1e9).has_message_costs) == (True, False)
    levels.save(tmp_path / "levels.yaml")
    assert "message_seconds: 0.001, message_seconds_per_byte: 1.0e-08" in (tmp_path / "levels.yaml").read_text()
    assert not levels.blocks and Cluster.uniform(2, 1e9).with_costs(message_blocking=0.5).blocks


def test_the_bandwidth_to_the_host_is_in_the_file_if_it_is_known(tmp_path):
    plain = Cluster.uniform(2, 1e9)
    known = replace(plain, host_bandwidth=25e9, host_bytes=1e9)
    for cluster in (plain, known):
        cluster.save(tmp_path / "cluster.yaml")
        assert Cluster.load(tmp_path / "cluster.yaml") == cluster
        assert ("host_bandwidth: 25000000000.0" in (tmp_path / "cluster.yaml").read_text()) == (cluster == known)


def test_one_number_in_a_file_stands_for_the_costs_of_all_links(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("format: penstock-cluster/1\nmatrix: [[0, 1e9], [1e9, 0]]\nmessage_seconds: 0.5\n")

    assert Cluster.load(path).message_costs(0, 1) == MessageCosts(0.5)
