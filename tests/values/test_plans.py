"""Plans: uniform ones, files, the table, and what is said of plans made by hand."""

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.values import Cluster, Plan, Prediction, Stage
from support.strategies import plans


@given(plans())
def test_a_file_gives_back_the_plan(tmp_path_factory, plan):
    path = tmp_path_factory.getbasetemp() / "plan.yaml"
    plan.save(path)

    assert Plan.load(path) == plan


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 30))
def test_uniform_stages_differ_by_one_layer_and_the_longer_come_first(ranks, per_rank, more):
    stages = ranks * per_rank
    schedule = "interleaved" if per_rank > 1 else "gpipe"
    plan = Plan.uniform(stages + more, stages, schedule, stages_per_rank=per_rank)
    lengths = [stage.stop - stage.start for stage in plan.stages]

    assert sum(lengths) == plan.layers == stages + more
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    assert [stage.ranks for stage in plan.stages] == [(stage % ranks,) for stage in range(stages)]
    assert (plan.ranks, plan.stages_per_rank) == (ranks, per_rank)


def test_devices_that_are_left_out_are_said():
    stages = (Stage(0, 2, (1,)), Stage(2, 3, (0,)))
    plan = Plan(stages, devices=(0, 3))

    assert str(plan).splitlines()[0] == "1f1b-flush: 1 microbatches, ranks: 2, on devices 0, 3"
    assert Plan(stages, devices=(0, 1)) == Plan(stages)
    assert plan.used(Cluster.uniform(4, 1e9)) == Cluster.uniform(4, 1e9).pick((0, 3))
    with pytest.raises(PlanError, match=r"2 ranks up to device 3 and the cluster 3 devices"):
        plan.used(Cluster.uniform(3, 1e9))
    for wrong in ((0,), (0, 0), (0, 1, 2)):
        with pytest.raises(PlanError, match=r"devices: expected 2 different devices \(one per rank\)"):
            Plan(stages, devices=wrong)


def test_ranks_of_different_speeds_get_what_they_can_do():
    """Six equal layers on a rank that is twice as fast as the other: four and two."""
    cuts = [stage.stop for stage in Plan.balanced([1] * 6, 2, speeds=[2, 1]).stages]

    assert cuts == [4, 6]
    assert [stage.stop for stage in Plan.balanced([1] * 6, 2, speeds=[1, 2]).stages] == [2, 6]
    assert Plan.balanced([1, 2, 3, 4], 2, speeds=[3, 3]) == Plan.balanced([1, 2, 3, 4], 2)
    with pytest.raises(PlanError, match=r"speeds: expected 2 \(one per rank\), found 3"):
        Plan.balanced([1] * 6, 2, speeds=[1, 1, 1])


def test_a_plan_prints_as_a_table():
    plan = Plan(
        (Stage(0, 9, tuple(range(15))), Stage(9, 11, (15,))),
        "pipedream",
        microbatches=2,
        microbatch_size=64,
        predicted=Prediction(0.5, 256.0, 0.25, (2e9,) * 16, 0.125),
    )

    assert str(plan) == (
        "pipedream: 2 microbatches of 64, ranks: 16\n"
        "stage  layers   ranks\n"
        "    0  [0, 9)   ranks 0-14\n"
        "    1  [9, 11)  rank 15\n"
        "predicted: 0.5 s per minibatch\n"
        "  256 samples/s\n"
        "  slowest stage or link 0.25 s per microbatch\n"
        "  bubble 12.5 % of wall time, peak 2 GB"
    )


def stages(*triples):
    return tuple(Stage(start, stop, ranks) for start, stop, ranks in triples)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stage(3, 3, (0,)), "stop: expected more than start = 3, found 3: a stage holds at least one layer"),
        (lambda: Stage(-1, 3, (0,)), "start: expected the index of a layer, 0 or more, found -1"),
        (lambda: Stage(0, 3, ()), "ranks: expected one rank or more, found none"),
        (lambda: Stage(0, 3, (0, True)), r"ranks\[1\]: expected a rank, 0 or more, found True"),
        (lambda: Plan(()), "stages: expected one stage or more"),
        (lambda: Plan(stages((0, 3, (0,)), (5, 6, (1,)))), r"stages\[1\].start: expected 3 .*found 5 .*: a gap"),
        (lambda: Plan(stages((0, 3, (0,)), (2, 6, (1,)))), r"stages\[1\].start: expected 3 .*found 2 .*: an overlap"),
        (lambda: Plan(stages((1, 3, (0,)))), r"stages\[0\].start: expected 0 \(the first stage starts at layer 0\)"),
        (lambda: Plan(stages((0, 3, (0,)), (3, 6, (0,)))), r"stages\[1\].ranks: rank 0 is used twice: .*in stage 0"),
        (lambda: Plan(stages((0, 3, (0, 0)))), r"stages\[0\].ranks: rank 0 is used twice"),
        (lambda: Plan(stages((0, 3, (0,)), (3, 6, (2,)))), "expected ranks 0 to 2 .*found none on rank 1"),
        (
            lambda: Plan(stages((0, 1, (0,)), (1, 2, (1,)), (2, 3, (1,)), (3, 4, (0,))), "interleaved"),
            r"stages\[2\].ranks: expected \[0\] \(interleaved: .*found \[1\] in layers \[2, 3\) on rank 1",
        ),
        (lambda: Plan(stages((0, 1, (0,)), (1, 2, (1,)), (2, 3, (0,))), "interleaved"), "expected a multiple of 2"),
        (lambda: Plan(stages((0, 1, (0, 1)), (1, 2, (2,))), "interleaved"), r"stages\[1\].ranks: expected 2 ranks"),
        (lambda: Plan(stages((0, 1, (0, 1, 2))), tensor_parallel=2), r"stages\[0\].ranks: expected a multiple of 2"),
        (lambda: Plan(stages((0, 1, (1, 2))), tensor_parallel=2), r"stages\[0\].ranks: expected groups of 2"),
        (lambda: Plan(stages((0, 3, (0,))), routing="splitt"), r"routing: .*found 'splitt'. Did you mean 'split'\?"),
        (lambda: Plan(stages((0, 3, (0,))), "1f1b-flsh"), "schedule: .*found '1f1b-flsh'. Did you mean"),
        (lambda: Plan(stages((0, 3, (0,))), microbatches=0), "microbatches: expected a whole number from 1 to 65536"),
        (lambda: Plan(stages((0, 3, (0,))), microbatch_size=2.5), "microbatch_size: expected a whole number"),
        (lambda: Plan(stages((0, 3, (0,))), recompute=1), "recompute: expected True or False, or the numbers of the"),
        (lambda: Plan.uniform(3, 3, recompute=(0, 3)), "recompute: expected stages 0 to 2, found 3"),
        (lambda: Prediction(1.0, math.nan, 1.0, (), 0.0), "samples_per_second: expected a number, 0 or more, found"),
        (
            lambda: Plan(stages((0, 3, (0,))), predicted=Prediction(1, 1, 1, (1, 2), 0)),
            r"predicted.peak_bytes: expected 1 numbers \(one per rank\), found 2",
        ),
        (lambda: Plan.uniform(3, 4), "cannot cut 3 layers into 4 stages"),
        (lambda: Plan.uniform(8, 4, "interleaved", stages_per_rank=3), "stages_per_rank: expected a divisor of 4"),
    ],
)
def test_a_wrong_plan_shows_the_offending_stage(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_the_stages_that_recompute_are_named_unless_they_are_all_or_none():
    found = Plan.uniform(3, 3, recompute=(2, 0))

    assert (found.recompute, found.recomputed) == ((0, 2), frozenset({0, 2}))
    assert str(found).startswith("1f1b-flush, recompute [0, 2]: ")
    assert "recompute: [0, 2]\n" in found.to_yaml()
    assert [Plan.uniform(2, 2, recompute=given).recompute for given in ((), (1, 0))] == [False, True]


HEAD = "format: penstock-plan/1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "format: expected 'penstock-plan/1', found nothing"),
        ("format: penstock-plan/2", "format: expected 'penstock-plan/1', found 'penstock-plan/2'"),
        (HEAD, "the key 'stages' is missing"),
        (HEAD + "stages: 3", "stages: expected a list, found 3"),
        (HEAD + "stages: [3]", r"stages\[0\]: expected a mapping with the keys start, stop, ranks, found 3"),
        (
            HEAD + "stages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 2, end: 4, ranks: [1]}",
            r"stages\[1\]: unknown key 'end'",
        ),
        (
            HEAD + "stages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 2, stop: 4, ranks: [x]}",
            r"stages\[1\].ranks\[0\]: expected a whole number, found 'x'",
        ),
        (
            HEAD + "stages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 2, stop: 2, ranks: [1]}",
            r"stages\[1\].stop: expected more than start = 2, found 2",
        ),
        (
            HEAD + "stages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 3, stop: 4, ranks: [1]}",
            r"stages\[1\].start: expected 2 ",
        ),
        (HEAD + "schedule: pipedraem\nstages: [{start: 0, stop: 2, ranks: [0]}]", "schedule: .*Did you mean"),
        (HEAD + "microbatch: 2\nstages: [{start: 0, stop: 2, ranks: [0]}]", "unknown key 'microbatch'.*microbatches"),
        (HEAD + "vertical_sync: 1\nstages: [{start: 0, stop: 2, ranks: [0]}]", "vertical_sync: expected true or false"),
        (HEAD + "predicted: {}\nstages: [{start: 0, stop: 2, ranks: [0]}]", "predicted: the key 'minibatch_seconds'"),
        (HEAD + "stages: [\n", "line 3, column 1: not YAML"),
        (HEAD + "microbatches: 8:30\nstages: [{start: 0, stop: 2, ranks: [0]}]", "microbatches: expected a whole"),
        (HEAD + "microbatches: 010\nstages: [{start: 0, stop: 2, ranks: [0]}]", "microbatches: expected a whole"),
        (HEAD + "layers: 4\nstages:\n- {start: 0, stop: 2, ranks: [0]}\n", "layers: expected 2, where the last of the"),
    ],
)
def test_a_wrong_file_names_itself_the_field_and_the_fix(tmp_path, text, message):
    path = tmp_path / "plan.yaml"
    path.write_text(text)

    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count(str(path)) == 1


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    Plan.uniform(4, 2).save(tmp_path / "gpt.yaml")

    with pytest.raises(PlanError, match=r"gtp.yaml: no such file. Did you mean 'gpt.yaml'\?"):
        Plan.load(tmp_path / "gtp.yaml")


def test_a_plan_by_hand_needs_only_its_stages(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(HEAD + "stages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 2, stop: 5, ranks: [1]}\n")

    assert Plan.load(path) == Plan((Stage(0, 2, (0,)), Stage(2, 5, (1,))))


def test_a_plan_file_that_is_cut_off_anywhere_is_refused_or_whole(tmp_path):
    """Wherever the file ends, `load` returns the plan, without its prediction at most, or refuses it."""
    whole = Plan.uniform(6, 3, "1f1b-flush", 4, microbatch_size=2)
    path = tmp_path / "plan.yaml"
    whole.save(path)
    text = path.read_text()
    loaded = set()
    for end in range(len(text)):
        path.write_text(text[:end])
        try:
            loaded.add(Plan.load(path))
        except PlanError as error:
            assert str(path) in str(error)

    assert loaded <= {whole}


def test_a_plan_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(PlanError, match="cannot be written"):
        Plan.uniform(4, 2).save(tmp_path / "nowhere" / "plan.yaml")


def test_stages_of_equal_weight_are_seen_as_equal():
    """Two stages of 27: which of them is the slowest must not depend on how numbers are rounded."""
    plan = Plan.balanced([8, 19, 3, 7, 20, 10], 4, "gpipe", microbatches=2)

    assert [stage.stop for stage in plan.stages] == [2, 4, 5, 6]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_balanced_stages_are_the_best_of_all_cuts(weights, data):
    stages = data.draw(st.integers(1, len(weights)))
    plan = Plan.balanced(weights, stages, "gpipe", microbatches=2)

    def price(bounds):
        sums = [sum(weights[start:stop]) for start, stop in pairwise(bounds)]
        return max(sums), sum(weight**2 for weight in sums)

    inner = combinations(range(1, len(weights)), stages - 1)
    assert price((0, *(stage.stop for stage in plan.stages))) == min(price((0, *cuts, len(weights))) for cuts in inner)
    assert [stage.ranks for stage in plan.stages] == [(stage,) for stage in range(stages)]
    assert plan.microbatches == 2


@given(st.floats(1e-9, 1e9), st.integers(1, 6), st.integers(0, 20))
def test_layers_of_one_weight_are_cut_as_uniform_plans_are(weight, stages, more):
    assert Plan.balanced([weight] * (stages + more), stages) == Plan.uniform(stages + more, stages)


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan, "1", True])
def test_a_weight_that_is_no_cost_is_named(weight):
    with pytest.raises(PlanError, match=r"weights\[1\]: expected a finite number, 0 or more"):
        Plan.balanced([1.0, weight], 2)


def test_balanced_stages_need_a_layer_each():
    with pytest.raises(PlanError, match="cannot cut 2 layers into 3 stages"):
        Plan.balanced([1.0, 1.0], 3)
