"""The front door of planning: its table, its defaults, and what it predicts."""

import pytest

from penstock.errors import PlanError
from penstock.planning import plan, plan_three_d
from penstock.values import Cluster, LayerProfile, Profile, Stage
from penstock.values.transformers import Transformer

EQUAL = Profile(tuple(LayerProfile(str(index), 1.0, 2.0, 0, 10, 100) for index in range(8)), microbatch_size=5)
FOUR = Cluster.uniform(4, 1e9)


@pytest.mark.parametrize("planner", ["pipedream", "uniform"])
@pytest.mark.parametrize(
    ("schedule", "per_rank", "seconds", "bubble"),
    [
        ("gpipe", 1, (8 + 4 - 1) * 6.0, 3 / 11),
        ("1f1b-flush", 1, (8 + 4 - 1) * 6.0, 3 / 11),
        ("interleaved", 2, (8 + 3 / 2) * 6.0, 1.5 / 9.5),
        ("pipedream", 1, 8 * 6.0, 0.0),
        ("2bw", 1, 8 * 6.0, 0.0),
    ],
)
def test_equal_stages_take_the_closed_form_of_the_schedule(planner, schedule, per_rank, seconds, bubble):
    """8 layers of 3 s on 4 ranks: 6 s per microbatch on each."""
    made = plan(EQUAL, FOUR, planner=planner, schedule=schedule, microbatches=8, stages=4 * per_rank)

    length = 2 // per_rank
    assert made.stages_per_rank == per_rank
    assert made.stages == tuple(Stage(s * length, (s + 1) * length, (s % 4,)) for s in range(8 // length))
    assert made.microbatch_size == 5
    assert made.predicted.bottleneck_seconds == 6.0
    assert made.predicted.minibatch_seconds == seconds
    assert made.predicted.samples_per_second == 8 * 5 / seconds
    assert made.predicted.bubble == pytest.approx(bubble, abs=1e-12)


def peaks(schedule, **options):
    return plan(EQUAL, FOUR, planner="uniform", schedule=schedule, **options).predicted.peak_bytes


def test_peak_bytes_count_what_is_in_flight_and_every_copy_of_the_weights():
    """Two layers per rank: 20 bytes saved per microbatch, 200 of weights, as many of gradients, twice that of Adam."""
    # All forwards come before the first backward, which frees one microbatch's activations for the gradients.
    assert peaks("gpipe", microbatches=8) == (7 * 20 + 800,) * 4
    assert peaks("1f1b-flush", microbatches=8) == tuple((4 - s) * 20 + 800 for s in range(4))
    assert peaks("1f1b-flush", microbatches=2) == (20 + 800,) * 4
    assert peaks("pipedream") == tuple((3 - s) * 20 + (4 - s + 3) * 200 for s in range(4))
    assert peaks("pipedream", vertical_sync=True) == tuple((3 - s) * 20 + 7 * 200 for s in range(4))
    assert peaks("2bw", microbatches=4) == tuple((4 - s) * 20 + 1000 for s in range(4))
    assert peaks("2bw", microbatches=4, optimizer_copies=0) == tuple((4 - s) * 20 + 600 for s in range(4))
    assert peaks("interleaved", microbatches=8) == tuple((2 * (3 - r) + 5) * 10 + 800 for r in range(4))


def test_recompute_costs_a_forward_and_keeps_only_inputs():
    layers = tuple(LayerProfile(str(index), 1.0, 2.0, 3, 10, 100) for index in range(4))
    two = Cluster.uniform(2, 1e9)
    made = plan(Profile(layers, 1), two, planner="uniform", schedule="1f1b-flush", microbatches=4, recompute=True)

    assert made.recompute
    assert made.predicted.bottleneck_seconds == 8.0
    # Rank 0 keeps nothing of its own (its input is the batch) and what it recomputes for one microbatch; besides, two
    # activations on their way, each of 3 bytes. Rank 1 recomputes nothing: its backward follows its forward at once.
    assert made.predicted.peak_bytes == (2 * 0 + 20 + 800 + 2 * 3, 1 * 3 + 20 + 800 + 3)


def test_replicas_are_planned_where_they_are_allowed():
    made = plan(EQUAL, FOUR, planner="pipedream", schedule="1f1b-flush")

    assert made.stages == (Stage(0, 8, (0, 1, 2, 3)),)
    assert (made.schedule, made.microbatches) == ("1f1b-flush", 16)
    assert made.predicted.bottleneck_seconds == 6.0


def test_where_nothing_fits_the_error_says_what_would_be_enough():
    with pytest.raises(PlanError, match=r"nothing fits: .*959 B on each of 4 devices.*enough: 960 B on each"):
        plan(EQUAL, Cluster.uniform(4, 1e9, 959), planner="uniform", schedule="gpipe", microbatches=8, recompute=False)


def test_a_transformer_is_planned_with_tensor_parallelism():
    small = Transformer(layers=8, hidden=1024, heads=16)
    cluster = Cluster.hierarchical([(4, 3e11), (2, 2.5e10)], memory_bytes=80e9)

    made = plan(small, cluster, batch_size=16)

    assert made == plan_three_d(small, cluster, batch_size=16)
    assert made.explain().count("\n") > 3
