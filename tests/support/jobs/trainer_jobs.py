"""Trainings of a small Llama by the Trainer of transformers, plain and through a pipeline: in the test's process, and
in those of the pool.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

History = list[dict[str, float]]
"""What the Trainer logged, without times."""
KEPT = ("loss", "eval_loss", "eval_accuracy", "grad_norm", "learning_rate")


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows(count: int) -> list[dict[str, Tensor]]:
    """Sentences of different lengths, in a language whose next word often follows from the last one."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        first, length = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((0, 50), (4, 12)))
        made.append({"input_ids": (first + torch.arange(length) * 3) % 50})
    return made


def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pads the sentences of a microbatch to the longest of them."""
    longest = max(len(row["input_ids"]) for row in batch)
    words = torch.stack([F.pad(row["input_ids"], (0, longest - len(row["input_ids"]))) for row in batch])
    mask = torch.stack([torch.arange(longest) < len(row["input_ids"]) for row in batch])
    return {"input_ids": words, "attention_mask": mask.long(), "labels": words.masked_fill(~mask, -100)}


def arguments(folder: Path, **more: Any) -> transformers.TrainingArguments:
    """Ten updates in two epochs, of which the last in each has fewer samples than the others."""
    options = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_strategy": "steps",
        "save_steps": 5,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "report_to": [],
    }
    return transformers.TrainingArguments(str(folder), **{**options, **more})


def accuracy(found: transformers.EvalPrediction) -> dict[str, float]:
    """The share of next words that are the likeliest ones."""
    following = numpy.asarray(found.label_ids)[:, 1:]
    right = numpy.asarray(found.predictions).argmax(-1)[:, :-1] == following
    return {"accuracy": float(right.sum() / (following != -100).sum())}


def make_trainer(
    folder: Path, *, plain: bool = False, samples: int = 28, given: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """A Trainer with the arguments `given`; unless `plain`, through a pipeline with `options`."""
    from penstock.integrations import PipelineTrainer

    data: dict[str, Any] = {"train_dataset": rows(samples), "eval_dataset": rows(9), "data_collator": collate}
    data["compute_metrics"] = accuracy
    own = arguments(folder, **(given or {}))
    if plain:
        return transformers.Trainer(make_model(), own, **data)
    return PipelineTrainer(make_model(), own, pipeline_options=options, **data)


def history(trainer: Any) -> History:
    """The logs of a training."""
    kept = [{name: value for name, value in logs.items() if name in KEPT} for logs in trainer.state.log_history]
    return [logs for logs in kept if logs]


def train(folder: Path, **options: Any) -> History:
    trainer = make_trainer(folder, **options)
    trainer.train()
    return history(trainer)


def train_and_resume(folder: Path) -> tuple[History, History, float]:
    """The logs of a training, and of another one that resumes after its first five updates, with the loss of the best
    weights at its end.
    """
    whole = train(folder)
    resumed = make_trainer(folder, given={"load_best_model_at_end": True})
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    return whole, history(resumed), resumed.evaluate()["eval_loss"]
