"""Every reader of a file names a file of another kind as what it is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.capturing.weight_files import read_index
from penstock.commands.files import load_sweep
from penstock.errors import PenstockError
from penstock.fleet import FleetFile, PriceHistory
from penstock.fleet.run_states import RunState
from penstock.runtime.checkpoints.manifests import FORMAT
from penstock.timelines import Timeline
from penstock.values import Cluster, LayerProfile, Plan, Profile
from penstock.values.documents import kind_of
from penstock.values.transformers import Transformer
from support.paths import ROOT

READERS: dict[str, Callable[[Path], object]] = {
    "a plan": Plan.load,
    "a profile": Profile.load,
    "a cluster": Cluster.load,
    "a transformer": Transformer.load,
    "a sweep": load_sweep,
    "a fleet": FleetFile.load,
    "a fleet-run": lambda path: RunState.load(path, ["job"]),
    "a trace": Timeline.load_trace,
    "a graph of PipeDream's profiler": Profile.from_pipedream,
    "prices over time": PriceHistory.load,
    "an index of weights": read_index,
}


def files(folder: Path) -> dict[str, Path]:
    """A file of each kind."""
    found = {kind: folder / f"{number}.file" for number, kind in enumerate([*READERS, "a checkpoint", "a Python file"])}
    Plan.uniform(4, 2).save(found["a plan"])
    Profile((LayerProfile("one", 1, 2, 3, 4, 5),), 2).save(found["a profile"])
    Cluster.uniform(2, 1e9).save(found["a cluster"])
    Transformer(2, 8, 1, 512, 1000, "small").save(found["a transformer"])
    Timeline((), 1).save_trace(found["a trace"])
    texts = {
        "a sweep": "format: penstock-sweep/1\nclusters:\n- devices: 2\n  bytes_per_second: 1e9\n",
        "a fleet": (ROOT / "examples" / "fleet" / "fleet.yaml").read_text(),
        "a fleet-run": '{"format": "penstock-fleet-run/2", "jobs": {}}',
        "a graph of PipeDream's profiler": "node1 -- Input0 -- forward_compute_time=0.0\n",
        "prices over time": "seconds,kind,price\n0,v100,1\n",
        "an index of weights": '{\n  "metadata": {},\n  "weight_map": {}\n}',
        "a checkpoint": f'{{\n "format": "{FORMAT}",\n "content": {{}}\n}}',
        "a Python file": "import torch\n\n\ndef make():\n    return 1\n",
    }
    for kind, text in texts.items():
        found[kind].write_text(text)
    return found


@pytest.mark.parametrize("expected", READERS)
def test_a_file_of_another_kind_is_named(expected: str, tmp_path: Path) -> None:
    for kind, path in files(tmp_path).items():
        assert kind_of(path.read_text()) == kind
        if kind != expected:
            with pytest.raises(PenstockError) as refused:
                READERS[expected](path)
            assert str(refused.value).startswith(f"{path}: ")
            assert f"found {kind}" in str(refused.value) or f"if {kind} is" in str(refused.value), str(refused.value)
