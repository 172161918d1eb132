"""Algorithm 1 of SPP (Luo et al., INFOCOM 2022), written from the paper alone: an oracle for plans and schedules.

A plan is here a list of (start, stop, devices) with layers as tuples (forward, backward, bytes over the cut behind,
weights) and a function (a, b) -> bandwidth. It shares no code with the planner, the schedule or the simulator.
"""

from collections import deque
from itertools import pairwise


def execution_orders(stages, microbatches):
    """(Orders, passes): U_s of every stage as (kind, microbatch), from queues as they were at the start of a pass."""
    blocks = [(kind, s) for s in range(stages - 1) for kind in ("F", "CF")]
    blocks += [("FB", stages - 1)]
    blocks += [(kind, s) for s in reversed(range(stages - 1)) for kind in ("CB", "B")]
    assert len(blocks) == 4 * stages - 3
    queues = [deque() for _ in blocks]
    queues[0].extend(range(microbatches))
    orders = [[] for _ in range(stages)]
    passes = 0
    while any(queues):
        passes += 1
        for j in [j for j, queue in enumerate(queues) if queue]:
            microbatch = queues[j].popleft()
            if j + 1 < len(blocks):
                queues[j + 1].append(microbatch)
            kind, s = blocks[j]
            if kind in ("F", "B"):
                orders[s].append((kind, microbatch))
            elif kind == "FB":
                orders[s] += [("F", microbatch), ("B", microbatch)]
    return orders, passes


def makespan(orders, forward, backward, there, back, reduce):
    """Seconds until the first stage is done and every stage's gradients are summed up.

    Each stage follows its order strictly; a message starts when its channel is free, one channel per direction.
    """
    stages = len(orders)
    microbatches = sum(kind == "F" for kind, _ in orders[0])
    ready = {("F", 0, k): 0.0 for k in range(microbatches)}
    free = [0.0] * stages
    channels = {}
    waiting = [deque(order) for order in orders]
    progress = True
    while progress:
        progress = False
        for s, queue in enumerate(waiting):
            while queue and (queue[0][0], s, queue[0][1]) in ready:
                kind, k = queue.popleft()
                progress = True
                begin = max(free[s], ready[kind, s, k])
                free[s] = end = begin + (forward[s] if kind == "F" else backward[s])
                if kind == "F" and s == stages - 1:
                    ready["B", s, k] = end
                else:
                    target, seconds = (s + 1, there[s]) if kind == "F" else (s - 1, back[s - 1] if s else 0.0)
                    # Messages of one channel leave in the order of their stage, so that this order of visits is right.
                    arrival = max(end, channels.get((s, target), 0.0)) + seconds
                    channels[s, target] = arrival
                    ready[kind, target, k] = arrival
    assert not any(waiting)
    return max(free[0], max(end + seconds for end, seconds in zip(free, reduce, strict=True)))


def plan_costs(layers, plan, bandwidth):
    """(forward, backward, there, back, reduce) of every stage or cut, as section III-B defines them."""
    forward = [sum(layers[i][0] for i in range(a, b)) / len(devices) for a, b, devices in plan]
    backward = [sum(layers[i][1] for i in range(a, b)) / len(devices) for a, b, devices in plan]
    reduce = []
    for a, b, devices in plan:
        k = len(devices)
        links = [bandwidth(v, w) for v in devices for w in devices if v != w]
        weights = sum(layers[i][3] for i in range(a, b))
        reduce.append(2 * (k - 1) * weights / (k * min(links)) if k > 1 else 0.0)
    there, back = [], []
    for (_, cut, one), (_, _, other) in pairwise(plan):
        size = layers[cut - 1][2] / (len(one) * len(other))
        there.append(size / min(bandwidth(v, w) for v in one for w in other))
        back.append(size / min(bandwidth(w, v) for v in one for w in other))
    return forward, backward, there, back, reduce


def busiest(layers, plan, bandwidth, microbatches):
    """W: the most that one stage or channel works in a whole minibatch."""
    forward, backward, there, back, reduce = plan_costs(layers, plan, bandwidth)
    stages = [microbatches * (f + b) + a for f, b, a in zip(forward, backward, reduce, strict=True)]
    return max([*stages, *(microbatches * (one + other) for one, other in zip(there, back, strict=True))])


def lemma_1(costs, microbatches):
    """The bound (1 + (4|S| - 4) / M) M C + max A."""
    forward, backward, there, back, reduce = costs
    slowest = max([f + b for f, b in zip(forward, backward, strict=True)])
    slowest = max([slowest, *(one + other for one, other in zip(there, back, strict=True))])
    return (microbatches + 4 * len(forward) - 4) * slowest + max(reduce)


def execute(layers, plan, bandwidth, microbatches):
    """T_PE of a plan."""
    orders, _ = execution_orders(len(plan), microbatches)
    return makespan(orders, *plan_costs(layers, plan, bandwidth))
