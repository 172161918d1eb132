"""Random profiles, clusters and plans for the laws of the values and the planners."""

from dataclasses import replace

from hypothesis import strategies as st

from penstock.values import Cluster, DeviceKind, LayerProfile, LinkLevels, LinkMatrix, Plan, Prediction, Profile, Stage
from penstock.values.link_tables import MessageCosts

seconds = st.floats(0, 1e3, allow_nan=False)
sizes = st.one_of(st.integers(0, 10**12), st.floats(0, 1e12, allow_nan=False))
names = st.text(max_size=12)


@st.composite
def layer_profiles(draw):
    backward = draw(seconds)
    part = draw(st.one_of(st.none(), st.floats(0, backward)))
    return LayerProfile(
        draw(names), draw(seconds), backward, draw(sizes), draw(sizes), draw(sizes), draw(sizes), weight_seconds=part
    )


@st.composite
def profiles(draw):
    layers = draw(st.lists(layer_profiles(), min_size=1, max_size=6))
    noted = draw(st.one_of(st.just((0.0, 1.0)), st.tuples(sizes, st.floats(1, 100))))
    made = Profile(tuple(layers), draw(st.integers(1, 4096)), draw(names), draw(names), (), *noted)
    known = made.device
    for device in draw(st.lists(names.filter(lambda name: name != known), max_size=2, unique=True)):
        factor = draw(st.floats(1e-3, 1e3))
        made = made.joined(replace(made.on(DeviceKind(made.device, factor)), device=device))
    return made


bandwidths = st.floats(1e-3, 1e15)
memories = st.one_of(st.none(), st.floats(1, 1e15))


latencies = st.one_of(st.just(0.0), st.floats(0, 10))


@st.composite
def kinds(draw):
    speed = draw(st.one_of(st.just(1.0), st.floats(1e-3, 1e3)))
    return DeviceKind(draw(names), speed, draw(memories), draw(st.one_of(st.just(0.0), st.floats(0, 100))))


@st.composite
def clusters(draw):
    """Clusters of equal devices or of several kinds, whose messages may take time of the ranks."""
    cluster = draw(free_clusters())
    if draw(st.booleans()):
        return cluster
    costs = st.builds(MessageCosts, latencies, latencies, st.floats(0, 1))
    links: LinkLevels | LinkMatrix = cluster.links
    match links:
        case LinkLevels(levels=levels):
            some = st.lists(costs, min_size=len(levels), max_size=len(levels)).map(tuple)
            links = replace(links, message_costs=draw(some))
        case LinkMatrix(rows=rows):
            row = st.lists(costs, min_size=len(rows), max_size=len(rows)).map(tuple)
            links = replace(links, cost_rows=draw(st.lists(row, min_size=len(rows), max_size=len(rows)).map(tuple)))
    return replace(cluster, links=links, action_seconds=draw(latencies), step_seconds=draw(latencies))


@st.composite
def free_clusters(draw):
    """Clusters whose messages take no time of the ranks."""
    links = draw(_linked())
    if draw(st.booleans()):
        return links
    known = draw(st.lists(kinds(), min_size=1, max_size=3))
    return links.with_kinds([draw(st.sampled_from(known)) for _ in range(links.devices)])


@st.composite
def _linked(draw):
    if draw(st.booleans()):
        levels = draw(st.lists(st.tuples(st.integers(1, 8), bandwidths), min_size=1, max_size=3))
        some = st.one_of(latencies, st.lists(latencies, min_size=len(levels), max_size=len(levels)))
        return Cluster.hierarchical(levels, draw(memories), draw(some))
    size = draw(st.integers(1, 4))

    def matrix(values):
        return st.lists(st.lists(values, min_size=size, max_size=size), min_size=size, max_size=size)

    some = st.one_of(latencies, matrix(latencies))
    return Cluster.from_matrix(draw(matrix(bandwidths)), draw(memories), draw(some))


def _devices(ranks):
    """No devices, or one for every rank, of a cluster that may have more."""
    some = st.lists(st.integers(0, 2 * ranks), min_size=ranks, max_size=ranks, unique=True)
    return st.one_of(st.just(()), some.map(tuple))


@st.composite
def predictions(draw, ranks):
    values = st.floats(0, allow_nan=False)
    peaks = draw(st.lists(values, min_size=ranks, max_size=ranks))
    limit = draw(st.one_of(st.just(""), names))
    return Prediction(draw(values), draw(values), draw(values), tuple(peaks), draw(st.floats(0, 1)), limit)


@st.composite
def plans(draw):
    """Straight and replicated plans, and such of several stages per rank, with and without a prediction."""
    folded = ("zb-v", "v-half", "v-min")
    names = ["gpipe", "1f1b-flush", "interleaved", "spp", "zb-h1", *folded, "pipedream", "2bw"]
    schedule = draw(st.sampled_from(names))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    parallel = draw(st.integers(1, 2))
    if schedule in ("interleaved", *folded):
        if schedule in folded:
            lengths += lengths[:1] if len(lengths) % 2 else []
        divisors = [p for p in range(1, len(lengths) + 1) if len(lengths) % p == 0]
        around = len(lengths) // 2 if schedule in folded else draw(st.sampled_from(divisors))
        replicas = draw(st.integers(1, 3))
        groups = around * replicas
        dealt = draw(st.permutations(range(groups)))
        at = [tuple(dealt[place * replicas : (place + 1) * replicas]) for place in range(around)]
        holders = [*at, *at[::-1]] if schedule in folded else [at[stage % around] for stage in range(len(lengths))]
    else:
        replicas = [draw(st.integers(1, 3)) for _ in lengths]
        groups = sum(replicas)
        dealt = iter(draw(st.permutations(range(groups))))
        holders = [tuple(next(dealt) for _ in range(count)) for count in replicas]
    stages, start = [], 0
    for length, holder in zip(lengths, holders, strict=True):
        ranks = [group * parallel + member for group in holder for member in range(parallel)]
        stages.append(Stage(start, start + length, tuple(ranks)))
        start += length
    return Plan(
        tuple(stages),
        schedule,
        draw(st.integers(1, 64)),
        draw(st.one_of(st.none(), st.integers(1, 64))),
        draw(st.booleans()),
        draw(st.booleans() | st.sets(st.integers(0, len(stages) - 1)).map(tuple)),
        draw(st.one_of(st.none(), predictions(groups * parallel))),
        draw(st.sampled_from(["round-robin", "split"])),
        parallel,
        devices=draw(_devices(groups * parallel)),
    )
