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
        *files,
        overlap=False,
        overlap_reduce=False,
        allreduce="shared",
        shared_nic=True,
        update_seconds_per_byte=1e-9,
    )

    assert found["minibatch_seconds"] == outcome.minibatch_seconds > evaluate(*files).minibatch_seconds
    assert found["limit"] == outcome.limit
