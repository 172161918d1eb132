"""The code in docs/huggingface.md runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import penstock
from support.jobs.trainer_jobs import collate, make_model, rows
from support.paths import ROOT

PAGE = (ROOT / "docs" / "huggingface.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


pytestmark = pytest.mark.slow


def names(folder: Path) -> dict[str, Any]:
    """What the code on the page takes for granted."""
    sentences = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": sentences, "labels": sentences}
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
        "dataset": rows(8),
        "collate": collate,
        "folder": str(folder),
        "more": quiet,
    }


def test_python_in_the_page_runs(tmp_path: Path) -> None:
    given = names(tmp_path / "run")
    for block in BLOCKS[:-1]:
        exec(block, given)

    assert len(BLOCKS) == 5
    assert (tmp_path / "run" / "model.safetensors").exists()


# Lightning advises about loggers and workers, and uses names of old of PyTorch.
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    environment = pytest.importorskip("lightning.pytorch.plugins.environments").LightningEnvironment
    given = {**names(tmp_path / "run"), "lightning": lightning, "LightningEnvironment": environment}
    exec(BLOCKS[0], given)
    before = float(given["loss"])
    exec(BLOCKS[-1], given)

    assert given["trainer"].callback_metrics["validation_loss"] < before
    assert (tmp_path / "run").exists()
