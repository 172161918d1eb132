"""Saves without a stop: neither the run that is saved nor the one that resumes differs by a bit from one without."""

from functools import cache
from pathlib import Path

import pytest

import penstock
from support.jobs.snapshot_jobs import Cut, run_cut, run_cuts
from support.processes import Pool
from support.training import Case, Outcome, assert_equal

SCHEDULES = ("1f1b-flush", "pipedream", "vertical", "2bw")
CUTS = [
    *(Cut(Case("skipping", schedule, 3, 5, "adamw"), 3, again=1) for schedule in SCHEDULES),
    *(Cut(Case("normalized", schedule, 3, 3), 1, again=2) for schedule in SCHEDULES),
    *(Cut(Case("layered", schedule, 4, 1), steps) for schedule in ("pipedream", "vertical") for steps in (1, 5)),
    Cut(Case("layered", "2bw", 1, 4), 2),
    *(Cut(Case("layered", schedule, 2, 4, replicas=(2, 1)), 2) for schedule in ("1f1b-flush", "pipedream", "2bw")),
    *(Cut(Case("layered", schedule, 2, 4, replicas=(1, 2), split=True), 2) for schedule in ("pipedream", "2bw")),
]
RECIPES = [
    *(Cut(Case("layered", "pipedream", 4, 1), 5, recipe) for recipe in ("clipped", "scheduled and scaled", "several")),
    *(Cut(Case("layered", "2bw", 3, 4), 3, recipe) for recipe in ("scaled and clipped", "scheduled", "own")),
    Cut(Case("layered", "vertical", 3, 2), 2, "several"),
    Cut(Case("layered", "1f1b-flush", 3, 4), 3, "own"),
    Cut(Case("layered", "1f1b-flush", 2, 4), 3, "scheduled and scaled"),
    *(Cut(Case("layered", "pipedream", 4, 1), 1, recipe) for recipe in ("clipped", "hooked and clipped")),
    *(Cut(Case("layered", schedule, 2, 4, replicas=(2, 2)), 3, "clipped") for schedule in ("pipedream", "2bw")),
]
APART = {
    2: [Cut(Case("layered", "1f1b-flush", 2, 4, "adamw"), 3), Cut(Case("normalized", "2bw", 2, 4), 3, "clipped")],
    3: [
        Cut(Case("normalized", "pipedream", 3, 4, "adamw"), 2, again=1),
        Cut(Case("layered", "vertical", 3, 1), 2),
        Cut(Case("layered", "pipedream", 2, 4, replicas=(2, 1)), 2),
    ],
}


@cache
def reference(case: Case, recipe: str) -> Outcome:
    cut = Cut(case, 0, recipe)
    found = penstock.reference_train(case.build(), cut.batches, **cut.options)
    return Outcome(found.losses, found.state)


def assert_exact(cut: Cut, whole: Outcome, resumed: Outcome) -> None:
    expected = reference(cut.case, cut.recipe)
    assert_equal(expected, whole)
    assert_equal(Outcome(expected.losses[cut.steps + cut.again :], expected.state), resumed)


def ident(cut: Cut) -> str:
    case = cut.case
    form = f"{case.schedule}-{case.ranks}-{case.microbatches}-{case.replicas}".replace(" ", "")
    return f"{case.subject}-{form}-{cut.recipe}-after-{cut.steps}-and-{cut.again}"


@pytest.mark.parametrize("cut", CUTS + RECIPES, ids=ident)
def test_neither_run_differs_from_one_that_is_not_saved(cut: Cut, tmp_path: Path) -> None:
    assert_exact(cut, *run_cut(cut, str(tmp_path / "saved")))


@pytest.mark.parametrize("ranks", APART)
def test_several_processes(pool: Pool, ranks: int, tmp_path: Path) -> None:
    for cut, parts in zip(
        APART[ranks], zip(*pool.run(ranks, run_cuts, APART[ranks], str(tmp_path)), strict=True), strict=True
    ):
        for whole, resumed in parts:
            assert_exact(cut, whole, resumed)
