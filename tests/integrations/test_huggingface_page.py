"""The code in docs/huggingface.md and docs/weights.md runs."""

import importlib.util
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import penstock
from support.jobs.trainer_jobs import collate, make_model, rows
from support.paths import ROOT
from support.processes import Pool

pytestmark = pytest.mark.slow


PAGE = (ROOT / "docs" / "huggingface.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def names(folder: Path) -> dict[str, Any]:
    """What the code on the page takes for granted."""
    sentences = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": sentences, "labels": sentences}
    profile = penstock.Profile((penstock.LayerProfile("blocks", 1e-3, 2e-3, 0, 0, 0),), microbatch_size=1)
    padding = torch.arange(8) > torch.arange(4)[:, None] + 3
    batches: Any = [batch, batch]
    quiet = {"use_cpu": True, "dataloader_pin_memory": False, "report_to": [], "disable_tqdm": True, "max_steps": 1}
    return {
        "torch": torch,
        "penstock": penstock,
        "TrainingArguments": transformers.TrainingArguments,
        "model": make_model(),
        "batch": batch,
        "batches": batches,
        "loader": torch.utils.data.DataLoader(batches, batch_size=None),
        "padded": {**batch, "labels": sentences.masked_fill(padding, -100)},
        "short": {name: tensor[:2, :4] for name, tensor in batch.items()},
        "long": {name: tensor[2:] for name, tensor in batch.items()},
        "texts": [text[: 3 + place] for place, text in enumerate(sentences)],
        "short_profile": profile,
        "long_profile": profile,
        "dataset": rows(8),
        "collate": collate,
        "folder": str(folder),
        "more": quiet,
    }


def fit_by_lightning(folder: Path) -> tuple[dict[str, float], dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """The metrics and the weights after the page's training by Lightning; then the loss of the validation and the
    weights after the same steps by a loop. From a pipeline each, in this process or in those of the pool.
    """
    # It takes seconds, and need not be installed.
    given = {**names(folder), "lightning": import_module("lightning")}
    exec(BLOCKS[0], given)
    exec(BLOCKS[-1], given)
    pipe: penstock.Pipeline = given["pipe"]
    metrics = {name: float(value) for name, value in given["trainer"].callback_metrics.items()}
    trained = pipe.full_state_dict(rank=None)
    pipe.close()

    by_hand = {**names(folder)}
    exec(BLOCKS[0], by_hand)
    loop: penstock.Pipeline = by_hand["pipe"]
    for batch in by_hand["loader"]:
        loop.step(batch)
    loss = float(loop.evaluate(by_hand["batch"]).loss)
    expected = loop.full_state_dict(rank=None)
    loop.close()
    if dist.is_initialized():
        dist.barrier()
    return metrics, trained, loss, expected


def test_python_in_the_page_runs(tmp_path: Path) -> None:
    given = names(tmp_path / "run")
    for block in BLOCKS[:-1]:
        exec(block, given)

    assert len(BLOCKS) == 6
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT calls it
def test_weights_go_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model().save_pretrained(tmp_path / "hub")
    given = names(tmp_path / "hub")
    for block in re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "weights.md").read_text(), flags=re.MULTILINE | re.DOTALL
    ):
        if "bnb" not in block or importlib.util.find_spec("bitsandbytes") is not None:
            exec(block, given)

    assert (tmp_path / "finetuned" / "model.safetensors").exists()


# Lightning advises about loggers and workers, and uses names of old of PyTorch.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")
@pytest.mark.parametrize("processes", [1, 2])
def test_lightning_trains_as_a_loop_does(tmp_path: Path, processes: int, request: pytest.FixtureRequest) -> None:
    if processes == 1:
        results = [fit_by_lightning(tmp_path / "run")]
    else:
        pool: Pool = request.getfixturevalue("pool")
        results = pool.run(processes, fit_by_lightning, tmp_path / "run")

    for metrics, trained, loss, expected in results:
        assert metrics["validation_loss"] == pytest.approx(loss, rel=1e-6)  # Lightning averages in float32
        assert trained.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in trained.items())
    assert (tmp_path / "run").exists()
