"""Files of cluster options: lists stand for one option each."""

from penstock.commands.files import load_sweep
from penstock.values import Cluster, DeviceKind

HEAD = "format: penstock-sweep/1\nclusters:\n"


def test_lists_are_all_pairs_and_files_are_read(tmp_path):
    own = Cluster.hierarchical([(2, 5e9), (2, 1e9)])
    own.save(tmp_path / "own.yaml")
    path = tmp_path / "sweep.yaml"
    path.write_text(
        HEAD
        + "- {devices: [4, 8], bytes_per_second: [1.25e9, 12.5e9], kind: B, speed: 0.5, price_per_hour: 2}\n"
        + "- {file: own.yaml}\n"
        + "- {devices: 3, bytes_per_second: 1e9, name: three, latency_seconds: 1e-5, memory_bytes: 8e9}\n"
    )

    found = load_sweep(path)

    kind = DeviceKind("B", speed=0.5, price_per_hour=2)
    assert found == {
        "4 x B, 1.25 GB/s": Cluster.uniform(4, 1.25e9).with_kinds(kind),
        "4 x B, 12.5 GB/s": Cluster.uniform(4, 12.5e9).with_kinds(kind),
        "8 x B, 1.25 GB/s": Cluster.uniform(8, 1.25e9).with_kinds(kind),
        "8 x B, 12.5 GB/s": Cluster.uniform(8, 12.5e9).with_kinds(kind),
        "own": own,
        "three": Cluster.uniform(3, 1e9, latency_seconds=1e-5).with_kinds(DeviceKind(memory_bytes=8e9)),
    }
