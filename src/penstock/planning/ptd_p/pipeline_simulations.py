"""The simulator's word on one arrangement: its pipeline is played with one rank for all devices of a position.

The d pipelines do the same at the same time on links of their own, and so do the t devices of a stage; one of each
stands for all. The simulator hides messages behind computation, as Penstock's transport does, or does not, as
Megatron-LM.
"""

from penstock.planning.ptd_p.parallel_configs import Arrangement, ArrangementLinks, boundary_seconds
from penstock.planning.ptd_p.transformer_costs import PartCosts, TransformerCosts
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import LayerProfile, Profile

__all__ = ["play", "trial"]


def play(
    layers: int,
    costs: TransformerCosts,
    form: Arrangement,
    links: ArrangementLinks,
    microbatches: int,
    *,
    overlap: bool = True,
) -> float:
    """Seconds from the first forward to the last backward of `microbatches` microbatches in one pipeline."""
    return evaluate(*trial(layers, costs, form, links, microbatches), overlap=overlap).minibatch_seconds


def trial(
    layers: int, costs: TransformerCosts, form: Arrangement, links: ArrangementLinks, microbatches: int
) -> tuple[Plan, Profile, Cluster]:
    """What `play` simulates. A stage is one layer of the profile, its gathers and second forwards in its seconds."""
    p, stages = form.pipeline, form.pipeline * form.stages_per_rank
    _, gathering, sent_bytes = boundary_seconds(costs, links)
    rows = []
    for stage in range(stages):
        forward, backward = _scaled(costs.layer, layers // stages, recompute=form.recompute)
        if stage == 0:
            forward, backward = forward + costs.embedding.forward_seconds, backward + costs.embedding.backward_seconds
        else:
            forward += gathering
        if stage == stages - 1:
            forward, backward = forward + costs.head.forward_seconds, backward + costs.head.backward_seconds
        else:
            backward += gathering
        rows.append(LayerProfile(f"stage {stage}", forward, backward, sent_bytes, 0.0, 0.0))
    plan = Plan.of_cuts(range(stages + 1), p, form.schedule, microbatches, form.microbatch_size)
    bandwidth, latency = links.pipeline.bandwidth, links.pipeline.latency_seconds
    return plan, Profile(tuple(rows), form.microbatch_size), Cluster.uniform(p, bandwidth, None, latency)


def _scaled(part: PartCosts, layers: int, *, recompute: bool) -> tuple[float, float]:
    again = part.forward_seconds if recompute else 0.0
    return layers * part.forward_seconds, layers * (part.backward_seconds + again)
