"""Loads, trains and writes a model in stages, and says what every process has resident meanwhile.

    python benchmarks/memory_of_weights.py --save benchmarks/results/memory-of-weights.txt

The model is a Llama with random weights, which this script writes into ten shards. Four processes build it on the meta
device, read their stages with `penstock.load_weights`, train one step with plain SGD, and write the model with
`Pipeline.save_weights`. Then transformers loads both, and what was exported must compute the same bits as the pipeline.
Needs transformers and safetensors, and room for the model twice on the disk. A test does the same with a small model.
"""

import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

import penstock
from measurement.launches import everywhere, launch
from measurement.reports import Report, conditions, option_parser
from measurement.resident_memory import forget_peak, resident_bytes, return_what_is_freed
from penstock.values.quantities import table_lines

RANKS, SHARDS, TOKENS = 4, 10, 16
EXPLANATION = """\
loading, writing, training: the most that a process had resident then, beyond what it had before. Loading may take the
weights and one tensor; writing, one tensor; training, the gradients, activations and messages of a step."""
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8},
    "big": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 17, "num_attention_heads": 12},
}
VOCABULARY = {"tiny": 2048, "small": 2048, "big": 8192}
SHARD_BYTES = {"tiny": "250KB", "small": "10MB", "big": "250MB"}


def config_of(size: str) -> Any:
    options = {**SIZES[size], "vocab_size": VOCABULARY[size]}
    return transformers.LlamaConfig(max_position_embeddings=64, pad_token_id=0, **options)


def without_weights(size: str) -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config_of(size)).train()


def write_shards(size: str, folder: Path) -> None:
    """Random weights, one shard after the other: this process never has all of them."""
    generator = torch.Generator().manual_seed(0)
    parameters = dict(without_weights(size).named_parameters())
    names = list(parameters)
    homes = {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        own = names[number * len(names) // SHARDS : (number + 1) * len(names) // SHARDS]
        save_file(
            {name: 0.02 * torch.randn(parameters[name].shape, generator=generator) for name in own}, folder / file
        )
        homes.update(dict.fromkeys(own, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def pipeline(size: str, init_fn: Any) -> penstock.Pipeline:
    model = without_weights(size)
    return penstock.Pipeline(
        model,
        {"input_ids": torch.zeros(2, TOKENS, dtype=torch.int64)},
        loss_fn,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        microbatches=2,
        init_fn=init_fn(model),
    )


def grown(work: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that are resident while `work` runs, beyond those before it; and what it returns."""
    gc.collect()
    forget_peak()
    before = resident_bytes("VmRSS")
    result = work()
    return resident_bytes("VmHWM") - before, result


def work(size: str, source: Path, target: Path, report: Path) -> None:
    """One process of the launch; rank 0 writes the report."""
    torch.set_num_threads(1)
    return_what_is_freed()
    batch = torch.arange(4 * TOKENS).reshape(4, TOKENS)
    # What a first capture, step and export import and cache is no weight.
    first = pipeline("tiny", penstock.reset_parameters)
    first.step({"input_ids": batch}, batch)
    first.save_weights(target.parent / "first")
    first.close()
    # Nor are the modules and graphs of a model of this size. They take the memory that these leave.
    first = pipeline(size, lambda model: lambda name, tensor: tensor.zero_())
    first.close()
    del first
    loading, pipe = grown(lambda: pipeline(size, lambda model: penstock.load_weights(source)))
    own = [parameter.nbytes for parameter in pipe.parameters()]
    training, _ = grown(lambda: float(pipe.step({"input_ids": batch}, batch).loss))
    writing, _ = grown(lambda: pipe.save_weights(target, max_shard_size=SHARD_BYTES[size]))
    logits = pipe.predict({"input_ids": batch[:2]}).logits
    rows = everywhere(
        {"weights": sum(own), "tensor": max(own), "loading": loading, "training": training, "writing": writing}
    )
    if dist.get_rank() == 0:
        torch.save(logits, target.parent / "logits.pt")
        report.write_text(json.dumps(rows))
    pipe.close()


def same_bits(target: Path) -> bool:
    """Whether transformers loads what was written, without a remark, and computes what the pipeline predicted."""
    model, remarks = transformers.LlamaForCausalLM.from_pretrained(target, output_loading_info=True)
    batch = torch.arange(2 * TOKENS).reshape(2, TOKENS)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch).logits
    return not any(remarks.values()) and torch.equal(logits, torch.load(target.parent / "logits.pt"))


def table(rows: list[dict[str, int]]) -> list[str]:
    """A line for each rank; see `EXPLANATION`."""
    cells = [("MB", "weights", "largest tensor", "loading", "writing", "training")]
    for rank, row in enumerate(rows):
        columns = ("weights", "tensor", "loading", "writing", "training")
        cells.append((str(rank), *(f"{row[name] / 1e6:.1f}" for name in columns)))
    total = sum(row["weights"] for row in rows) / 1e6
    return [*table_lines(cells, left=()), EXPLANATION, f"the whole model: {total:.1f} MB in {SHARDS} shards"]


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--size", choices=SIZES, default="big", help="of the model")
    options = parser.parse_args()
    if options.worker is not None:
        folder = options.worker
        work(options.size, folder / "source", folder / "target", folder / "report.json")
        return
    report = Report(options.save)
    report.add(conditions("benchmarks/memory_of_weights.py"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        write_shards(options.size, folder / "source")
        arguments = ["--size", options.size, "--worker", str(folder)]
        launch(__file__, RANKS, arguments, {"HF_HUB_OFFLINE": "1"})
        rows = json.loads((folder / "report.json").read_text())
        files = sorted(os.listdir(folder / "target"))
        equal = same_bits(folder / "target")
    shards = sum(name.endswith(".safetensors") for name in files)
    verdict = f"written: {shards} shards; from_pretrained computes the same bits: {'yes' if equal else 'NO'}"
    report.add("", *table(rows), verdict)


if __name__ == "__main__":
    main()
