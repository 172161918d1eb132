"""`penstock simulate`: what it prints beside the picture, and its options."""

import json

import pytest

from penstock.cli import main
from penstock.simulating import evaluate
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Plan((Stage(0, 2, (0, 1)), Stage(2, 4, (2, 3))), "1f1b-flush", 4)
    profile = Profile(tuple(LayerProfile(str(i), 1e-3, 2e-3, 3e6, 4e6, 5e6) for i in range(4)), 4)
    cluster = Cluster.hierarchical([(2, 12e9), (2, 1.25e9)], 16e9)
    plan.save("plan.yaml")
    profile.save("profile.json")
    cluster.save("cluster.yaml")
    return plan, profile, cluster


def test_simulate_says_how_long_a_minibatch_takes_and_what_limits_it(files, capsys):
    assert not main(["simulate", "plan.yaml", "profile.json", "cluster.yaml", "--html", "page.html"])
    out = capsys.readouterr().out
    outcome = evaluate(*files)

    assert f"limited by: {outcome.limit}\n" in out
    assert f"{outcome.samples_per_second:.4g} samples/s" in out
    # 10 MB of weights four times (gradients, Adam), 2 microbatches of 8 MB, and from 4 to 4.4 ms two messages of 3 MB.
    assert "peak memory: 52 MB on rank 0" in out
    assert out.endswith("wrote page.html\n")


def test_options_of_the_simulator_are_options_of_the_command(files, capsys):
    options = ["--no-overlap", "--no-overlap-reduce", "--allreduce", "shared", "--shared-nic"]
    options += ["--update-seconds-per-byte", "1e-9", "--json"]
    assert not main(["simulate", "plan.yaml", "profile.json", "cluster.yaml", *options])
    found = json.loads(capsys.readouterr().out)["outcome"]
    outcome = evaluate(
        *files, overlap=False, overlap_reduce=False, allreduce="shared", shared_nic=True, update_seconds_per_byte=1e-9
    )

    assert found["minibatch_seconds"] == outcome.minibatch_seconds > evaluate(*files).minibatch_seconds
    assert found["limit"] == outcome.limit


def test_devices_are_those_of_the_plan_or_more(files, capsys):
    for options in ([], ["--devices", "4"], ["--devices", "6"]):
        assert not main(["simulate", "plan.yaml", "profile.json", "--bandwidth", "10Gbps", *options, "--json"])
    first, *others = (json.loads(line) for line in _documents(capsys.readouterr().out))
    assert others == [first, first]

    assert main(["simulate", "plan.yaml", "profile.json", "--devices", "3"]) == 1
    assert "the plan has 4 ranks and the cluster 3 devices" in capsys.readouterr().err
    assert main(["simulate", "plan.yaml", "profile.json", "cluster.yaml", "--devices", "4"]) == 1
    assert "cluster.yaml and --devices were given: expected one of them" in capsys.readouterr().err


def _documents(text: str) -> list[str]:
    """The JSON documents that `text` consists of."""
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        _, end = decoder.raw_decode(text)
        found.append(text[:end])
        text = text[end:]
    return found


GRAPH = """node0 -- Input0 -- forward_compute_time=1, backward_compute_time=0, activation_size={size}, parameter_size=0
node1 -- Linear -- forward_compute_time=1, backward_compute_time=2, activation_size=8, parameter_size=4
node2 -- Linear -- forward_compute_time=1, backward_compute_time=2, activation_size=8, parameter_size=4
\tnode0 -- node1
\tnode1 -- node2
"""


@pytest.mark.parametrize(
    ("size", "options", "samples"),
    [
        (2 * 3 * 299 * 299 * 4, [], 2),
        (32 * 3 * 331 * 331 * 4, [], 32),
        (1000, [], 1),
        (1000, ["--graph-samples", "64"], 64),
        (2 * 3 * 224 * 224 * 4, ["--graph-samples", "3"], 3),
    ],
)
def test_a_graph_has_the_samples_of_its_images_or_those_that_are_given(files, capsys, size, options, samples):
    with open("graph.txt", "w") as file:
        file.write(GRAPH.format(size=size))
    Plan((Stage(0, 2, (0,)),), "1f1b-flush", 1).save("one.yaml")

    assert not main(["simulate", "one.yaml", "graph.txt", "--json", *options])
    found = json.loads(capsys.readouterr().out)["outcome"]
    assert found["samples_per_second"] == pytest.approx(samples / 6e-3)


def test_the_samples_of_a_graph_are_not_those_of_a_profile(files, capsys):
    assert main(["simulate", "plan.yaml", "profile.json", "--graph-samples", "3"]) == 1
    assert (
        "--graph-samples and profile.json: expected PipeDream's graph.txt, found a profile" in capsys.readouterr().err
    )
