"""Finetunes the adapters (LoRA, by peft) of a Llama whose own weights bitsandbytes keeps in four bits (QLoRA)."""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

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
adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map="cpu")
model = get_peft_model(model, adapters)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
for batch in rows:
    begun = time.perf_counter()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {float(loss):.9f}, {time.perf_counter() - begun:.3f} s", flush=True)
