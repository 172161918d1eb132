"""What the actions of a schedule cost in seconds, stage by stage.

The simulator asks nothing else about a model or a machine, so a unit-time picture and a prediction for measured layers
are one computation with two sets of costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["Costs", "plan_costs"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per microbatch (`update_seconds`: per update) of every stage and of the cut behind it; the last has none.

    `activation_seconds[s]`: the transfer from stage s to stage s + 1; `gradient_seconds[s]`: from s + 1 back to s. Cuts
    within a rank are never asked for.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    activation_seconds: tuple[float, ...]
    gradient_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        stages = len(self.forward_seconds)
        for name, expected in (
            ("backward_seconds", stages),
            ("update_seconds", stages),
            ("activation_seconds", stages - 1),
            ("gradient_seconds", stages - 1),
        ):
            found = len(getattr(self, name))
            if found != expected:
                raise PlanError(f"costs of {stages} stages: expected {expected} {name}, found {found}: give one each")

    @classmethod
    def unit(cls, stages: int) -> "Costs":
        """One second for a forward, one for a backward, none for updates and transfers."""
        ones, zeros = (1.0,) * stages, (0.0,) * stages
        return cls(ones, ones, zeros, zeros[1:], zeros[1:])


def plan_costs(
    plan: Plan, profile: Profile, cluster: Cluster, rank_of: Sequence[int], update_seconds_per_byte: float = 0.0
) -> Costs:
    """The costs of the stages of `plan`, with stage s on rank ``rank_of[s]``.

    A stage takes the sum of its layers' seconds; with recomputation its backward takes a forward more. What crosses a
    cut is the ``cut_bytes`` of the layer before it, and as much comes back (thesis, section 2.4). `PlanError` if plan,
    profile and cluster do not fit each other.
    """
    _check_fit(plan, profile, cluster)
    layers = [profile.layers[stage.start : stage.stop] for stage in plan.stages]
    forward = tuple(sum(layer.forward_seconds for layer in own) for own in layers)
    backward = tuple(sum(layer.backward_seconds for layer in own) for own in layers)
    if plan.recompute:
        backward = tuple(once + again for once, again in zip(backward, forward, strict=True))
    update = tuple(update_seconds_per_byte * sum(layer.parameter_bytes for layer in own) for own in layers)
    cuts = [(own[-1].cut_bytes, rank_of[stage], rank_of[stage + 1]) for stage, own in enumerate(layers[:-1])]
    return Costs(
        forward,
        backward,
        update,
        tuple(size / cluster.bandwidth(low, high) for size, low, high in cuts),
        tuple(size / cluster.bandwidth(high, low) for size, low, high in cuts),
    )


def _check_fit(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    if plan.stages[-1].stop != len(profile.layers):
        raise PlanError(
            f"the plan has layers 0 to {plan.stages[-1].stop - 1} and the profile {profile.name!r} has "
            f"{len(profile.layers)} layers: expected the same number. Use the profile that the plan was made from"
        )
    if plan.microbatch_size not in (None, profile.microbatch_size):
        raise PlanError(
            f"microbatch_size: the profile {profile.name!r} was measured with {profile.microbatch_size} samples and "
            f"the plan has {plan.microbatch_size}: expected the same. Measure again with {plan.microbatch_size} "
            f"samples, or set the plan's microbatch_size to {profile.microbatch_size}"
        )
    if cluster.devices < plan.ranks:
        raise PlanError(
            f"the plan has {plan.ranks} ranks and the cluster {cluster.devices} devices: expected one each. Plan for "
            "fewer ranks or describe more devices"
        )
