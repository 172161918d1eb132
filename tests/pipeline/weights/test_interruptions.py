"""An export that is killed leaves the weights of before, the new ones, or none that look whole."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.capturing.weight_files import load_weights
from penstock.errors import CheckpointError
from support.fork_server import ForkServer, finish
from support.paths import SCRIPTS
from support.scripts.interrupted_export_script import make_pipeline


def weights_in(directory: Path) -> dict[str, Tensor] | None:
    """As a reader finds them; None if nothing says that there are any."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return None
    homes = json.loads(index.read_text())["weight_map"]
    return {name: load_file(directory / file)[name] for name, file in homes.items()}


@pytest.mark.slow
def test_a_kill_at_any_change_leaves_no_mixture(tmp_path: Path, fork_server: ForkServer) -> None:
    script = str(SCRIPTS / "interrupted_export_script.py")
    seen = []
    for number in count():
        directory = tmp_path / str(number)
        finish([fork_server.start([script, str(directory), str(number)], {})])
        found = weights_in(directory)
        seen.append("none" if found is None else "before" if not any(map(torch.any, found.values())) else "new")
        if found is not None:
            assert found.keys() == {"0.weight", "1.weight", "2.weight"}
            assert all(bool((tensor == next(iter(found.values()))).all()) for tensor in found.values())
        if seen[-1] == "none" and number % 2:
            # All that a reader needs is still there.
            with pytest.raises(CheckpointError, match="move the files of"):
                load_weights(directory)("0.weight", torch.zeros(4, 4))
            for path in (directory / ".weights.new").iterdir():
                path.rename(directory / path.name)
            found = weights_in(directory)
            assert found is not None and all(bool((tensor == 1).all()) for tensor in found.values())
        # The next export cleans up.
        make_pipeline().save_weights(directory)
        assert [path.name for path in directory.iterdir() if path.name != "model.safetensors"] == []
        if Path(f"{directory}.ended").exists():
            break

    assert seen == sorted(seen, key=["before", "none", "new"].index)
    assert set(seen) == {"before", "none", "new"}
