"""``penstock plan``: kinds of devices, sweeps over clusters, and shapes of transformers."""

import json

from penstock.cli import main
from penstock.values import Cluster, DeviceKind, LayerProfile, Plan, Profile, Transformer

PROFILE = Profile(tuple(LayerProfile(f"h.{k}", 1.0, 2.0, 1.0, 1.0, 1.0) for k in range(6)), 12, device="fast")


def test_a_plan_for_devices_that_differ(tmp_path, capsys):
    PROFILE.save(tmp_path / "fast.json")
    slow = Profile(tuple(LayerProfile(f"h.{k}", 2.0, 4.0, 1.0, 1.0, 1.0) for k in range(6)), 12, device="slow")
    slow.save(tmp_path / "slow.json")
    Cluster.uniform(2, 1e9).with_kinds([DeviceKind("slow"), DeviceKind("fast")]).save(tmp_path / "cluster.yaml")
    files = [str(tmp_path / name) for name in ("fast.json", "cluster.yaml", "slow.json", "plan.yaml")]

    done = main(["plan", *files[:2], "--profile", files[2], "--schedule", "1f1b-flush", "--straight", "-o", files[3]])

    assert done == 0
    assert {stage.ranks: stage.stop - stage.start for stage in Plan.load(files[3]).stages} == {(0,): 2, (1,): 4}
    assert "1 x slow" in capsys.readouterr().out
    assert main(["show", files[1]]) == 0
    assert "rank 0: slow" in capsys.readouterr().out


def test_stale_weights_and_faster_ways_are_said_first(tmp_path, capsys):
    PROFILE.save(tmp_path / "fast.json")
    command = ["plan", str(tmp_path / "fast.json"), "--devices", "2", "--straight", "-o", str(tmp_path / "plan.yaml")]

    assert main(command) == 0
    assert capsys.readouterr().out.startswith("Training without a pipeline is faster, by a formula: data parallel, ")
    assert Plan.load(tmp_path / "plan.yaml").definition.flushes
    assert main([*command, "--asynchronous"]) == 0
    assert "never flushes" in capsys.readouterr().out
    assert not Plan.load(tmp_path / "plan.yaml").definition.flushes


def test_a_sweep_is_a_table(tmp_path, capsys):
    PROFILE.save(tmp_path / "fast.json")
    sweep = tmp_path / "sweep.yaml"
    rows = "- {devices: [1, 2], bytes_per_second: 1e9, kind: A, price_per_hour: 3}\n"
    sweep.write_text(f"format: penstock-sweep/1\nclusters:\n{rows}")
    command = ["plan", str(tmp_path / "fast.json"), "--sweep", str(sweep), "--schedule", "1f1b-flush"]

    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split()[:2] == ["cluster", "devices"]
    assert "2 x A, 1 GB/s" in printed
    assert main([*command, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main([*command, "--devices", "2"]) == 1
    assert "--sweep and devices were given" in capsys.readouterr().err


def test_the_shape_of_a_transformer_is_planned(tmp_path, capsys):
    shape = tmp_path / "transformer.yaml"
    Transformer(4, 64, 4, 128, 1000).save(shape)
    options = ["--devices", "2", "--bandwidth", "12e9", "--batch-size", "8", "-o", str(tmp_path / "plan.yaml")]

    assert main(["plan", str(shape), *options]) == 0
    assert Plan.load(tmp_path / "plan.yaml").ranks <= 2
    assert main(["plan", str(shape), "--sweep", str(shape)]) == 1
    assert "found a transformer" in capsys.readouterr().err
