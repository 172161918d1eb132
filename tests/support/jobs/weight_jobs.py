"""Models of a hub: built without weights, loaded from files, trained in stages and written to files again.

Also jobs for the processes of the pool. Everything is in float64, so that sums over microbatches differ in no bit.
"""

import resource
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import penstock
from support import models

VOCABULARY = 50
TOKENS = torch.arange(24).reshape(4, 6) % VOCABULARY
SAMPLE = {"input_ids": TOKENS[:2]}


@dataclass
class Exported:
    """What a process saw of an export."""

    logits: Tensor
    state: dict[str, Tensor]
    held: list[str]
    """The parameters that took memory in it."""
    files: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


def config_of(kind: str) -> Any:
    """``llama``, ``llama-tied``, ``gpt2`` or ``bert``; the last two are tied as well."""
    if kind == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    if kind == "bert":
        return transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=kind == "llama-tied", pad_token_id=0,
    )  # fmt: skip


def class_of(kind: str) -> Any:
    return {"gpt2": transformers.GPT2LMHeadModel, "bert": transformers.BertForMaskedLM}.get(
        kind, transformers.LlamaForCausalLM
    )


def build(kind: str, device: str = "cpu") -> Any:
    """The model in float64, the same at each call; on the meta device it has no weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return class_of(kind)(config_of(kind)).double().train()


def written(kind: str, directory: Path, **options: Any) -> nn.Module:
    """The model, which transformers itself has written to `directory`."""
    model = build(kind)
    model.save_pretrained(directory, **options)
    return model


def make_pipeline(model: nn.Module, **options: Any) -> penstock.Pipeline:
    """Trains it to predict zeros."""
    return penstock.Pipeline(
        model,
        **{"sample": SAMPLE, "loss_fn": loss_fn, "optimizer": models.adamw, "microbatches": 2, "stages": 2, **options},
    )


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def export(pipe: penstock.Pipeline, directory: Path, **options: Any) -> Exported:
    """Steps once, writes the weights and says what it wrote."""
    pipe.step({"input_ids": TOKENS}, torch.zeros_like(TOKENS))
    pipe.save_weights(directory, **options)
    held = [name for name, parameter in pipe.named_parameters() if not parameter.is_meta]
    found = Exported(pipe.predict({"input_ids": TOKENS}).logits, pipe.full_state_dict(rank=None), held)
    found.files = sorted(path.name for path in directory.iterdir())
    return found


class SparseBlock(nn.Module):
    """Mixes its inputs by a matrix that few numbers of are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("edges", torch.eye(4).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.sparse.mm(self.edges, x.T).T)  # type: ignore[no-any-return]


def sparse_pipeline() -> penstock.Pipeline:
    """A pipeline of a model with a sparse buffer in each block."""
    model = nn.Sequential(SparseBlock(), SparseBlock())
    return penstock.Pipeline(model, (torch.ones(2, 4),), F.mse_loss, models.adamw, microbatches=2, stages=2)


def gather_sparse(rank: int | None) -> list[tuple[torch.layout, Tensor]]:
    """Layouts and numbers of its sparse buffers, gathered on process `rank`."""
    with sparse_pipeline() as pipe:
        found = [tensor for name, tensor in pipe.full_state_dict(rank=rank).items() if "edges" in name]
    return [(tensor.layout, tensor.to_dense()) for tensor in found]


def load_and_train(
    kind: str, source: Path, target: Path, load: dict[str, Any], save: dict[str, Any], options: dict[str, Any]
) -> Exported:
    """Loads into a model without weights, trains a step, and exports; what this process warned of meanwhile."""
    model = build(kind, "meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = make_pipeline(model, init_fn=penstock.load_weights(source, **load), **options)
        found = export(pipe, target, **save)
    found.warned = [str(each.message) for each in caught]
    found.held = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    pipe.close()
    return found


def lora(device: str = "cpu") -> Any:
    """A PEFT model over Llama, whose small matrices are not zero."""
    import peft  # takes seconds, which most runs need not wait for

    warnings.filterwarnings("ignore", category=FutureWarning, message="`is_gradient_checkpointing` is deprecated")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with torch.device(device):
        return peft.get_peft_model(build("llama", device), config)


def export_lora(target: Path, stages: int) -> Exported:
    """Trains a step and writes the adapter."""
    pipe = make_pipeline(lora(), stages=stages)
    found = export(pipe, target, max_shard_size="1KB")
    pipe.close()
    return found


def fail_to_write(target: Path, rank: int) -> tuple[str, float, list[str]]:
    """The error of an export to a directory in which `rank` cannot write, what a step after it loses, and the files
    that a good export then writes.
    """
    pipe = make_pipeline(build("llama"))
    if pipe.rank == rank:
        # As a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        pipe.save_weights(target, max_shard_size="10KB")
        text = "no error"
    except penstock.PenstockError as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        if pipe.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    loss = float(pipe.step({"input_ids": TOKENS}, torch.zeros_like(TOKENS)).loss)
    pipe.save_weights(target, max_shard_size="10KB")
    pipe.close()
    return text, loss, sorted(path.name for path in target.iterdir())
