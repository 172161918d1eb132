"""Trains a Llama of Hugging Face's transformers by its Trainer, with clipping and a learning rate that falls."""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from penstock.integrations import PipelineTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
starts = torch.randint(len(text) - 64, (options.steps * 16,), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in text[starts[:, None] + torch.arange(64)]]


class PrintLosses(TrainerCallback):
    begun = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"loss {float(logs['loss']):.9f}, {time.perf_counter() - self.begun:.3f} s", flush=True)
            self.begun = time.perf_counter()


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=options.width,
    intermediate_size=4 * options.width,
    num_hidden_layers=4,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config).double()
with TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        max_steps=options.steps,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = PipelineTrainer(model, arguments, train_dataset=rows, callbacks=[PrintLosses()])
    trainer.train()
