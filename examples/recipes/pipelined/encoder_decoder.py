"""Trains a T5 of Hugging Face's transformers, with random weights, to say a text backwards."""

import argparse
import time

import torch
from transformers import T5Config, T5ForConditionalGeneration

import penstock

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()

rows = torch.randint(2, 64, (options.steps, 16, 32), generator=torch.Generator().manual_seed(1))

torch.manual_seed(0)
config = T5Config(
    vocab_size=64,
    d_model=options.width,
    d_kv=options.width // 4,
    d_ff=4 * options.width,
    num_layers=3,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config).double()
sample = {"input_ids": rows[0, :4], "labels": rows[0, :4]}
pipe = penstock.Pipeline(
    model, sample, penstock.model_loss, lambda params: torch.optim.AdamW(params, lr=3e-3), microbatches=4
)
for batch in rows:
    begun = time.perf_counter()
    loss = pipe.step({"input_ids": batch, "labels": batch.flip(1)}).loss
    print(f"loss {float(loss):.9f}, {time.perf_counter() - begun:.3f} s", flush=True)
