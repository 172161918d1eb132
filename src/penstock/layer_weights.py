"""What every layer weighs where no plan is given: ``balance=`` of a pipeline.

Rank 0 weighs and tells all ranks, so that all cut alike: a model whose work depends on the data may do other work on
another rank's sample, and no two measurements agree. Where layers are measured, so are the devices of all ranks: a slow
one gets fewer layers.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch

from penstock.arguments import choice
from penstock.capturing.chain import LayerChain
from penstock.capturing.work_estimates import estimate_seconds
from penstock.errors import PlanError
from penstock.profiling.device_speeds import measure_speeds
from penstock.profiling.profiler import profile
from penstock.runtime.transport.collective_errors import gather_results
from penstock.runtime.transport.worlds import World
from penstock.values.layer_weights import LayerWeights
from penstock.values.plans import Plan

Balance: TypeAlias = Literal["work", "layers", "measured"]
"""What stages have equal amounts of: estimated work, layers, or measured seconds."""


def weigh_layers(
    balance: Balance,
    *,
    planned: bool,
    world: World,
    chain: LayerChain,
    sample: tuple[Any, ...] | dict[str, Any],
    device: torch.device,
    autocast: torch.dtype | None,
) -> LayerWeights:
    """What each layer of `chain` weighs by `balance`, the same on all ranks. Collective.

    `planned`: there is a plan, so the weights are not read, and `PlanError` if `balance` is not the default. An error
    on one rank is raised on all.
    """

    def work() -> Sequence[float]:
        _check(balance, planned)
        equal = [1.0] * len(chain.layers)
        if planned or world.rank != 0:
            return equal
        match balance:
            case "work":
                return _estimate(chain, device) or equal
            case "measured":
                if any(parameter.is_meta for parameter in chain.parameters.values()):
                    raise PlanError(
                        "balance='measured' and the model is on the meta device, where nothing can be measured: use "
                        "balance='work', which needs no weights, or pass a plan"
                    )
                return [layer.seconds for layer in profile(chain, sample, autocast=autocast, progress=False).layers]
            case "layers":
                return equal

    weights = gather_results(world, "while it weighed the layers", work)[0]
    measured = balance == "measured" and not planned
    return LayerWeights(tuple(weights), measure_speeds(world, chain, sample, autocast) if measured else ())


def log_shares(plan: Plan, weights: LayerWeights, balance: Balance) -> None:
    """Says in the log of ``penstock`` what share of the weight each stage of `plan` has."""
    total = sum(weights) or 1.0
    shares = [
        f"layers [{stage.start}, {stage.stop}) {sum(weights.layers[stage.start : stage.stop]) / total:.1%}"
        for stage in plan.stages
    ]
    kind = {"work": "estimated work", "layers": "layers", "measured": "measured seconds"}[balance]
    logging.getLogger("penstock").info("stages by %s: %s", kind, ", ".join(shares))
    if weights.speeds:
        speeds = ", ".join(f"{speed:.2f}" for speed in weights.speeds)
        logging.getLogger("penstock").info("the ranks are not equally fast (rank 0 is 1): %s", speeds)


def _check(balance: str, planned: bool) -> None:
    known = get_args(Balance)
    choice(known).check("balance", balance, PlanError)
    if planned and balance != known[0]:
        raise PlanError(
            f"balance={balance!r} and plan= are both given: balance= chooses where stages begin, and a plan says it. "
            "Leave one of them out"
        )


def _estimate(chain: LayerChain, device: torch.device) -> Sequence[float] | None:
    found = estimate_seconds(chain, device)
    if found is None:
        logging.getLogger("penstock").warning(
            "no layer runs an operator of PyTorch's, so their work is not known: stages get equal numbers of layers. "
            "balance='measured' measures the layers"
        )
    return found
