"""What `save_weights` writes, transformers loads, and it computes the same bits; and the way back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import penstock
from support.jobs.weight_jobs import (
    SAMPLE,
    TOKENS,
    Exported,
    build,
    class_of,
    export,
    load_and_train,
    make_pipeline,
    written,
)
from support.processes import Pool

KINDS = ["llama", "llama-tied", "gpt2", "bert"]
SHARDED = {"max_shard_size": "10KB"}


def assert_loads(kind: str, directory: Path, found: Exported) -> None:
    """That transformers loads what was exported, without a remark, and computes the same bits."""
    loaded, remarks = class_of(kind).from_pretrained(directory, output_loading_info=True)
    assert not any(remarks.values()), remarks
    state = loaded.state_dict()
    assert state.keys() == found.state.keys()
    assert all(torch.equal(tensor, found.state[name]) for name, tensor in state.items())
    assert torch.equal(loaded.eval()(input_ids=TOKENS).logits, found.logits)


def names_in(directory: Path) -> list[str]:
    """All names in all safetensors files, in their order."""
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found += list(opened.keys())
    return sorted(found)


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_an_export_and_we_load_its_own(tmp_path: Path, kind: str, sharded: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    options = SHARDED if sharded else {}
    plain = written(kind, source, **options)
    expected = export(make_pipeline(plain), tmp_path / "plain", **options)

    found = load_and_train(kind, source, target, {}, options, {})

    assert torch.equal(found.logits, expected.logits)
    assert_loads(kind, target, found)
    assert names_in(target) == names_in(source)
    assert (target / "config.json").read_text() == (source / "config.json").read_text()
    assert (target / "generation_config.json").exists() == (source / "generation_config.json").exists()
    if sharded:
        ours, theirs = (json.loads((each / "model.safetensors.index.json").read_text()) for each in (target, source))
        assert ours["metadata"] == theirs["metadata"]
        assert ours["weight_map"].keys() == theirs["weight_map"].keys()


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_processes_read_and_write_their_own_tensors(tmp_path: Path, kind: str, pool: Pool) -> None:
    source = tmp_path / "source"
    expected = export(make_pipeline(written(kind, source, **SHARDED)), tmp_path / "plain")

    for name, save in (("single", {}), ("sharded", SHARDED)):
        target = tmp_path / name
        results = pool.run(3, load_and_train, kind, source, target, {}, save, {"stages": 3})
        for found in results:
            assert torch.equal(found.logits, expected.logits)
            assert found.state.keys() == expected.state.keys()
            assert all(torch.equal(tensor, expected.state[name]) for name, tensor in found.state.items())
            assert found.warned == []
        assert all(len(found.held) < 12 for found in results)
        assert_loads(kind, target, results[0])
        assert names_in(target) == names_in(source)
