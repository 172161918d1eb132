"""A process that loads or writes weights has those of its stage resident, and one tensor more."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.fork_server import ForkServer
from support.paths import SCRIPTS
from support.scripts.loading_script import LAYERS, TENSOR_BYTES, build

SLACK_BYTES = TENSOR_BYTES // 2
"""Python objects and buffers of files. A second tensor would not fit in."""


@pytest.mark.slow
def test_a_process_holds_its_share_and_one_tensor(tmp_path: Path, fork_server: ForkServer) -> None:
    weights = {name: tensor.detach() for name, tensor in build().named_parameters()}
    names = list(weights)
    homes = {name: f"part-{names.index(name) // 4}.safetensors" for name in names}
    for file in set(homes.values()):
        save_file({name: weights[name] for name in names if homes[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))

    processes = fork_server.start_ranks([str(SCRIPTS / "loading_script.py"), str(tmp_path)], 4)
    outputs = [process.communicate() for process in processes]
    for output, errors in outputs:
        assert output, errors
        found = json.loads(output)
        assert found["own"] == LAYERS // 4 * TENSOR_BYTES
        assert found["own"] <= found["loading"] <= found["own"] + TENSOR_BYTES + SLACK_BYTES
        assert found["writing"] <= TENSOR_BYTES + SLACK_BYTES

    written = [load_file(path) for path in sorted((tmp_path / "written").glob("*.safetensors"))]
    assert len(written) == 4
    assert all(torch.equal(tensor, weights[name]) for part in written for name, tensor in part.items())
