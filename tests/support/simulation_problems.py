"""Random schedules, plans, profiles and clusters to simulate."""

from hypothesis import strategies as st

from penstock.scheduling.schedules import Schedule
from penstock.values.clusters import Cluster
from penstock.values.device_kinds import DeviceKind
from penstock.values.plans import Plan, Stage
from penstock.values.plans import schedule as schedule_of
from penstock.values.profiles import LayerProfile, Profile
from support.schedule_strategies import replicated_schedules, schedules

number = st.integers(0, 8).map(float)


speeds = st.sampled_from([0.5, 1.0, 2.0, 4.0, float("inf")])


def make_plan(draw: st.DrawFn, schedule: Schedule, layers: int) -> Plan:
    extra = sorted(draw(st.lists(st.integers(0, schedule.stages - 1), max_size=2)))[: layers - schedule.stages]
    lengths = [1 + extra.count(stage) for stage in range(schedule.stages)]
    lengths[-1] += layers - sum(lengths)
    cuts = [sum(lengths[:stage]) for stage in range(schedule.stages + 1)]
    stages = tuple(Stage(cuts[index], cuts[index + 1], ranks) for index, ranks in enumerate(schedule.placement.stages))
    return Plan(
        stages,
        schedule.method,
        schedule.microbatches,
        vertical_sync=schedule.vertical_sync,
        recompute=draw(st.booleans() | st.sets(st.integers(0, schedule.stages - 1)).map(tuple)),
        routing="split" if schedule.placement.split else "round-robin",
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Schedule, Plan, Profile, Cluster, int]:
    straight = schedules(most_ranks=4, most_microbatches=5)
    schedule = draw(st.one_of(straight, replicated_schedules(3, 4, 6)))
    layers = draw(
        st.lists(
            st.tuples(number, number, number, number, st.sampled_from([None, 0, 0.25, 1])),
            min_size=schedule.stages,
            max_size=schedule.stages + 2,
        )
    )
    profile = Profile(
        tuple(
            LayerProfile("", f, b, cut, 0, weights, weight_seconds=None if part is None else part * b)
            for f, b, cut, weights, part in layers
        ),
        8,
    )
    if draw(st.booleans()):
        cluster = Cluster.uniform(schedule.ranks, draw(speeds), latency_seconds=draw(number))
    else:
        rows = [[draw(speeds) for _ in range(schedule.ranks)] for _ in range(schedule.ranks)]
        delays = [[draw(number) for _ in range(schedule.ranks)] for _ in range(schedule.ranks)]
        cluster = Cluster.from_matrix(rows, latency_seconds=delays)
    if draw(st.booleans()):
        rates = st.sampled_from([0.5, 1.0, 2.0])
        cluster = cluster.with_kinds([DeviceKind(speed=draw(rates)) for _ in range(schedule.ranks)])
    plan = make_plan(draw, schedule, len(layers))
    return schedule_of(plan), plan, profile, cluster, draw(st.integers(1, 3))
