"""Plans transformers whose weights are on the host, for cards of 24 and 80 GB, and simulates them.

    python benchmarks/streamed_plans.py --save benchmarks/results/streamed-plans.txt

Figures of a layer are worked out from the sizes below: weights and gradients in bfloat16, AdamW with float32 masters
(12 bytes a weight); or LoRA over packed NF4, of 0.53 bytes a weight, whose backward computes gradients of inputs alone.
Devices compute as fast as `--flops`, a share of a card's peak that training reaches. Cards send each other 25 GB/s, and
plans have 92 % of their memory. A step trains on `--tokens` tokens, in microbatches of a sequence. `above`: how far the
step is above the longest of a rank's computation, and of its link to the host in one direction. `order`: the group of
microbatches, where there are several; gradients that come back for the next group are not in `GB in / out`.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from measurement.reports import Report, conditions, option_parser, table
from penstock.planning.predictions import prediction_of
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.streamed_plans import stream_plans
from penstock.planning.search.tensor_groups import compare_plans
from penstock.scheduling.actions import Fetch
from penstock.simulating import evaluate
from penstock.simulating.simulator import planned_schedule
from penstock.values import Cluster, LayerProfile, Plan, Profile

SEQUENCE = 4096


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a decoder as Llama and Qwen have them: `wide` is the inner width, `shared` the width of keys."""

    layers: int
    hidden: int
    wide: int
    shared: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """The weights of a layer: queries and outputs, keys and values, and three matrices of the inner width."""
        return 2 * self.hidden**2 + 2 * self.hidden * self.shared + 3 * self.hidden * self.wide


MODELS = {
    "8B": Model(32, 4096, 14336, 1024, 128256),
    "14B": Model(48, 5120, 13824, 1024, 152064),
    "70B": Model(80, 8192, 28672, 1024, 128256),
}
STATE, RANK = 6.0, 64
"""AdamW's moments and masters in float32, in units of bfloat16 weights; the rank of LoRA."""


def profile(model: Model, flops: float, *, lora: bool) -> Profile:
    """What the layers of `model` take and hold of a microbatch, a sequence, with flash attention."""
    tokens, hidden = SEQUENCE, model.hidden

    def layer(name: str, weights: int, width: int, attended: int) -> LayerProfile:
        operations = 2 * weights * tokens + 2 * attended * tokens * tokens
        adapters = 2 * RANK * (weights // hidden) if lora else 0
        return LayerProfile(
            name,
            forward_seconds=operations / flops,
            backward_seconds=operations / flops * (1 if lora else 2),
            cut_bytes=2.0 * tokens * hidden,
            saved_bytes=2.0 * tokens * width,
            parameter_bytes=2.0 * (adapters if lora else weights),
            frozen_bytes=0.53 * weights if lora else 0.0,
            workspace_bytes=2.0 * tokens * 2 * model.wide,
            # Moments, masters, weights and gradients once each at 2 TB/s.
            update_seconds=(adapters if lora else weights) * 28 / 2e12,
        )

    # Inputs of both norms and of the blocks, queries to outputs, and three tensors of the inner width.
    width = 6 * hidden + 2 * model.shared + 3 * model.wide
    blocks = [layer(f"block {index}", model.weights, width, 2 * hidden) for index in range(model.layers)]
    embedding = replace(layer("embedding", model.vocabulary * hidden, 0, 0), forward_seconds=0.0, backward_seconds=0.0)
    # The loss is taken in pieces, so that logits of a microbatch are never whole.
    head = layer("head", model.vocabulary * hidden, 2 * hidden, 0)
    return Profile((embedding, *blocks, head), 1)


def moved_bytes(plan: Plan, measured: Profile, copies: float) -> tuple[float, float]:
    """What comes to the busiest device in a step, and what leaves it; without gradients that groups add to again."""
    made = planned_schedule(plan, measured)
    come, gone = [], []
    for rank, row in enumerate(made.step(0)):
        size = dict.fromkeys(made.stages_of(rank), 0.0)
        frozen = dict(size)
        for stage in size:
            own = plan.stages[stage]
            size[stage] = sum(layer.parameter_bytes for layer in measured.layers[own.start : own.stop])
            frozen[stage] = sum(layer.frozen_bytes for layer in measured.layers[own.start : own.stop])
        fetched = sum(size[action.stage] + frozen[action.stage] for action in row if isinstance(action, Fetch))
        streamed = sum(size[stage] for stage in size if stage in plan.streaming)
        come.append(fetched + copies * sum(size.values()) + 2 * streamed)
        gone.append(copies * sum(size.values()) + 2 * streamed)
    return max(come), max(gone)


def rows(models: dict[str, Model], flops: float, tokens: int) -> Iterator[list[str]]:
    for name, lora in (*((name, False) for name in models), ("70B", True)):
        if name not in models:
            continue
        measured = profile(models[name], flops, lora=lora)
        copies = 4.0 if lora else STATE
        for gigabytes in (24, 80):
            for devices in (1, 2, 4, 8):
                for bandwidth in (25, 55):
                    cluster = replace(
                        Cluster.uniform(devices, 25e9).with_memory(0.92e9 * gigabytes), host_bandwidth=1e9 * bandwidth
                    )
                    what = [f"{name}{' NF4 LoRA' if lora else ''}", f"{devices} x {gigabytes} GB", f"{bandwidth} GB/s"]
                    found = what + cells(measured, cluster, copies, tokens // SEQUENCE)
                    print(*found, sep=" | ", file=sys.stderr, flush=True)
                    yield found


def cells(measured: Profile, cluster: Cluster, copies: float, microbatches: int) -> list[str]:
    """What the fastest plan takes, streamed where nothing fits otherwise."""
    options = PlanConstraints(microbatches=microbatches, optimizer_copies=copies, every_device=True)
    ranked = compare_plans([measured], cluster, options, refine=False).ranked
    ranked = ranked or stream_plans([measured], cluster, options).ranked
    if not ranked:
        return ["nothing fits", *[""] * 7]
    found = ranked[0]
    predicted = prediction_of(found)
    seconds, bound = predicted.minibatch_seconds, predicted.bottleneck_seconds * microbatches
    come, gone = moved_bytes(found, measured, copies) if found.streamed else (0.0, 0.0)
    binds = "link" if " host " in predicted.limit else "compute"
    groups = str(found.schedule).removeprefix("breadth-first").removeprefix(" in groups of ") or "-"
    return [
        f"{seconds:.1f}",
        f"{microbatches * SEQUENCE / seconds:.0f}",
        f"{len(found.streaming)} of {len(found.stages)}" if found.streamed else "none",
        groups if found.streamed else str(found.schedule),
        f"{come / 1e9:.0f} / {gone / 1e9:.0f}",
        binds,
        f"{bound:.1f}",
        f"{seconds / bound - 1:.0%}",
    ]


def frontier(model: Model, flops: float, tokens: int) -> Iterator[list[str]]:
    """One card, from all weights that stay to none, with as much memory as that takes."""
    measured = profile(model, flops, lora=False)
    cluster = replace(Cluster.uniform(1, 25e9), host_bandwidth=25e9)
    microbatches = tokens // SEQUENCE
    options = PlanConstraints(microbatches=microbatches, optimizer_copies=STATE, stages=32)
    whole = stream_plans([measured], cluster.with_memory(1e15), options).ranked[0]
    for staying in (32, 28, 24, 16, 8, 0):
        plan = replace(whole, streamed=tuple(range(staying, 32)))
        outcome = evaluate(plan, measured, cluster, optimizer_copies=STATE)
        yield [
            f"{32 - staying} of 32",
            f"{max(outcome.peak_bytes) / 1e9:.1f}",
            f"{outcome.minibatch_seconds:.1f}",
            f"{outcome.minibatch_seconds / (outcome.bottleneck_seconds * microbatches) - 1:.0%}",
        ]


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--flops", type=float, default=150e12, help="what a device computes a second")
    parser.add_argument("--tokens", type=int, default=32 * SEQUENCE, help="of a step")
    parser.add_argument("--models", default=",".join(MODELS), help="which of the models")
    arguments = parser.parse_args()
    models = {name: MODELS[name] for name in arguments.models.split(",")}
    report = Report(arguments.save)
    report.add(conditions("benchmarks/streamed_plans.py"), "")
    head = ["model", "devices", "to the host", "s a step", "tokens/s", "streamed", "order", "GB in / out"]
    report.add(table([*head, "binds", "bound s", "above"], list(rows(models, arguments.flops, arguments.tokens))))
    first = next(iter(models))
    report.add("", f"{first} on one card at 25 GB/s, from all weights that stay to none:")
    peaks = list(frontier(models[first], arguments.flops, arguments.tokens))
    report.add(table(["streamed", "GB at the peak", "s a step", "above"], peaks))


if __name__ == "__main__":
    main()
