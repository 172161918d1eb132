"""What no value can be is refused: where it is, what was expected, and what was found."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import values
from penstock.commands.files import load_sweep
from penstock.errors import PlanError, ProfileError
from penstock.values import Cluster, LayerProfile, Plan, Prediction, Profile, Stage
from penstock.values.crossings import Crossing
from penstock.values.transformers import Transformer

A: Any = values
"""Without types, so that wrong arguments can be passed."""
LAYER = LayerProfile("h.0", 0.25, 0.5, 10, 20, 30, 40)
ONE = Profile((LAYER,), 1, device="a")


def stages(*triples):
    return tuple(Stage(start, stop, ranks) for start, stop, ranks in triples)


PLANS = [
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
    (lambda: A.Plan(stages((0, 3, (0,))), routing="splitt"), r"routing: .*found 'splitt'. Did you mean 'split'\?"),
    (lambda: Plan(stages((0, 3, (0,))), "1f1b-flsh"), "schedule: .*found '1f1b-flsh'. Did you mean"),
    (lambda: Plan(stages((0, 3, (0,))), microbatches=0), "microbatches: expected a whole number from 1 to 65536"),
    (lambda: Plan.uniform(10**7, 10**7), "stages: expected a whole number from 1 to 65536"),
    (lambda: A.Plan(stages((0, 3, (0,))), microbatch_size=2.5), "microbatch_size: expected a whole number"),
    (lambda: A.Plan(stages((0, 3, (0,))), recompute=1), "recompute: expected True or False, or the numbers of the"),
    (lambda: Plan.uniform(3, 3, recompute=(0, 3)), "recompute: expected stages 0 to 2, found 3"),
    (lambda: Prediction(1.0, math.nan, 1.0, (), 0.0), "samples_per_second: expected a number, 0 or more, found"),
    (
        lambda: Plan(stages((0, 3, (0,))), predicted=Prediction(1, 1, 1, (1, 2), 0)),
        r"predicted.peak_bytes: expected 1 numbers \(one per rank\), found 2",
    ),
    (lambda: Plan.uniform(3, 4), "cannot cut 3 layers into 4 stages"),
    (lambda: Plan.uniform(8, 4, "interleaved", stages_per_rank=3), "stages_per_rank: expected a divisor of 4"),
    (
        lambda: Plan(stages((0, 2, (1,)), (2, 3, (0,))), devices=(0,)),
        r"devices: expected 2 different devices \(one per",
    ),
    (lambda: Plan(stages((0, 2, (1,)), (2, 3, (0,))), devices=(0, 0)), "devices: expected 2 different devices"),
    (lambda: Plan(stages((0, 2, (1,)), (2, 3, (0,))), devices=(0, 1, 2)), "devices: expected 2 different devices"),
    (lambda: Plan.uniform(2, 2).used(Cluster.uniform(1, 1e9)), "2 ranks and the cluster 1 device"),
    (lambda: Plan.balanced([1] * 6, 2, speeds=[1, 1, 1]), r"speeds: expected 2 \(one per rank\), found 3"),
    (lambda: Plan.balanced([1.0, 1.0], 3), "cannot cut 2 layers into 3 stages"),
    *(
        (lambda weight=weight: Plan.balanced([1.0, weight], 2), r"weights\[1\]: expected a finite number, 0 or more")
        for weight in (-1.0, math.inf, math.nan, "1", True)
    ),
    (lambda: Plan.uniform(4, 2).save("nowhere/plan.yaml"), "cannot be written"),
    (lambda: Cluster.uniform(0, 1e9), r"levels\[0\].count: expected a whole number, 1 or more, found 0"),
    (lambda: Cluster.uniform(2, 0), r"levels\[0\].bytes_per_second: expected a number above 1e-30, found 0"),
    (lambda: Cluster.uniform(2, math.nan), r"bytes_per_second: expected a number above 1e-30, found nan"),
    (lambda: Cluster.hierarchical([]), "levels: expected one level or more"),
    (lambda: Cluster.uniform(2, 1e9, -1), r"memory_bytes: expected a number above 0, 1e\+30 or less, found -1"),
    (lambda: Cluster.from_matrix([[1, 2], [3]]), r"matrix\[1\]: expected 2 numbers \(one per device\), found 1"),
    (lambda: Cluster.from_matrix([[1, -2], [3, 1]]), r"matrix\[0\]\[1\]: expected a number above 1e-30, found -2"),
    (lambda: Cluster.uniform(2, 1, None, -1), r"levels\[0\].latency_seconds: expected a number from 0 to"),
    (lambda: Cluster.uniform(2, 1, None, math.inf), r"levels\[0\].latency_seconds: expected a number .* found inf"),
    (lambda: Cluster.hierarchical([(2, 1)] * 2, None, [1]), r"expected 2 numbers \(one per level\), found 1"),
    (lambda: Cluster.from_matrix([[1, 1]] * 2, None, [[0, 0]]), "latency_seconds: expected 2 rows"),
    (lambda: Cluster.from_matrix([[1, 1]] * 2, None, [[0, -1], [0, 0]]), r"latency_seconds\[0\]\[1\]: .* found -1"),
    (lambda: Cluster.uniform(2, 1e9).latency(-1, 0), "rank -1 is not in this cluster: expected 0 to 1"),
    (lambda: Cluster.uniform(2, 1e9).bandwidth(0, 2), "rank 2 is not in this cluster: expected 0 to 1"),
    (lambda: Cluster.from_matrix([[1, 1], [1, 1]]).levels, "have no levels: use bandwidth"),
    (lambda: Cluster.uniform(2, 1e9).pick((1, 1)), "each once"),
    (lambda: replace(Cluster.uniform(2, 1e9), host_bandwidth=0), "host_bandwidth: expected a number above 0"),
    (lambda: Transformer(0, 8, 2), "^layers: expected"),
    (lambda: Transformer(2, 9, 2), "^heads: expected"),
    (lambda: A.Transformer(2, 8, 2.0), "^heads: expected"),
    (lambda: Transformer(True, 8, 2), "^layers: expected"),
    (lambda: Transformer(2, 8, 2, 0), "^sequence: expected"),
    (lambda: Transformer(2, 8, 2, 4, -1), "^vocabulary: expected"),
    (lambda: Transformer(2, 8, 2).training_days(1e9, 0, 1e12), "^devices: expected"),
]
PROFILES = [
    (lambda: LayerProfile("a", -1.0, 0, 0, 0, 0), "forward_seconds: expected a number of sec"),
    (lambda: LayerProfile("a", 0, math.nan, 0, 0, 0), "backward_seconds: .*found nan in layer 'a'"),
    (lambda: LayerProfile("a", 0, 0, math.inf, 0, 0), "cut_bytes: expected a number of bytes .*found inf"),
    (lambda: A.LayerProfile("a", 0, 0, 0, "20", 0), "saved_bytes: .*found '20'"),
    (lambda: LayerProfile("a", 0, 0, 0, 0, True), "parameter_bytes: .*found True"),
    (lambda: A.LayerProfile(3, 0, 0, 0, 0, 0), "name: expected text, found 3"),
    (lambda: Profile((), 1), "layers: expected one layer or more"),
    (lambda: A.Profile((LAYER, 3), 1), r"layers\[1\]: expected a LayerProfile, found 3"),
    (lambda: Profile((LAYER,), 0), "microbatch_size: expected a whole number of samples, 1 or more, found 0"),
    (lambda: A.Profile((LAYER,), 2.5), "microbatch_size: .*found 2.5"),
    (lambda: Profile((LAYER,), 2, split_share=-0.1), "split_share: expected a number from 0 to"),
    (lambda: Profile((LAYER,), 2, library_bytes=-1), "library_bytes: expected a number from 0 to"),
    (lambda: Profile((LAYER,), 2, fragmentation=0.9), "fragmentation: expected a number from 1 to .*, found 0.9"),
    (
        lambda: replace(LAYER, weight_seconds=3.0),
        "weight_seconds: expected at most backward_seconds = 0.5, .*found 3.0",
    ),
    (lambda: replace(LAYER, weight_seconds=-1.0), "weight_seconds: expected a number of seconds from 0 to"),
    (lambda: replace(LAYER, wire_bytes=11), r"wire_bytes: expected at most cut_bytes = 10, .*found 11"),
    (
        lambda: Profile((LAYER,) * 2, 8, crossings=(Crossing("", 0, (1,), 6, -1),)),
        r"crossings.0.: wire_bytes: expected",
    ),
    (lambda: ONE.with_wire_share(2), "share: expected a number from 0 to 1, found 2"),
    (lambda: ONE.joined(Profile((LAYER, LAYER), 1, device="b")), "expected the layers of the profile of 'a'"),
    (lambda: ONE.joined(Profile((LAYER,), 2, device="b")), "expected microbatches of 1 sample, as on 'a', found 2"),
    (lambda: ONE.joined(ONE), "expected another device than 'a', found 'a'"),
    (lambda: Profile.load("nowhere/profile.json"), "no such file"),
    (lambda: Profile.load("."), "cannot be read"),
]


@pytest.mark.parametrize(("make", "message"), PLANS)
def test_no_plan_no_cluster_and_no_shape(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize(("make", "message"), PROFILES)
def test_no_profile(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        make()


PLAN, CLUSTER, SWEEP = (f"format: penstock-{kind}/1\n" for kind in ("plan", "cluster", "sweep"))
COSTS = CLUSTER + "matrix: [[0, 1], [1, 0]]\n"
LEVELS = CLUSTER + "levels: [{count: 2, bytes_per_second: 1}]\n"


def kinds(row: str) -> str:
    return f"{CLUSTER}kinds:\n{row}\nlevels:\n- {{count: 3, bytes_per_second: 1000000000.0}}\n"


def sweep(*rows: str) -> str:
    return SWEEP + "clusters:\n" + "\n".join(rows)


def broken(**changes):
    """The text of a profile of two layers, with changes to its second layer; None removes a key."""
    layer = {"name": "a", "forward_seconds": 1, "backward_seconds": 1, "cut_bytes": 1, "saved_bytes": 1}
    layer = {**layer, "parameter_bytes": 1}
    changed = {key: value for key, value in {**layer, **changes}.items() if value is not None}
    return json.dumps({"format": "penstock-profile/1", "microbatch_size": 4, "layers": [layer, changed]})


def node(key, text, size="1.0", times="1.0, backward_compute_time=2.0"):
    return f"{key} -- {text} -- forward_compute_time={times}, activation_size={size}, parameter_size=4.0"


def lines(*rows: str) -> str:
    return "\n".join(rows)


PLAN_FILES = [
    ("", "format: expected 'penstock-plan/1', found nothing"),
    ("format: penstock-plan/2", "format: expected 'penstock-plan/1', found 'penstock-plan/2'"),
    (PLAN, "the key 'stages' is missing"),
    (PLAN + "stages: 3", "stages: expected a list, found 3"),
    (PLAN + "stages: [3]", r"stages\[0\]: expected a mapping with the keys start, stop, ranks, found 3"),
    (
        PLAN + "stages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 2, end: 4, ranks: [1]}",
        r"stages\[1\]: unknown key 'end'",
    ),
    (
        PLAN + "stages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 2, stop: 4, ranks: [x]}",
        r"stages\[1\].ranks\[0\]: expected a whole number, found 'x'",
    ),
    (
        PLAN + "stages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 2, stop: 2, ranks: [1]}",
        r"stages\[1\].stop: expected more than start = 2, found 2",
    ),
    (
        PLAN + "stages:\n- {start: 0, stop: 2, ranks: [0]}\n- {start: 3, stop: 4, ranks: [1]}",
        r"stages\[1\].start: expected 2 ",
    ),
    (PLAN + "schedule: pipedraem\nstages: [{start: 0, stop: 2, ranks: [0]}]", "schedule: .*Did you mean"),
    (PLAN + "microbatch: 2\nstages: [{start: 0, stop: 2, ranks: [0]}]", "unknown key 'microbatch'.*microbatches"),
    (PLAN + "vertical_sync: 1\nstages: [{start: 0, stop: 2, ranks: [0]}]", "vertical_sync: expected true or false"),
    (PLAN + "predicted: {}\nstages: [{start: 0, stop: 2, ranks: [0]}]", "predicted: the key 'minibatch_seconds'"),
    (PLAN + "stages: [\n", "line 3, column 1: not YAML"),
    (PLAN + "microbatches: 8:30\nstages: [{start: 0, stop: 2, ranks: [0]}]", "microbatches: expected a whole"),
    (PLAN + "microbatches: 010\nstages: [{start: 0, stop: 2, ranks: [0]}]", "microbatches: expected a whole"),
    (PLAN + "layers: 4\nstages:\n- {start: 0, stop: 2, ranks: [0]}\n", "layers: expected 2, where the last of the"),
]
CLUSTER_FILES = [
    ("levels: []", "format: expected 'penstock-cluster/1', found nothing"),
    (CLUSTER, "expected either `levels` or `matrix`, found neither"),
    (CLUSTER + "level: []", r"unknown key 'level'.*Did you mean 'levels'\?"),
    (CLUSTER + "levels: [{count: 2}]", r"levels\[0\]: the key 'bytes_per_second' is missing"),
    (CLUSTER + "levels: [{count: two, bytes_per_second: 1e9}]", r"levels\[0\].count: expected a whole number, found"),
    (CLUSTER + "levels: [{count: 2, bytes_per_second: -1e9}]", r"levels\[0\].bytes_per_second: expected .* found -1"),
    (CLUSTER + "levels: [{count: 2, bytes_per_second: 1e-320}]", r"levels\[0\].bytes_per_second: expected .* found"),
    (CLUSTER + "action_seconds: 1e308\nlevels: [{count: 2, bytes_per_second: 1}]", r"file: action_seconds: .* 1e\+30"),
    (CLUSTER + "levels: {count: 2}", "levels: expected a list"),
    (CLUSTER + "levels: []", "levels: expected one level or more, found none"),
    (
        CLUSTER + "levels: [{count: 2, bytes_per_second: 1, latency_seconds: -1}]",
        r"levels\[0\].latency_seconds: expected a number from 0 to 1e\+30, found -1",
    ),
    (CLUSTER + "levels: [{count: 2, bytes_per_second: 1}]\nlatency_seconds: 1e-6", "latency_seconds: expected no"),
    (CLUSTER + "matrix: [[1, 1], [1, 1]]\nlatency_seconds: [[0, 1]]", "latency_seconds: expected 2 rows"),
    (CLUSTER + "devices: 8\nlevels:\n- {count: 2, bytes_per_second: 1}", "devices: expected 2, .*, found 8: if"),
    (CLUSTER + "levels:\n- {count: 1:30, bytes_per_second: 1}", r"count: expected a whole number, found '1:30'"),
    (CLUSTER + "matrix: [[1, 1], [1, 1]]\nlatency_seconds: soon", "latency_seconds: expected a number, found 'soon'"),
    (CLUSTER + "levels: [{count: 2", "line 2, column 20: not YAML|not YAML"),
    (CLUSTER + "levels: []\nlevels: []", "line 3: the key 'levels' is written twice"),
    (COSTS + "message_seconds: [[0, 1]]\n", "message_seconds: expected 2 rows of 2 numbers"),
    (
        COSTS + "message_seconds: -1\n",
        r"seconds: expected a number from 0 to 1e\+30, found -1 in the costs of a message",
    ),
    (COSTS + "message_blocking: 2\n", "blocking: expected a number from 0 to 1, found 2 in the costs of a message"),
    (LEVELS + "message_seconds: 1\n", "write message_seconds inside each level"),
    (LEVELS + "action_seconds: -1\n", "action_seconds: expected"),
    (kinds("- {devices: 2, name: a}"), r"kinds: expected 3 \(one per device\), found 2"),
    (kinds("- {devices: 0, name: a}"), r"kinds\[0\].devices: expected 1 or more devices, found 0"),
    (kinds("- {devices: 3, speed: 0}"), r"kinds\[0\].speed: expected a number above 1e-30, .*found 0"),
    (kinds("- {devices: 3, pace: 2}"), r"kinds\[0\]: unknown key 'pace'"),
    (kinds("- {name: a}"), r"kinds\[0\]: the key 'devices' is missing"),
    (kinds("- {devices: 3, price_per_hour: -1}"), r"kinds\[0\].price_per_hour: expected a number from 0 to .*found -1"),
]
PROFILE_FILES = [
    ("{}", "format: expected 'penstock-profile/1', found nothing"),
    ('{"format":\n  penstock}', "line 2, column 3: not JSON: Expecting value"),
    ('{"format": "penstock-profile/1", "format": "x"}', "the key 'format' is written twice"),
    ('{"format": "penstock-profile/1", "layers": []}', "the key 'microbatch_size' is missing"),
    (broken(cut_byte=3), r"layers\[1\]: unknown key 'cut_byte'.*Did you mean 'cut_bytes'\?"),
    (broken(cut_bytes=None), r"layers\[1\]: the key 'cut_bytes' is missing"),
    (broken(cut_bytes="3"), r"layers\[1\].cut_bytes: expected a number, found '3'"),
    (broken(cut_bytes=-3), r"layers\[1\].cut_bytes: expected a number of bytes from 0 to 1e\+30, found -3"),
    (broken(cut_bytes=1e308), r"layers\[1\].cut_bytes: expected .* to 1e\+30, found 1e\+308"),
    (broken(cut_bytes=math.nan), r"layers\[1\].cut_bytes: expected .*found nan"),
    (broken(name=7), r"layers\[1\].name: expected text, found 7"),
    (broken().replace("4", "4.5"), "microbatch_size: expected a whole number, found 4.5"),
    (broken().replace("4", "0"), "microbatch_size: expected a whole number of samples, 1 or more, found 0"),
]
SWEEPS = [
    (sweep("  []"), "clusters: expected one cluster or more"),
    (sweep("- {devices: 3}"), r"clusters\[0\]: the key 'bytes_per_second' is missing"),
    (sweep("- {devices: 0, bytes_per_second: 1e9}"), r"clusters\[0\].levels\[0\].count: expected a whole number"),
    (sweep(*["- {devices: 2, bytes_per_second: 1e9}"] * 2), r"clusters\[1\]: expected an op"),
]
GRAPHS = [
    (lines("node1 -- Linear"), "line 1: expected `node4 -- description"),
    (lines(node("node1", "Linear", size="big")), r"line 1: activation_size: .*list like .*found 'big'"),
    (lines(node("node1", "Linear", size="-4")), "line 1: activation_size: expected a number from 0 to"),
    (lines(node("node1", "Linear").replace("parameter_size", "weights")), "line 1: parameter_size is missing"),
    (lines(node("node1", "Linear", times="[1;2], backward_compute_time=1")), "forward_compute_time: expected one"),
    (lines(node("node1", "A"), node("node1", "B")), "line 2: node1 stands in the file twice"),
    (lines(node("node1", "A"), "\tnode1 -- node2"), "the edge node1 -- node2 names node2, which has no line"),
    (lines(node("node1", "A"), "\tnode1"), "line 2: expected an edge"),
    (lines(node("node1", "Input")), "expected one node or more beside inputs"),
    (lines(node("a", "A"), node("b", "B"), "\ta -- b", "\tb -- a"), "expected a graph without cycles"),
]
READERS: list[tuple[Callable[[Any], object], Any, list[tuple[str, str]]]] = [
    (Plan.load, PlanError, PLAN_FILES),
    (Cluster.load, PlanError, CLUSTER_FILES),
    (Profile.load, ProfileError, PROFILE_FILES),
    (load_sweep, PlanError, SWEEPS),
    (Profile.from_pipedream, ProfileError, GRAPHS),
]
FILES = [(load, error, *row) for load, error, rows in READERS for row in rows]


@pytest.mark.parametrize(("load", "error", "text", "message"), FILES)
def test_a_wrong_file_names_itself_the_field_and_the_fix(
    tmp_path: Path, load: Callable[[Any], object], error: Any, text: str, message: str
) -> None:
    path = tmp_path / "file"
    path.write_text(text)

    with pytest.raises(error, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count(str(path)) == 1
