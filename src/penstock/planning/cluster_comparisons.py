"""Which cluster to take: the best plan of one model on each of several clusters, in one table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from penstock.arguments import TEXT
from penstock.errors import PlanError
from penstock.planning.memory import OPTIMIZER_COPIES
from penstock.planning.planners import join_profiles, plan
from penstock.planning.predictions import cost_per_million
from penstock.planning.search.constraints import MICROBATCHES_PER_DEVICE
from penstock.planning.search.data_parallelism import without_pipelines
from penstock.planning.search.explanations import shape_text
from penstock.values.clusters import CLUSTER, Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text, seconds_text, table_lines


@dataclass(frozen=True, slots=True)
class ClusterOption:
    """One cluster, and the best plan for it."""

    name: str
    cluster: Cluster
    plan: Plan | None
    """None if nothing fits."""
    reason: str = ""
    """Why there is no plan."""

    @property
    def samples_per_second(self) -> float:
        """By the simulator; 0 without a plan."""
        return 0.0 if self.plan is None or self.plan.predicted is None else self.plan.predicted.samples_per_second

    @property
    def cost_per_million_samples(self) -> float | None:
        """In the currency of the prices, for the devices that the plan uses; None without a plan or a price."""
        return None if self.plan is None else cost_per_million(self.plan, self.cluster)


@dataclass(frozen=True, slots=True)
class ClusterComparison:
    """The options, the fastest first; `str` is a table."""

    options: tuple[ClusterOption, ...]
    notes: tuple[str, ...] = ()

    @property
    def cheapest(self) -> ClusterOption | None:
        """The option whose samples cost least; None if no price is known."""
        priced = [option for option in self.options if option.cost_per_million_samples is not None]
        return min(priced, key=lambda option: option.cost_per_million_samples or inf, default=None)

    def __str__(self) -> str:
        head = ("cluster", "devices", "plan", "minibatch", "samples/s", "per hour", "per million samples", "peak")
        lines = table_lines([head, *(_row(option) for option in self.options)], left={0, 2})
        if self.cheapest is not None and self.cheapest is not self.options[0]:
            lines += ["", f"The fastest is {self.options[0].name}, the cheapest {self.cheapest.name}."]
        refused = [f"  {option.name}: {option.reason}" for option in self.options if option.plan is None]
        return "\n".join([*lines, *(["", "Not possible:", *refused] if refused else []), *self.notes])


def compare_clusters(
    profile: Profile | Sequence[Profile], clusters: Mapping[str, Cluster], **options: Any
) -> ClusterComparison:
    """The best plan of `profile` on each of `clusters`, by name, with its speed, memory and cost.

    `options` are those of `penstock.plan`. Without `batch_size` and `microbatches`, every cluster gets the default
    minibatch of the largest one, so that all do the same work. A cluster on which nothing fits is listed with the
    reason. Raises `PlanError` for options that contradict each other on every cluster.
    """
    if not isinstance(clusters, Mapping) or not clusters:
        raise PlanError("clusters: expected a mapping of names to clusters, found none: give one cluster or more")
    for name, cluster in clusters.items():
        TEXT.check("clusters", name, PlanError)
        CLUSTER.check(f"clusters[{name!r}]", cluster, PlanError)
    joined = join_profiles(profile)
    first = joined[0]
    single = next((each for each in joined if each.tensor_parallel == 1), None)
    if options.get("batch_size") is None and options.get("microbatches") is None:
        most = max(cluster.devices for cluster in clusters.values())
        options["microbatches"] = MICROBATCHES_PER_DEVICE * most
    found = []
    for name, cluster in clusters.items():
        try:
            found.append(ClusterOption(name, cluster, plan(profile, cluster, **options)))
        except PlanError as error:
            found.append(ClusterOption(name, cluster, None, str(error).splitlines()[0]))
    if all(option.plan is None for option in found):
        raise PlanError(f"no plan on any cluster: {found[0].name}: {found[0].reason}")
    found.sort(key=lambda option: -option.samples_per_second)
    batch = options.get("batch_size")
    microbatches = options.get("microbatches") or max(1, (batch or 1) // first.microbatch_size)
    notes: list[str] = []
    if single is not None:
        notes += ["", "Without a pipeline, by formulas (docs/planning.md):"]
        for option in found:
            copies = options.get("optimizer_copies", OPTIMIZER_COPIES)
            ways = without_pipelines(single, option.cluster, microbatches, copies)
            notes.append(f"  {option.name}: {'; '.join(map(str, ways))}")
    return ClusterComparison(tuple(found), tuple(notes))


def _row(option: ClusterOption) -> tuple[str, ...]:
    cost = option.cost_per_million_samples
    price = option.cluster.price_per_hour()
    if option.plan is None or option.plan.predicted is None:
        return option.name, str(option.cluster.devices), "none", "", "", f"{price:.4g}" if price else "-", "-", ""
    plan, predicted = option.plan, option.plan.predicted
    used = option.cluster.price_per_hour(plan.devices or range(plan.ranks))
    return (
        option.name,
        f"{plan.ranks} of {option.cluster.devices}",
        f"{plan.schedule}, {shape_text(plan)}",
        seconds_text(predicted.minibatch_seconds),
        f"{predicted.samples_per_second:.4g}",
        f"{used:.4g}" if used else "-",
        f"{cost:.4g}" if cost is not None else "-",
        bytes_text(max(predicted.peak_bytes)),
    )
