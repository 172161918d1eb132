"""Trains a Llama of Hugging Face's transformers, with random weights, which computes its own loss."""

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
starts = torch.randint(len(text) - 64, (options.steps, 16), generator=torch.Generator().manual_seed(1))
rows = text[starts[..., None] + torch.arange(64)]

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=options.width,
    intermediate_size=4 * options.width,
    num_hidden_layers=4,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in rows:
    begun = time.perf_counter()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {float(loss):.9f}, {time.perf_counter() - begun:.3f} s", flush=True)
