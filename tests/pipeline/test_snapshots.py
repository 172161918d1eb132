"""Saves without a stop: neither the run that is saved nor the one that resumes differs by a bit from one without."""

from functools import cache
from pathlib import Path

import penstock
import pytest

from support.jobs.snapshot_jobs import Cut, run_cut
from support.training import Case, Outcome, assert_equal

SCHEDULES = ("1f1b-flush", "pipedream", "vertical", "2bw")
CUTS = [
    *(Cut(Case("layered", schedule, ranks, 4, "adamw"), 2) for schedule in SCHEDULES for ranks in (1, 2, 4)),
    *(Cut(Case("layered", schedule, 4, 1), steps) for schedule in ("pipedream", "vertical") for steps in (1, 2, 5)),
    *(Cut(Case("normalized", schedule, 3, 4), 3) for schedule in SCHEDULES),
    *(Cut(Case("skipping", schedule, 3, 5, "adamw"), 3, again=1) for schedule in SCHEDULES),
    *(Cut(Case("layered", schedule, 3, 3), 1, again=2) for schedule in SCHEDULES),
    *(Cut(Case("layered", schedule, 2, 4, replicas=(2, 1)), 2) for schedule in ("pipedream", "2bw")),
    *(Cut(Case("layered", schedule, 2, 4, replicas=(1, 2), split=True), 2) for schedule in ("pipedream", "2bw")),
]
RECIPES = [
    *(
        Cut(Case("layered", schedule, 3, 4), 3, recipe)
        for schedule in SCHEDULES
        for recipe in ("prediction", "several", "own", "clipped", "scaled and clipped", "scheduled and scaled")
    ),
    *(
        Cut(Case("layered", "pipedream", 4, 1), steps, recipe)
        for steps in (1, 3, 7)
        for recipe in ("clipped", "scheduled and scaled")
    ),
    *(
        Cut(Case("layered", schedule, 2, 4, replicas=(2, 2)), 3, recipe)
        for schedule in ("pipedream", "2bw")
        for recipe in ("clipped", "scaled", "hooked and clipped")
    ),
]


@cache
def reference(case: Case, recipe: str) -> Outcome:
    cut = Cut(case, 0, recipe)
    found = penstock.reference_train(case.build(), cut.batches, **cut.options)
    return Outcome(found.losses, found.state)


def assert_exact(cut: Cut, whole: Outcome, resumed: Outcome) -> None:
    expected = reference(cut.case, cut.recipe)
    assert_equal(expected, whole)
    assert_equal(Outcome(expected.losses[cut.steps + cut.again :], expected.state), resumed)


@pytest.mark.parametrize("cut", CUTS + RECIPES, ids=str)
def test_neither_run_differs_from_one_that_is_not_saved(cut: Cut, tmp_path: Path) -> None:
    assert_exact(cut, *run_cut(cut, str(tmp_path / "saved")))
