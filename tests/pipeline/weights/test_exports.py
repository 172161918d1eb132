"""What `save_weights` writes, transformers loads, and it computes the same bits; and the way back."""

import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, PenstockError
from penstock.runtime.files.file_locks import FileLock
from support import models
from support.jobs.weight_jobs import (
    TOKENS,
    Exported,
    build,
    class_of,
    export,
    export_lora,
    fail_to_write,
    gather_sparse,
    load_and_train,
    lora,
    make_pipeline,
    sparse_pipeline,
    written,
)
from support.processes import Pool

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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "sharded"), [("llama", False), ("llama-tied", True), ("gpt2", True), ("bert", False)])
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "save"), [("llama", {}), ("llama-tied", SHARDED)], ids=["single", "sharded"])
def test_processes_read_and_write_their_own_tensors(
    tmp_path: Path, kind: str, save: dict[str, str], pool: Pool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    expected = export(make_pipeline(written(kind, source, **SHARDED)), tmp_path / "plain")

    results = pool.run(3, load_and_train, kind, source, target, {}, save, {"stages": 3})

    for found in results:
        assert torch.equal(found.logits, expected.logits)
        assert found.state.keys() == expected.state.keys()
        assert all(torch.equal(tensor, expected.state[name]) for name, tensor in found.state.items())
        assert found.warned == []
        assert len(found.held) < 12
    assert_loads(kind, target, results[0])
    assert names_in(target) == names_in(source)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        ((penstock.Stage(0, 2, (0, 1)), penstock.Stage(2, 4, (2,))), "1f1b-flush"),
        ((penstock.Stage(0, 1, (0,)), penstock.Stage(1, 3, (1,)), penstock.Stage(3, 4, (2,))), "pipedream"),
    ],
    ids=["replicas", "versions"],
)
def test_a_tensor_is_written_once(
    tmp_path: Path, pool: Pool, stages: tuple[penstock.Stage, ...], schedule: str
) -> None:
    """By the first of the processes that hold it, in its newest version. And rank 0 warns of what the model has not."""
    written("llama", tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    save_file({**load_file(file), "extra": torch.zeros(1)}, file, metadata={"format": "pt"})
    options = {"plan": penstock.Plan(stages, schedule=schedule, microbatches=2), "stages": None, "microbatches": None}
    target = tmp_path / "target"

    results = pool.run(3, load_and_train, "llama", tmp_path / "source", target, {}, SHARDED, options)

    assert_loads("llama", target, results[0])
    assert ["extra", *names_in(target)] == names_in(tmp_path / "source")
    (warned,) = results[0].warned
    assert "which are not read: extra. If" in warned
    assert results[1].warned == results[2].warned == []


@pytest.mark.parametrize("rank", [None, 0])
def test_sparse_buffers_are_gathered_as_they_are(pool: Pool, rank: int | None) -> None:
    for found in pool.run(2, gather_sparse, rank)[: 2 if rank is None else 1]:
        assert [layout for layout, _ in found] == [torch.sparse_coo] * 2
        assert all(torch.equal(edges, torch.eye(4).roll(1, 0)) for _, edges in found)


def test_sparse_buffers_are_in_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"save_weights: 0\.edges has the layout torch\.sparse_coo"):
        sparse_pipeline().save_weights(tmp_path)


def test_values_take_the_type_that_is_asked_for(tmp_path: Path) -> None:
    pipe = make_pipeline(build("llama-tied"))
    pipe.save_weights(tmp_path, dtype=torch.bfloat16)
    loaded = class_of("llama-tied").from_pretrained(tmp_path)

    assert loaded.dtype == torch.bfloat16
    state = pipe.full_state_dict()
    assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in loaded.state_dict().items())


def test_other_models_are_written_under_the_names_of_their_state_dict(tmp_path: Path) -> None:
    """Without configurations; what the pipeline goes on to train does not change what was gathered."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    x, target = torch.randn(8, 4, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    pipe = penstock.Pipeline(model, (x[:4],), nn.functional.cross_entropy, models.adamw, microbatches=2, stages=3)
    gathered = pipe.full_state_dict()
    kept = {name: tensor.clone() for name, tensor in gathered.items()}
    pipe.step(x, target)
    pipe.save_weights(tmp_path)

    assert all(torch.equal(tensor, kept[name]) for name, tensor in gathered.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())


def test_weights_of_before_are_replaced_and_other_files_stay(tmp_path: Path) -> None:
    pipe = make_pipeline(build("llama"))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-of-mine.safetensors").write_text("not one of ours")
    files = []
    for options in (SHARDED, {}, {"max_shard_size": 20_000}):
        pipe.save_weights(tmp_path, **options)
        files.append({path.name for path in tmp_path.iterdir()})

    rest = {"tokenizer.json", "model-of-mine.safetensors", "config.json", "generation_config.json"}
    assert [len(names - rest) for names in files] == [8, 1, 4]
    assert files[1] - rest == {"model.safetensors"}
    class_of("llama").from_pretrained(tmp_path)


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    pipe = make_pipeline(build("llama"))

    for size in ("5 gigabytes", "0", "-1GB", ""):
        with pytest.raises(PenstockError, match=r"max_shard_size= is .*: expected bytes, 5000000000, or a text"):
            pipe.save_weights(tmp_path, max_shard_size=size)
    with pytest.raises(PenstockError, match=r"rank=.*: expected a whole number from 0 to 0, found 1"):
        pipe.full_state_dict(rank=1)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="expected a directory or nothing, found a file"):
        pipe.save_weights(tmp_path / "file")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_ends_the_export_and_not_the_training(tmp_path: Path, pool: Pool, rank: int) -> None:
    (tmp_path / "model.safetensors").write_text("of before")
    results = pool.run(2, fail_to_write, tmp_path, rank)

    (first, loss, files), (second, other, _) = results
    assert first == second
    assert re.fullmatch(
        rf"CheckpointError: rank {rank}: \S+\.safetensors: .*File too large\. Free space or .*go on", first
    )
    assert loss == other > 0
    assert "model.safetensors.index.json" in files and "model.safetensors" not in files


def test_peft_loads_an_adapter(tmp_path: Path, pool: Pool) -> None:
    """And nothing else is in it: names and configuration are those of PEFT itself."""
    peft = pytest.importorskip("peft")
    lora().save_pretrained(tmp_path / "own")
    found = [export_lora(tmp_path / "alone", 2), *pool.run(2, export_lora, tmp_path / "two", 2)]

    for name in ("alone", "two"):
        directory = tmp_path / name
        assert sorted(path.name for path in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        assert names_in(directory) == names_in(tmp_path / "own")
        ours, theirs = (json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in (name, "own"))
        # It was a set.
        assert sorted(ours.pop("target_modules")) == sorted(theirs.pop("target_modules"))
        assert ours == theirs
        loaded = peft.PeftModel.from_pretrained(build("llama"), directory).eval()
        assert all(torch.equal(loaded(input_ids=TOKENS).logits, each.logits) for each in found)


def test_an_adapter_goes_over_a_model_from_files(tmp_path: Path) -> None:
    """As the docs show it: the base model from files, under the names that it has without PEFT."""
    pytest.importorskip("peft")
    plain = written("llama", tmp_path).eval()

    def make_adapter(name: str, tensor: Tensor) -> None:
        assert "lora_" in name
        tensor.zero_()

    names = {r"^base_model\.model\.": "", r"\.base_layer\.": "."}
    init_fn = penstock.load_weights(tmp_path, rename=names, missing=make_adapter)
    pipe = make_pipeline(lora("meta"), init_fn=init_fn)

    assert torch.equal(pipe.predict({"input_ids": TOKENS}).logits, plain(input_ids=TOKENS).logits)


def test_an_adapter_inside_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build("llama")
    # As its add_adapter does, which asks for a version of PEFT that is not published yet.
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)

    with pytest.raises(PenstockError, match=r"has adapters of its own \(add_adapter\)"):
        make_pipeline(model).save_weights(tmp_path)


def small_pipeline() -> penstock.Pipeline:
    return penstock.Pipeline(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.ones(1, 2),), torch.mean, models.plain
    )


def test_nothing_but_weights_is_removed(tmp_path: Path) -> None:
    """An index of another program may name any file."""
    for name in ("tokenizer.json", "notes.txt", "old.safetensors"):
        (tmp_path / name).write_text("mine")
    named = {"a": "tokenizer.json", "b": "notes.txt", "c": "old.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    small_pipeline().save_weights(tmp_path)

    assert (tmp_path / "tokenizer.json").read_text() == (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt", "tokenizer.json"]


@pytest.mark.parametrize("text", ['{"weight_map": {"a": 3}}', "[" * 100_000, '{"weight_map": {"a": "../b"}}', "{"])
def test_an_index_that_cannot_be_read_is_refused_before_weights_are_written(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        small_pipeline().save_weights(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors.index.json"]


@pytest.mark.parametrize(
    "place",
    [
        ".weights.partial/mine",
        ".weights.new/mine",
        ".weights.replaced.json",
        "model.safetensors/mine",
        "model.safetensors.index.json/mine",
        "model-00001-of-00002.safetensors/mine",
        ".weights.lock/mine",
    ],
)
def test_what_the_user_has_in_the_place_of_weights_stays(tmp_path: Path, place: str) -> None:
    """It is refused before the weights of before are removed."""
    mine = tmp_path / place
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    (tmp_path / "config.json").write_text("of before")
    name = place.partition("/")[0]
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: expected .*(Move it away|Remove it)"):
        small_pipeline().save_weights(tmp_path, max_shard_size=40)

    assert mine.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "config.json"])


def test_links_in_the_place_of_weights_are_replaced_and_what_they_name_stays(tmp_path: Path) -> None:
    """As the cache of a hub has them."""
    kept, target = tmp_path / "kept", tmp_path / "target"
    kept.write_text("of the cache")
    target.mkdir()
    (target / "model.safetensors").symlink_to(kept)
    small_pipeline().save_weights(target)

    assert kept.read_text() == "of the cache"
    assert load_file(target / "model.safetensors").keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert not (target / "model.safetensors").is_symlink()


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 40}], ids=["one file", "shards"])
@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("full", "File too large. Free space or give"),
        ("file/run", "Not a directory. Give"),
        ("/proc/run", "No such file or directory. Give"),
        ("x" * 300, "File name too long. Give"),
    ],
)
def test_what_cannot_be_written_is_the_error_of_save(
    tmp_path: Path, place: str, found: str, options: dict[str, Any]
) -> None:
    (tmp_path / "file").touch()
    pipe, before = small_pipeline(), resource.getrlimit(resource.RLIMIT_FSIZE)
    if place == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(CheckpointError) as error:
            pipe.save_weights(tmp_path / place, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert re.fullmatch(
        rf"/.*: expected to write or read it, found: {re.escape(found)} another directory;.*", str(error.value)
    )
    if place == "full":
        assert list((tmp_path / place).iterdir()) == []
        # The training goes on, and the next export is whole.
        pipe.save_weights(tmp_path / place, **options)
        assert (tmp_path / place / ("model.safetensors.index.json" if options else "model.safetensors")).is_file()


def test_one_process_at_a_time_writes_weights_to_a_directory(tmp_path: Path) -> None:
    pipe, lock = small_pipeline(), FileLock(tmp_path / ".weights.lock")
    lock.take()
    (tmp_path / ".weights.partial").mkdir()
    with pytest.raises(CheckpointError, match=rf"found process {os.getpid()} on host .*End that job"):
        pipe.save_weights(tmp_path)
    assert (tmp_path / ".weights.partial").is_dir()
    lock.close()
    # As an export leaves them that was killed.
    pipe.save_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
