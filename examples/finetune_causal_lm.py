"""Finetunes a causal language model of Hugging Face, whole or with LoRA, on text files of this machine.

Nothing is downloaded. Without --model it is a small Llama with random weights over bytes, and without --text the
sources of Python's standard library. One process with all stages:

    python examples/finetune_causal_lm.py --stages 2 --steps 50

Three processes with a stage each, which save and go on:

    torchrun --nproc-per-node 3 examples/finetune_causal_lm.py --model /models/llama --lora 8 --checkpoints runs/llama
    torchrun --nproc-per-node 3 examples/finetune_causal_lm.py --model /models/llama --lora 8 --checkpoints runs/llama \
        --resume --export runs/adapter
"""

import argparse
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import session
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

import penstock

BYTES = 256


class Windows(Dataset[dict[str, Tensor]]):
    """Packed text: tokens without gaps, in windows of `length`. The model shifts the labels itself."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a config.json, and weights if they are to be read")
    parser.add_argument("--text", type=Path, nargs="+", help="files, or folders of .txt, .md, .rst and .py files")
    parser.add_argument("--text-bytes", type=int, default=1_000_000, help="how much text to read")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sample")
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a minibatch")
    parser.add_argument("--microbatches", type=int, default=4, help="pieces that a minibatch is cut into")
    parser.add_argument("--steps", type=int, default=200, help="minibatches of the whole training")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10, help="steps until the learning rate is reached")
    parser.add_argument("--clip", type=float, default=1.0, help="the most that the norm of the gradients may be")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank (peft)")
    parser.add_argument("--schedule", default="1f1b-flush")
    parser.add_argument("--stages", type=int, help="all stages (one for each process)")
    parser.add_argument("--evaluate-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--checkpoints", type=Path, help="a folder for checkpoints, written after evaluations")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--export", type=Path, help="a folder for the model, for from_pretrained")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.resume and options.checkpoints is None:
        parser.error("--resume needs --checkpoints, the folder to resume from")
    return options


def load_model(options: argparse.Namespace) -> nn.Module:
    """The model of ``--model``, with its weights if the folder has any; the same on every process."""
    torch.manual_seed(options.seed)
    if options.model is None:
        config: Any = transformers.LlamaConfig(
            vocab_size=BYTES, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=options.length,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
    elif any(options.model.glob("*.safetensors")):
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    else:
        config = transformers.AutoConfig.from_pretrained(options.model)
        model = transformers.AutoModelForCausalLM.from_config(config)
    if not options.lora:
        return model.train()
    import peft

    adapters = peft.LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
    return peft.get_peft_model(model, adapters).train()


def read_tokens(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The tokens to train on, and those of every tenth file to evaluate on; bytes if the model has no tokenizer."""
    has_tokenizer = options.model is not None and (options.model / "tokenizer_config.json").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model) if has_tokenizer else None
    parts: tuple[list[int], list[int]] = ([], [])
    size = 0
    for index, path in enumerate(find_files(options.text or [Path(sysconfig.get_paths()["stdlib"])])):
        if size >= options.text_bytes:
            break
        content = path.read_bytes()[: options.text_bytes - size]
        size += len(content)
        if tokenizer is None:
            tokens = list(content)
        else:
            tokens = tokenizer(content.decode(errors="replace"))["input_ids"]
        parts[index % 10 == 9].extend(tokens)
    # Of a single file, its end is for evaluation.
    training, validation = parts if parts[1] else (parts[0][: -len(parts[0]) // 10], parts[0][-len(parts[0]) // 10 :])
    return torch.tensor(training), torch.tensor(validation)


def find_files(paths: list[Path]) -> Iterator[Path]:
    """The text files among `paths` and directly in the folders among them."""
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        yield from (file for file in inside if not path.is_dir() or file.suffix in (".txt", ".md", ".rst", ".py"))


def make_pipeline(model: nn.Module, sample: dict[str, Tensor], options: argparse.Namespace) -> penstock.Pipeline:
    def schedule_rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return transformers.get_cosine_schedule_with_warmup(optimizer, options.warmup, options.steps)

    return penstock.Pipeline(
        model,
        sample=sample,
        loss_fn=penstock.model_loss,
        # Every window has as many tokens, so that the mean over samples is the one over tokens.
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=options.learning_rate),
        lr_scheduler=schedule_rates,
        clip_grad_norm=options.clip,
        schedule=options.schedule,
        stages=options.stages,
        microbatches=options.microbatches,
        seed=options.seed,
    )


def evaluate(pipe: penstock.Pipeline, held_out: dict[str, Tensor], step: int) -> None:
    loss = float(pipe.evaluate(held_out).loss)
    session.say(f"step {step}: validation loss {loss:.4f}, perplexity {math.exp(min(loss, 100)):.2f}")


def train(pipe: penstock.Pipeline, batches: Any, held_out: dict[str, Tensor], options: argparse.Namespace) -> None:
    pipe.track(batches=batches)
    if options.resume:
        pipe.load(options.checkpoints)
        session.say(f"resumed after step {pipe.steps}")
    step = pipe.steps
    evaluate(pipe, held_out, step)
    while step < options.steps:
        for batch in batches:
            result = pipe.step(batch)
            step += 1
            if step % options.evaluate_every == 0 or step == options.steps:
                norm = pipe.gradient_norm
                session.say(f"step {step}: loss {float(result.loss):.4f}, gradient norm {norm or 0.0:.3f}")
                evaluate(pipe, held_out, step)
                if options.checkpoints is not None:
                    pipe.save(options.checkpoints)
            if step >= options.steps:
                break


def main() -> None:
    options = read_options()
    session.join_processes()
    device = penstock.local_device()
    training, validation = (tokens.to(device) for tokens in read_tokens(options))
    batches = penstock.loader(
        Windows(training, options.length), options.batch_size, shuffle=True, seed=options.seed, drop_last=True
    )
    held_out = Windows(validation, options.length).rows[:64]
    session.say(f"{len(training):,} tokens to train on, {held_out.numel():,} to evaluate on")
    model = load_model(options).to(device)
    size = max(2, options.batch_size // options.microbatches)
    rows = held_out[:size]
    with make_pipeline(model, {"input_ids": rows, "labels": rows}, options) as pipe:
        train(pipe, batches, {"input_ids": held_out, "labels": held_out}, options)
        if options.export is not None:
            pipe.save_weights(options.export)
            session.say(f"exported to {options.export}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
