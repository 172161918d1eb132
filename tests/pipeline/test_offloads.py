"""Microbatches that are offloaded train as the oracle does, under every kind of schedule, and their memory is free."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import penstock
from penstock import Plan
from penstock.errors import PenstockError, PlanError
from penstock.scheduling import define_by_programs
from support.jobs.peak_jobs import Training, fused, held_by_counter, loss_fn, make_model, peaks_by_counter, run
from support.live_tensors import forget_what_is_there
from support.own_schedules import offloading
from support.processes import Pool
from support.training import LAYERS, Case, Outcome, assert_equal, run_pipeline, run_reference

BY_HAND = """
    rank 0: 0F0@0 0H0 0F1@0 0H1 | 0F2@0 0H2 0D0 0B0@0 | 0D1 0B1@0 0D2 0B2@0 0U1<0
    rank 1: 1F0@0 1I0@0 1F1@0 1H1 | 1W0@0 1F2@0 1H2 1D1 1I1@0 | 1D2 1W1@0 1I2@0 1W2@0 1U1<0
"""
CASES = {
    **{name: Case("layered", name, 3, 4, "adamw") for name in ("1f1b-flush", "zb-h1", "pipedream")},
    "zb-v": Case("layered", "zb-v", 2, 4, "adamw", stages_per_rank=2),
    "2bw": Case("normalized", "2bw", 2, 4),
    "skips": Case("skipping", "1f1b-flush", 4, 4),
    "turns": Case("layered", "pipedream", 2, 4, replicas=(2, 1)),
    "split": Case("normalized", "1f1b-flush", 2, 4, replicas=(1, 2), split=True),
}


def offloaded(case: Case) -> Plan:
    """The plan of `case`, which offloads every microbatch of every stage."""
    plan: Plan = case.options["plan"]
    return replace(plan, schedule=offloading(plan.definition))


def run_offloaded(case: Case, **options: Any) -> Outcome:
    return run_pipeline(case, plan=offloaded(case), **options)


def test_an_order_in_a_file_equals_the_oracle(tmp_path: Path) -> None:
    plan = Plan.uniform(LAYERS, 2, define_by_programs("by hand", BY_HAND), 4)
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    case = Case("layered", "gpipe", 2, 4, "adamw")

    assert loaded == plan
    assert "0D2" in (tmp_path / "plan.yaml").read_text()
    assert_equal(run_reference(case, plan=plan), run_pipeline(case, plan=loaded, offload_to=tmp_path))


def test_recomputation_of_other_stages_equals_the_oracle() -> None:
    case = Case("layered", "gpipe", 2, 4, "adamw")
    text = "rank 0: 0F0@0 0F1@0 0F2@0 0F3@0 0B0@0 0B1@0 0B2@0 0B3@0 0U1<0\n"
    text += "rank 1: 1F0@0 1H0 1F1@0 1H1 1F2@0 1F3@0 1D0 1B0@0 1D1 1B1@0 1B2@0 1B3@0 1U1<0"
    plan = Plan.uniform(LAYERS, 2, define_by_programs("by hand", text), 4)

    assert_equal(run_reference(case), run_pipeline(case, plan=plan, recompute={0}))
    with pytest.raises(PlanError, match=r"stage 1 is to be recomputed, and the schedule offloads.*1H\.\.\."):
        penstock.Pipeline(case.build(), **{**case.options, "plan": plan}, recompute=True)


class Watching(nn.Module):
    """Notes which activations of earlier forwards are in memory when a forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.made: list[StorageWeakRef] = []
        self.held: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.held.append(sum(not one.expired() for one in self.made))  # type: ignore[no-untyped-call]
        hidden = self.linear(x).exp()
        self.made.append(StorageWeakRef(hidden.untyped_storage()))  # type: ignore[no-untyped-call]
        return self.linear(hidden.sin())


@pytest.mark.parametrize(
    ("behind", "held"), [(0, [0, 1, 2, 3]), (1, [0, 0, 0, 0]), (2, [0, 1, 1, 1]), (3, [0, 1, 2, 2])]
)
def test_the_memory_is_free_for_the_forward_that_the_order_names(tmp_path: Path, behind: int, held: list[int]) -> None:
    """Without offloads if none is named."""
    model = Watching()
    sample = torch.randn(2, 32), torch.randn(2, 32)
    row = " ".join(f"0F{k}@0 0H{k}+{behind}" for k in range(4)) + " " + " ".join(f"0D{k} 0B{k}@0" for k in range(4))
    order = define_by_programs("by hand", f"{row} 0U1<0") if behind else "gpipe"
    pipe = penstock.Pipeline(
        nn.Sequential(model),
        sample=sample[:1],
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        plan=Plan.uniform(1, 1, order, 4),
        offload_to=tmp_path,
        check="off",
    )
    model.made, model.held = [], []
    pipe.step(torch.randn(8, 32), torch.randn(8, 32))
    pipe.close()

    assert model.held == held


def fail(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("the data are gone")


def test_a_failed_step_leaves_no_file_behind(tmp_path: Path) -> None:
    case = CASES["skips"]

    options = {**case.options, "plan": offloaded(case), "loss_fn": fail, "check": "off"}
    pipe = penstock.Pipeline(case.build(), **options, offload_to=tmp_path)
    with pytest.raises(ValueError, match="the data are gone"):
        pipe.step(*case.batches[0])
    pipe.close()

    assert not list(tmp_path.iterdir())


def test_a_wrong_place_is_refused(tmp_path: Path) -> None:
    case = CASES["pipedream"]
    with pytest.raises(PenstockError, match=r"\(offload_to=\): expected 'host' or a directory, found 3"):
        run_offloaded(case, offload_to=3)
    # The first would be the present directory.
    for wrong in ("", "a\0b", b"a"):
        with pytest.raises(PenstockError, match=r"\(offload_to=\): expected 'host' or a directory, found"):
            run_offloaded(case, offload_to=wrong)
    with pytest.raises(PenstockError, match=r"\(resume=\): expected a directory, found 'a.*': give the directory"):
        run_offloaded(case, resume="a\0b")
    with pytest.raises(PenstockError, match="expected a directory that this process can write in"):
        run_offloaded(case, offload_to=tmp_path / "none")


ROWS = (
    "0F0@0 0H0 0F1@0 0H1 0F2@0 0F3@0 0D0 0B0@0 0D1 0B1@0 0B2@0 0B3@0 0U1<0",
    "0F0@0 0H0 0F1@0 0H1 0F2@0 0H2 0F3@0 0H3 0D0 0B0@0 0D1 0B1@0 0D2 0B2@0 0D3 0B3@0 0U1<0",
)


def measure_rows(directory: Path) -> list[tuple[float, float]]:
    """The bytes at the peak of each of `ROWS`, predicted and measured."""
    training = Training("gpipe")
    profile, (tokens, target) = training.profile(), training.batch()
    found: list[tuple[float, float]] = []
    cluster = replace(penstock.Cluster.uniform(1, 1e9), host_bandwidth=1e13)
    for row in ROWS:
        plan = Plan.uniform(len(profile.layers), 1, define_by_programs("by hand", row), 4)
        forget_what_is_there()
        before = held_by_counter(training.place)["allocated"]
        sample = (training.batch(1)[0],)
        pipe = penstock.Pipeline(
            make_model(training.form), sample, loss_fn, fused, plan=plan, offload_to=directory, check="off"
        )
        run(pipe, tokens, target, 1)
        peaks = peaks_by_counter(training.place, partial(run, pipe, tokens, target, 1))
        predicted = penstock.simulate(plan, profile, cluster).memory[0].peak_bytes
        found.append((predicted, peaks["allocated"] - before))
        pipe.close()
        del pipe
    return found


def test_peaks_are_as_predicted(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(1, measure_rows, tmp_path)
    for predicted, measured in found:
        assert predicted == pytest.approx(measured, rel=0.02)
