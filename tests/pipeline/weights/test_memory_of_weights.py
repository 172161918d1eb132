"""A process that loads, trains or writes weights has those of its stage resident, and one tensor more."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import memory_of_weights
from support.processes import Pool

RANKS = 2
SLACK = 3_000_000
"""Bytes: Python objects, buffers of files, activations. A second large tensor would not fit in."""


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_from_the_hub_to_the_hub_no_process_holds_more_than_its_share_and_one_tensor(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What the benchmark does with 2 GB: ten shards, processes, a step, and transformers loads what was written.

    The processes are new: in memory that earlier jobs have freed weights would not show.
    """
    source, target, report = tmp_path / "source", tmp_path / "target", tmp_path / "report.json"
    source.mkdir()
    memory_of_weights.write_shards("small", source)

    imported = (
        "torch._dynamo",
        "torch.export._trace",
        "penstock.capturing.export.exported",
        "penstock.pipeline",
        "memory_of_weights",
    )
    pool = Pool(RANKS, request.config.getoption("pool_seconds"), imported)
    try:
        pool.run(RANKS, memory_of_weights.work, "small", source, target, report)
    finally:
        pool.close()

    assert len(list(source.glob("*.safetensors"))) == memory_of_weights.SHARDS
    rows = json.loads(report.read_text())
    assert len(rows) == RANKS
    whole = sum(row["weights"] for row in rows)
    for row in rows:
        assert whole / 4 < row["weights"] < whole * 3 / 4
        assert row["tensor"] > SLACK
        assert row["loading"] <= row["weights"] + row["tensor"] + SLACK
        # It was measured: the weights are there.
        assert row["weights"] <= row["loading"]
        assert row["writing"] <= row["tensor"] + SLACK
        # Gradients, and the one of a microbatch before it is added to the sum.
        assert row["training"] <= row["weights"] + 2 * row["tensor"] + SLACK
    assert memory_of_weights.same_bits(target)
    assert changed(source, target)


def changed(source: Path, target: Path) -> bool:
    """Whether the embedding in `target` is another one than in `source`: what was written was trained."""
    return not torch.equal(embedding(source), embedding(target))


def embedding(folder: Path) -> torch.Tensor:
    name = "model.embed_tokens.weight"
    home = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(folder / home, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor
