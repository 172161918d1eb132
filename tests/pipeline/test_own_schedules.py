"""A schedule that a user defines is proved, drawn, simulated, planned with, stored and trained like Penstock's own."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import PlanError, ScheduleError
from penstock.scheduling import (
    Compute,
    Drain,
    PipelineShape,
    ScheduleDefinition,
    Segment,
    Step,
    Update,
    VersionRule,
    define_by_programs,
    format_programs,
    parse_programs,
)
from penstock.scheduling.definitions import Entry
from penstock.values import Cluster, LayerProfile, Plan, Profile
from support.own_schedules import BY_HAND, EAGER, LATE, OWN, ROLLING, ROUNDS, make_local
from support.processes import Pool
from support.training import LAYERS, Case, Outcome, assert_equal, find_subject, run_pipeline, run_reference

CLUSTER = Cluster.uniform(2, 1e9)
PROFILE = Profile(tuple(LayerProfile(str(index), 1e-3, 2e-3, 1e3, 1e3, 1e3) for index in range(LAYERS)), 2)


def plan_of(schedule: ScheduleDefinition | str, ranks: int) -> penstock.Plan:
    """The layers of a subject on `ranks` ranks, four microbatches."""
    return penstock.Plan.uniform(LAYERS, ranks, schedule, 4)


def run_own(subject: str, name: str, ranks: int) -> Outcome:
    """Training under the schedule `name`, whose definition cannot be pickled."""
    return run_pipeline(Case(subject, "gpipe", ranks, 4, "adamw"), plan=plan_of(make_local(OWN[name]), ranks))


def run_planned(ranks: int) -> tuple[str, tuple[float, ...], dict[str, Any]]:
    """Training under a plan that the pipeline makes for a schedule: the schedule's name, the losses, and what the plan
    chose.
    """
    case = Case("layered", "gpipe", ranks, 4, "adamw")
    options = {**case.options, "schedule": make_local(EAGER), "microbatches": 4, "plan": "auto"}
    pipe = penstock.Pipeline(case.build(), **options)
    losses = tuple(float(pipe.step(x, y).loss) for x, y in case.batches)
    pipe.close()
    chosen = {name: getattr(pipe.plan, name) for name in ("stages", "routing", "recompute")}
    return str(pipe.plan.schedule), losses, chosen


def run_saved(ranks: int, directory: Path) -> list[float]:
    """Two steps under one schedule of one's own, and the others under another, from a checkpoint."""
    case = Case("layered", "gpipe", ranks, 4, "adamw")
    losses: list[float] = []
    for number, schedule in enumerate((EAGER, LATE)):
        pipe = penstock.Pipeline(case.build(), **{**case.options, "plan": plan_of(schedule, ranks)})
        if number:
            pipe.load(directory)
        handles = [pipe.step(x, y).loss for x, y in (case.batches[2:] if number else case.batches[:2])]
        pipe.save(directory)
        losses += map(float, handles)
        pipe.close()
    return losses


def disagree(rank_that_differs: int) -> str:
    """The error of a pipeline whose definitions have one name and different orders."""
    import torch.distributed as dist

    definition = EAGER if dist.get_rank() != rank_that_differs else replace(LATE, name=EAGER.name)
    subject = find_subject("layered")
    try:
        run_pipeline(Case("layered", "gpipe", 2, 4), plan=plan_of(definition, 2))
    except penstock.PlanError as error:
        return str(error)
    return f"{subject} trained"


def oracle(subject: str, definition: ScheduleDefinition, ranks: int) -> Outcome:
    return run_reference(Case(subject, "gpipe", ranks, 4, "adamw"), plan=plan_of(definition, ranks))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes_equal_the_oracle(pool: Pool, name: str, ranks: int) -> None:
    if OWN[name].programs and ranks != 2:
        pytest.skip("its programs are for two ranks")
    for subject in ("layered", "skipping"):
        for part in pool.run(ranks, run_own, subject, name, ranks):
            assert_equal(oracle(subject, OWN[name], ranks), part)


@pytest.mark.parametrize("definition", OWN.values(), ids=str)
def test_one_process_equals_the_oracle(definition: ScheduleDefinition) -> None:
    actual = run_pipeline(Case("layered", "gpipe", 2, 4, "adamw"), plan=plan_of(definition, 2))

    assert_equal(oracle("layered", definition, 2), actual)


def test_what_flushes_trains_as_one_device_does() -> None:
    plain = run_reference(Case("layered", "gpipe", 2, 4, "adamw"))

    for definition in (EAGER, BY_HAND, ROUNDS):
        assert_equal(plain, oracle("layered", definition, 2))
    assert oracle("layered", LATE, 2).losses == run_reference(Case("layered", "2bw", 2, 4, "adamw")).losses
    assert oracle("layered", ROLLING, 3).losses == run_reference(Case("layered", "pipedream", 3, 4, "adamw")).losses


@pytest.mark.parametrize("definition", OWN.values(), ids=str)
def test_it_is_proved_drawn_simulated_and_planned_with(definition: ScheduleDefinition) -> None:
    plan = penstock.plan(PROFILE, CLUSTER, schedule=definition, microbatches=4)
    made = penstock.schedule(plan)

    assert plan.schedule is definition
    assert plan.ranks == 2 and plan.predicted is not None
    assert penstock.verify(made).in_flight == made.guarantees.in_flight
    assert penstock.render(made).startswith(f"{definition}: ")
    # A schedule alone has stages of equally many layers.
    assert penstock.simulate(made, PROFILE, CLUSTER).seconds >= penstock.simulate(plan, PROFILE, CLUSTER).seconds > 0
    assert definition.name in plan.explain()


def test_a_planner_gives_it_as_many_ranks_as_it_takes() -> None:
    plan = penstock.plan(PROFILE, Cluster.uniform(4, 1e9), schedule=BY_HAND, microbatches=4)

    assert (plan.ranks, plan.replicas) == (2, (1, 1))


def test_a_plan_keeps_its_name(tmp_path: Path) -> None:
    plan, path = plan_of(LATE, 2), tmp_path / "plan.yaml"
    plan.save(path)

    assert Plan.load(path, schedule=LATE) == plan
    with pytest.raises(PlanError) as unknown:
        Plan.load(path)
    assert str(unknown.value) == (
        f"{path}: schedule: expected one of gpipe, 1f1b-flush, interleaved, spp, zb-h1, zb-v, v-half, v-min, "
        f"breadth-first, pipedream, 2bw, found "
        "'late'. Choose one of them, or if it is a schedule of your own give its definition: "
        "Plan.load(path, schedule=...)"
    )
    with pytest.raises(PlanError) as other:
        Plan.load(path, schedule=EAGER)
    assert str(other.value) == (
        f"{path}: schedule: expected 'eager', whose definition was given, found 'late': give the definition of 'late', "
        "or load a plan for 'eager'"
    )


@pytest.mark.parametrize("definition", [BY_HAND, ROUNDS], ids=str)
def test_a_plan_keeps_its_order(definition: ScheduleDefinition, tmp_path: Path) -> None:
    """The trainings of all own schedules run with what such a file gives back."""
    plan, path = plan_of(definition, 2), tmp_path / "plan.yaml"
    plan.save(path)

    assert plan.order == definition.programs and len(plan.order) == 2
    assert Plan.load(path) == Plan.load(path, schedule=definition) == plan
    assert Plan.load(path).definition is definition
    with pytest.raises(PlanError, match="order: expected the programs of eager, the definition that was given, found"):
        Plan.load(path, schedule=EAGER)


def written(path: Path, change: Callable[[str], str]) -> Path:
    """The file of a plan for `ROUNDS`, changed by hand."""
    path.write_text(change(plan_of(ROUNDS, 2).to_yaml()), encoding="utf-8")
    return path


def test_an_order_in_a_file_can_be_edited(tmp_path: Path) -> None:
    """Its name may be left out, messages may stand in it, and the part between the bars serves more microbatches."""
    path = tmp_path / "plan.yaml"
    unnamed = Plan.load(written(path, lambda text: text.replace('schedule: "rounds"\n', "")))
    with_messages = Plan.load(written(path, lambda text: text.replace("1F0@0 1B0@0 |", "1R0<0 1F0@0 1B0@0 1S0>0 |")))
    longer = Plan.load(written(path, lambda text: text.replace("microbatches: 4", "microbatches: 9")))

    assert str(unnamed.schedule) == "written" and unnamed.order == ROUNDS.programs
    assert with_messages == plan_of(ROUNDS, 2)
    assert longer.microbatches == 9
    computed = [str(action) for action in penstock.schedule(longer).step(0)[0] if isinstance(action, Compute)]
    repeated = [word for k in range(7) for word in (f"0F{k + 2}@0", f"0B{k}@0")]
    assert computed == ["0F0@0", "0F1@0", *repeated, "0B7@0", "0B8@0", "0U1<0"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("0B1@0 0B2@0 0U1", "0B2@0 0B1@0 0U1"), r">>0B3@0<<.*\n  expected: microbatch 2 first"),
        (
            ("0F2@0 0B0@0", "0F2@0"),
            "rank 0: expected the part between the bars to have 1 forwards .*found 1 forwards, 0",
        ),
        (("1F1@0 1B1@0 |", "1F1@0 1B1@0"), "rank 1: expected no bar, or two around the part that is repeated, found 1"),
        (("1F1@0 1B1@0", "1F1@0 1B1@0 1U1<0"), "and an update; move the bars"),
        (("0F0@0", "0G0@0"), "rank 0: cannot read the action '0G0@0'"),
        (("microbatches: 4", "microbatches: 2"), r"3 \(or 1 more, any number of times\) microbatches"),
        (('"rounds"', '"gpipe"'), "expected a definition with a name of its own"),
        (("1F0@0 1B0@0 |", "1F0@0 0B0@0 |"), "rank 1: expected .* as many backwards of stage 0"),
        # Far too large numbers: a file of 1 kB must not ask for gigabytes.
        (("0F0@0", f"0F0@{'0' * 5000}"), "rank 0: cannot read the action '0F0@0+: expected"),
        (("0F0@0", "0F\N{ARABIC-INDIC DIGIT ZERO}@0"), "rank 0: cannot read the action"),
        (("1F0@0", "1000000000F0@0"), "the stages from 0 to 1000000000, found none of 2; number the stages"),
        (("0F0@0", f"{'9' * 30}F0@0"), "the stages from 0 to 9+, found none of 2; number the stages"),
        (("0F2@0", "0F1000000000@0"), "the microbatches from 0 to 1000000000, found none of 3"),
        # Versions that would not run.
        (("0F2@0", "0F2@7"), "rank 0: expected 0F2@0, found 0F2@7: programs have the versions of the first minibatch"),
        (("0F2@0", "0F2@-1"), "rank 0: expected 0F2@0, found 0F2@-1"),
        (("1B1@0", "1B1@1"), "rank 1: expected 1B1@0, found 1B1@1"),
        (("0U1<0", "0U2<1"), "rank 0: expected 0U1<0, found 0U2<1"),
        (("0U1<0", "0U1<-1"), "rank 0: expected 0U1<0, found 0U1<-1"),
        (("0F0@0", "0F0@0 0H0+1000000000"), r"rank 0: expected 0H0\+6, found 0H0\+1000000000"),
    ],
)
def test_a_wrong_order_in_a_file_is_refused_with_the_rank_and_the_law(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    path = written(tmp_path / "plan.yaml", lambda text: text.replace(*change))
    with pytest.raises(PlanError, match=re.compile(said, re.DOTALL)) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_plan_made_with_a_definition_of_penstocks_own_is_the_same_as_by_name() -> None:
    from penstock.scheduling import METHODS

    for definition in METHODS:
        ranks = 2 if definition.layout.has_several else 4
        by_name = Plan.uniform(8, 4, definition.name, 4, 4 // ranks)

        assert Plan.uniform(8, 4, definition, 4, 4 // ranks) == by_name
        assert by_name.definition is definition


def test_checkpoints_go_from_one_to_another(pool: Pool, tmp_path: Path) -> None:
    together = pool.run(2, run_saved, 2, tmp_path / "together")

    assert together[0] == together[1] == run_saved(2, tmp_path / "alone")


def test_a_pipeline_plans_for_it(pool: Pool) -> None:
    """The oracle trains under the same plan: replicas that split microbatches have other random numbers."""
    (name, losses, chosen), other = pool.run(2, run_planned, 2)

    assert (name, losses, chosen) == other
    assert name == "eager"
    plan = replace(plan_of(EAGER, 2), **chosen)
    assert losses == run_reference(Case("layered", "gpipe", 2, 4, "adamw"), plan=plan).losses


def test_ranks_must_mean_the_same(pool: Pool) -> None:
    for message in pool.run(2, disagree, 1):
        assert "has a schedule 'eager' of programs and guarantees" in message


def forgetful(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
    """Without the last backward of the first stage."""
    actions = list(EAGER.order(shape, rank, segment))
    return iter([action for action in actions if not str(action).startswith("0B3@")])


def update_late(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
    """That of `EAGER`, whose updates are in the next step, or in a drain."""
    (stage,) = shape.stages_of(rank)
    made = segment.minibatch if isinstance(segment, Step) else segment.minibatches
    if made > 0:
        yield Update(stage, made, made - 1)
    yield from (entry for entry in EAGER.order(shape, rank, segment) if not isinstance(entry, Update))


WRONG: dict[str, tuple[Callable[[], ScheduleDefinition], str]] = {
    "a backward is missing": (
        lambda: replace(EAGER, order=forgetful),
        "schedule 'eager' violates an invariant: nothing is in flight after the drain: every forward had its backward\n"
        "  rank 0: ... 0S0>1 0F1@0 0S1>1 0F2@0 0S2>1 0R0<1 0B0@0 >>0F3@0<< 0S3>1 0R1<1 0B1@0 0R2<1 0B2@0 0U1<0 0F4@1 "
        "...\n"
        "  expected: a backward of microbatch 3 on stage 0 before the end\n"
        "  fix: let the step or the drain yield it",
    ),
    "more is in flight": (
        lambda: replace(EAGER, guarantees=lambda shape: replace(EAGER.guarantees(shape), in_flight=(2, 1))),
        "schedule 'eager' violates an invariant: activations in flight stay within the guarantee: at most 2 on stage "
        "0\n"
        "  rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 >>0F2@0<< 0S2>1 0R0<1 0B0@0 0F3@0 0S3>1 0R1<1 0B1@0 ...\n"
        "  expected: a backward first: 2 in flight already\n"
        "  fix: run a backward first, or guarantee more",
    ),
    "more is in flight on a rank": (
        lambda: replace(EAGER, guarantees=lambda shape: replace(EAGER.guarantees(shape), in_flight_of_rank=(3, 0))),
        "schedule 'eager' violates an invariant: activations in flight stay within the guarantee: at most 0 on all "
        "stages of a rank\n"
        "  rank 1: 1R0<0 >>1F0@0<< 1B0@0 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1R2<0 ...\n"
        "  expected: a backward first: 0 in flight already\n"
        "  fix: run a backward first, or guarantee more",
    ),
    "it flushes not": (
        lambda: replace(LATE, flushes=True),
        "schedule 'late' violates an invariant: a step carries the actions of its own minibatch, and a drain none\n"
        "  rank 0: ... 0S4>1 0F5@0 0S5>1 0F6@0 0S6>1 0F7@0 0S7>1 >>0R0<1<< 0B0@0 0R1<1 0B1@0 0R2<1 0B2@0 0R3<1 0B3@0 "
        "...\n"
        "  expected: in step(1) only microbatches 4 to 7\n"
        "  fix: yield it in the step that it belongs to",
    ),
    "its update is in the next step": (
        lambda: replace(EAGER, order=update_late),
        "schedule 'eager' violates an invariant: a step carries the actions of its own minibatch, and a drain none\n"
        "  rank 0: ... 0S3>1 0R1<1 0B1@0 0R2<1 0B2@0 0R3<1 0B3@0 >>0U1<0<< 0F4@1 0S4>1 0F5@1 0S5>1 0F6@1 0S6>1 0R4<1 "
        "...\n"
        "  expected: in step(1) only microbatches 4 to 7\n"
        "  fix: yield it in the step that it belongs to",
    ),
    "it has backwards in halves": (
        lambda: replace(BY_HAND, splits_backward=False),
        "schedule 'by hand': expected no pending weight backwards (splits_backward=False), found (0, 3); define it "
        "with splits_backward=True",
    ),
    "an update is not of a minibatch": (
        lambda: replace(ROLLING, updates_per_microbatch=False),
        "schedule 'rolling': expected updates of a minibatch, 4 microbatches, found updates of (1, 1); define it with "
        "updates_per_microbatch=True",
    ),
    "a number is missing": (
        lambda: replace(EAGER, guarantees=lambda shape: replace(EAGER.guarantees(shape), versions=(1,))),
        "schedule 'eager': guarantees.versions: expected 2 numbers (one per stage), found (1,); return one for each "
        "stage",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_schedule_is_refused_before_training(wrong: str) -> None:
    build, message = WRONG[wrong]

    with pytest.raises(ScheduleError) as caught:
        run_pipeline(Case("layered", "gpipe", 2, 4), plan=plan_of(build(), 2))
    assert str(caught.value) == message


def test_the_reference_refuses_delays_that_guarantees_do_not_say() -> None:
    wrong = replace(LATE, guarantees=lambda shape: replace(LATE.guarantees(shape), rule=VersionRule.OWN_MINIBATCH))

    with pytest.raises(ScheduleError, match="expected the forward of microbatch 4 on stage 0 to read version 1"):
        oracle("layered", wrong, 2)


def test_names_are_ones_own() -> None:
    with pytest.raises(PlanError, match="expected a definition with a name of its own, found ScheduleDefinition"):
        plan_of(replace(EAGER, name="gpipe"), 2)
    with pytest.raises(ScheduleError, match="ScheduleDefinition: expected a name, got ''"):
        replace(EAGER, name="")


def test_programs_come_back_from_their_text() -> None:
    """Messages in them are left out and derived again."""
    for name, ranks, per_rank in (("1f1b-flush", 3, 1), ("zb-v", 2, 2), ("interleaved", 2, 2)):
        made = penstock.Schedule(name, ranks, 4, per_rank)
        again = penstock.Schedule(define_by_programs("again", format_programs(made.step(0))), ranks, 4, per_rank)

        assert again.step(3) == made.step(3)
        assert again.drain(4) == made.drain(4)
        assert penstock.verify(again).in_flight == penstock.verify(made).in_flight == again.guarantees.in_flight
        assert again.definition.splits_backward == made.definition.splits_backward
        assert penstock.Schedule(define_by_programs("value", made.step(0)), ranks, 4, per_rank).step(3) == made.step(3)


def test_programs_run_with_their_own_numbers_only() -> None:
    with pytest.raises(ScheduleError) as caught:
        penstock.Schedule(BY_HAND, 2, 8)
    assert str(caught.value) == (
        "schedule 'by hand': expected 2 ranks, 2 stages without replicas and 4 microbatches, for which its programs "
        "are written, found 2 ranks, 2 stages (1-1 replicas) and 8 microbatches; plan for the programs, or write others"
    )
    with pytest.raises(ScheduleError, match=r"found \[1\] on rank 0, \[0\] on rank 1; number the stages so"):
        define_by_programs("turned", parse_programs("1F0@0 1B0@0 1U1<0\n0F0@0 0B0@0 0U1<0"))
    assert list(BY_HAND.order(PipelineShape(penstock.Schedule(BY_HAND, 2, 4).placement, 4), 0, Drain(1))) == []
