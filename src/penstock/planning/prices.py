"""What samples cost, where the prices of devices are known."""

from penstock.values.clusters import Cluster
from penstock.values.plans import Plan


def cost_per_million(plan: Plan, cluster: Cluster) -> float | None:
    """What a million samples cost under `plan`: the price of its devices for the time; None if no price is known."""
    if plan.predicted is None or not plan.predicted.samples_per_second:
        return None
    price = cluster.price_per_hour(plan.devices or range(plan.ranks))
    return price / 3600 / plan.predicted.samples_per_second * 1e6 if price else None


def cost_of(samples: float, plan: Plan, cluster: Cluster) -> float | None:
    """What this number of samples costs under `plan`; None if no price is known."""
    million = cost_per_million(plan, cluster)
    return None if million is None else million * samples / 1e6
