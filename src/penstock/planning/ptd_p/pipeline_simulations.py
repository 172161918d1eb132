"""Simulates the pipeline of one configuration, with one rank for all devices of a position.

The d pipelines do the same at the same time on links of their own, and so do the t devices of a stage; one of each
represents all. The simulator hides messages behind computation, like Penstock's transport, or does not, like
Megatron-LM.
"""

from penstock.planning.ptd_p.parallel_configs import ParallelConfig, ParallelLinks, boundary_seconds
from penstock.planning.ptd_p.transformer_costs import ModuleCosts, TransformerCosts
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import LayerProfile, Profile


def simulate_pipeline(
    layers: int,
    costs: TransformerCosts,
    config: ParallelConfig,
    links: ParallelLinks,
    microbatches: int,
    *,
    overlap: bool = True,
) -> float:
    """Seconds from the first forward to the last backward of `microbatches` microbatches in one pipeline."""
    return evaluate(*_simulation_inputs(layers, costs, config, links, microbatches), overlap=overlap).minibatch_seconds


def _simulation_inputs(
    layers: int, costs: TransformerCosts, config: ParallelConfig, links: ParallelLinks, microbatches: int
) -> tuple[Plan, Profile, Cluster]:
    """The inputs of the simulation: a layer of the profile is a stage with its gathers and recomputation."""
    p, stages = config.pipeline, config.pipeline * config.stages_per_rank
    _, gathering, sent_bytes = boundary_seconds(costs, links)
    rows = []
    for stage in range(stages):
        forward, backward = _scaled(costs.layer, layers // stages, recompute=config.recompute)
        if stage == 0:
            forward, backward = forward + costs.embedding.forward_seconds, backward + costs.embedding.backward_seconds
        else:
            forward += gathering
        if stage == stages - 1:
            forward, backward = forward + costs.head.forward_seconds, backward + costs.head.backward_seconds
        else:
            backward += gathering
        rows.append(
            LayerProfile(
                name=f"stage {stage}",
                forward_seconds=forward,
                backward_seconds=backward,
                cut_bytes=sent_bytes,
                saved_bytes=0.0,
                parameter_bytes=0.0,
            )
        )
    plan = Plan.of_cuts(range(stages + 1), p, config.schedule, microbatches, config.microbatch_size)
    bandwidth, latency = links.pipeline.bandwidth, links.pipeline.latency_seconds
    return plan, Profile(tuple(rows), config.microbatch_size), Cluster.uniform(p, bandwidth, None, latency)


def _scaled(layer: ModuleCosts, layers: int, *, recompute: bool) -> tuple[float, float]:
    recomputation = layer.forward_seconds if recompute else 0.0
    return layers * layer.forward_seconds, layers * (layer.backward_seconds + recomputation)
