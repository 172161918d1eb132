"""Every field and argument of the fleet that is None, or of another type, is refused with its name."""

from dataclasses import fields
from typing import Any

import pytest

from penstock import PlanError
from penstock.fleet import (
    Allocation,
    Arrival,
    Entity,
    Job,
    Kind,
    Machines,
    ModelJob,
    PriceHistory,
    Problem,
    RoundScheduler,
    max_min_fairness,
    simulate_fleet,
    throughput_table,
)

JOB, KIND = Job("a", 1.0), Kind("GPU", 1)
PROBLEM = Problem((JOB,), (KIND,), ((1.0,),))
VALUES = (
    JOB,
    KIND,
    Entity("a"),
    PROBLEM,
    Arrival(0.0, JOB, (1.0,)),
    Machines(KIND),
    ModelJob(JOB, measured={"GPU": 1.0}),
    PriceHistory({"GPU": ((0.0, 1.0),)}),
    Allocation(PROBLEM, ((1.0,),), "mine"),
)
OPTIONAL_FIELDS = {
    "deadline_seconds",
    "workers_per_server",
    "preempted_every_seconds",
    "memory_bytes",
    "profile",
    "budget",
}
OPTIONAL_ARGUMENTS = {"reset_rounds", "watched", "prices", "pairs", "budget"}
"""What None leaves out."""


@pytest.mark.parametrize("value", VALUES, ids=[type(value).__name__ for value in VALUES])
def test_fields_of_another_type_are_refused(value):
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    for name in given:
        for wrong in (object(), *([] if name in OPTIONAL_FIELDS else [None])):
            with pytest.raises(PlanError, match=r"expected .*, found "):
                type(value)(**{**given, name: wrong})
        if name in OPTIONAL_FIELDS:
            type(value)(**{**given, name: None})


SIMULATED: dict[str, Any] = {
    "workload": [Arrival(0.0, JOB, (1.0,))],
    "kinds": [KIND],
    "policy": max_min_fairness,
    "round_seconds": 360.0,
    "restart_seconds": 5.0,
    "reset_rounds": 1,
    "watched": range(1),
    "entities": (),
    "prices": PriceHistory({"GPU": ((0.0, 1.0),)}),
    "pairs": {},
    "seed": 0,
    "ideal": False,
    "record": False,
    "budget": 9.0,
}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (simulate_fleet, SIMULATED),
        (throughput_table, {"jobs": [VALUES[6]], "machines": [VALUES[5]]}),
        (RoundScheduler, {"kinds": [KIND]}),
        (RoundScheduler([KIND]).begin, {"allocation": VALUES[8]}),
    ],
)
def test_arguments_of_another_type_are_refused(function, arguments):
    function(**arguments)
    for name in arguments:
        for wrong in ([None], object(), *([] if name in OPTIONAL_ARGUMENTS else [None])):
            with pytest.raises(PlanError, match=rf"{name}.*: expected .*, found "):
                function(**{**arguments, name: wrong})


def test_a_job_has_a_throughput_for_every_kind():
    wrongs: tuple[Any, ...] = (None, -1.0, "fast")
    for wrong in wrongs:
        with pytest.raises(PlanError, match=r"throughputs of 'a'\[0\]: expected a finite number of steps per second"):
            Arrival(0.0, JOB, (wrong,))
    with pytest.raises(PlanError, match=r"throughputs of 'a': expected 2 numbers .one per kind., found 1"):
        simulate_fleet(SIMULATED["workload"], [KIND, Kind("TPU", 1)], max_min_fairness)
