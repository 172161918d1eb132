"""Rivals of the search: random plans, and hill climbing with nothing but `penstock.simulating.evaluate`.

They share no code with the search but the simulator that judges both.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.errors import PenstockError
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import Profile

SINGLE = ("1f1b-flush", "gpipe", "spp", "zb-h1", "2bw", "pipedream")
SEVERAL = (("interleaved", 2), ("interleaved", 4), ("zb-v", 2))
PER_DEVICE = 4
"""Microbatches for every device, as in the search."""


class Judge:
    """The simulated samples per second of plans, each simulated at most once."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self._profile = profile
        self._cluster = cluster
        self._known: dict[Plan, float] = {}

    @property
    def simulated(self) -> int:
        """How many plans were simulated."""
        return len(self._known)

    def rate(self, plan: Plan) -> float:
        """The samples per second of `plan`; 0 if it cannot run."""
        key = replace(plan, predicted=None)
        if key not in self._known:
            try:
                self._known[key] = evaluate(key, self._profile, self._cluster).samples_per_second
            except PenstockError:
                self._known[key] = 0.0
        return self._known[key]


def random_plan(draw: random.Random, profile: Profile, cluster: Cluster) -> Plan | None:
    """A plan with a random schedule, random replicas and random or roughly balanced cuts; None if there is none."""
    devices, layers = cluster.devices, len(profile)
    if draw.random() < 0.2:
        schedule, per_rank = draw.choice(SEVERAL)
        length = draw.choice([count for count in range(2, devices + 1) if count * per_rank <= layers] or [0])
        if not length:
            return None
        count = length * per_rank
        ranks = list(range(length)) if schedule == "interleaved" else [*range(length), *reversed(range(length))]
        if schedule == "interleaved":
            ranks *= per_rank
        width = draw.choice([1, devices // length])
        groups = [tuple(range(rank * width, (rank + 1) * width)) for rank in ranks]
        return arrange(random_cuts(draw, profile, [1] * count), groups, schedule, profile, cluster)
    used = devices if draw.random() < 0.7 else draw.randint(1, devices)
    count = draw.randint(1, min(used, layers, 16))
    kind = draw.random()
    if kind < 0.25:
        replicas = [1] * min(used, layers)
    elif kind < 0.5:
        replicas = [used // count] * count
    else:
        ends = sorted(draw.sample(range(1, used), count - 1))
        replicas = [stop - start for start, stop in pairwise([0, *ends, used])]
    groups, first = [], 0
    for own in replicas:
        groups.append(tuple(range(first, first + own)))
        first += own
    return arrange(random_cuts(draw, profile, replicas), groups, draw.choice(SINGLE), profile, cluster)


def random_cuts(draw: random.Random, profile: Profile, replicas: Sequence[int]) -> list[int]:
    """Cuts at random, or near those that give every device the same work."""
    count, layers = len(replicas), len(profile)
    if draw.random() < 0.3:
        return [0, *sorted(draw.sample(range(1, layers), count - 1)), layers]
    noise = draw.choice([0.0, 0.1, 0.3])
    shares = [own * (1 + noise * draw.uniform(-1, 1)) for own in replicas]
    cuts, past, layer = [0], 0.0, 0
    for stage in range(count - 1):
        past += shares[stage] / sum(shares) * profile.seconds
        done = sum(each.seconds for each in profile.layers[:layer])
        while layer < layers - (count - 1 - stage) and (layer <= cuts[-1] or done < past):
            done += profile.layers[layer].seconds
            layer += 1
        cuts.append(max(layer, cuts[-1] + 1))
    return [*cuts, layers]


def arrange(
    cuts: Sequence[int], groups: Sequence[tuple[int, ...]], schedule: str, profile: Profile, cluster: Cluster
) -> Plan | None:
    """The plan of these stages; None if it is not one."""
    microbatches = 1 if schedule == "pipedream" else PER_DEVICE * cluster.devices
    split = schedule == "spp"
    if split and any(profile.microbatch_size % len(ranks) for ranks in groups):
        return None
    try:
        stages = tuple(Stage(*cut, ranks) for cut, ranks in zip(pairwise(cuts), groups, strict=True))
        return Plan(
            stages,
            schedule,
            microbatches,
            profile.microbatch_size,
            routing="split" if split else "round-robin",
        )
    except PenstockError:
        return None


def climb(start: Plan, judge: Judge, draw: random.Random, steps: int, profile: Profile, cluster: Cluster) -> Plan:
    """The plan after `steps` random changes, of which each is kept if it makes the plan faster."""
    best = start
    for _ in range(steps):
        changed = change(draw, best, profile, cluster)
        if changed is not None and judge.rate(changed) > judge.rate(best):
            best = changed
    return best


def change(draw: random.Random, plan: Plan, profile: Profile, cluster: Cluster) -> Plan | None:
    """`plan` with one random change: a cut, replicas, a stage more or fewer, or another schedule."""
    cuts = [0, *(stage.stop for stage in plan.stages)]
    groups = [stage.ranks for stage in plan.stages]
    replicas = [len(ranks) for ranks in groups]
    schedule = str(plan.schedule)
    kind = draw.random()
    if len(cuts) > 2 and (kind < 0.6 or plan.stages_per_rank > 1):
        cut = draw.randrange(1, len(cuts) - 1)
        step = draw.choice([-1, 1]) * draw.choice([1, 1, 2, 3, 5, 8, 13])
        cuts[cut] = min(max(cuts[cut] + step, cuts[cut - 1] + 1), cuts[cut + 1] - 1)
        return arrange(cuts, groups, schedule, profile, cluster)
    if plan.stages_per_rank > 1:
        return None
    if kind < 0.75 and len(groups) > 1:
        one, other = draw.sample(range(len(groups)), 2)
        if replicas[one] == 1:
            return None
        replicas[one], replicas[other] = replicas[one] - 1, replicas[other] + 1
    elif kind < 0.85 and len(groups) > 1:
        stage = draw.randrange(len(groups) - 1)
        replicas[stage : stage + 2] = [draw.choice([sum(replicas[stage : stage + 2]), replicas[stage]])]
        del cuts[stage + 1]
    elif kind < 0.95:
        stage = draw.randrange(len(groups))
        free = cluster.devices - sum(replicas)
        if cuts[stage + 1] - cuts[stage] < 2 or replicas[stage] + free < 2:
            return None
        first = draw.randint(1, max(1, replicas[stage] - 1))
        second = max(1, replicas[stage] - first)
        if first + second - replicas[stage] > free:
            return None
        replicas[stage : stage + 1] = [first, second]
        cuts.insert(stage + 1, draw.randrange(cuts[stage] + 1, cuts[stage + 1]))
    else:
        return arrange(cuts, groups, draw.choice(SINGLE), profile, cluster)
    groups, before = [], 0
    for own in replicas:
        groups.append(tuple(range(before, before + own)))
        before += own
    return arrange(cuts, groups, schedule, profile, cluster)
