"""Streamed stages: their weights are made, read, saved and loaded where they live."""

import os
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import PenstockError
from support.jobs.peak_jobs import SMALL, Alive, loss_fn, make_model
from support.live_tensors import live_tensors
from support.processes import Pool
from support.training import Case, Outcome, assert_equal, assert_ranks_equal, run_reference, train

FORM = replace(SMALL, blocks=3)
CASE = Case("layered", "breadth-first", 2, 4, "adamw", stages_per_rank=2)


def start(streamed: Any, place: Path | str, case: Case = CASE, **options: Any) -> penstock.Pipeline:
    given = {**case.options, **options}
    plan = replace(given["plan"], recompute=True, streamed=streamed)
    return penstock.Pipeline(case.build(), **{"check": "off", **given, "plan": plan}, offload_to=place)


@pytest.mark.parametrize("streamed", [True, (1, 2), False])
def test_a_checkpoint_is_that_of_any_residence(streamed: Any, tmp_path: Path) -> None:
    pipe = start(streamed, tmp_path)
    for batch in CASE.batches[:2]:
        pipe.step(*batch)
    path = pipe.save(tmp_path / "saved")
    pipe.save_weights(tmp_path / "weights")
    pipe.close()
    expected = run_reference(CASE)
    for other in (True, False):
        resumed = start(other, tmp_path)
        resumed.step(*CASE.batches[-1])
        resumed.load(path)
        found = train(resumed, CASE.batches[2:])
        assert_equal(Outcome(expected.losses[2:], expected.state), found)


def test_a_save_beside_the_training_has_the_state_at_its_step(tmp_path: Path) -> None:
    pipe = start(True, tmp_path)
    pipe.step(*CASE.batches[0])
    save = pipe.save(tmp_path / "saved", wait=False)
    for batch in CASE.batches[1:]:
        pipe.step(*batch)
    save.wait()
    pipe.close()
    resumed = start(True, tmp_path)
    resumed.load(tmp_path / "saved")
    expected = run_reference(CASE)
    assert_equal(Outcome(expected.losses[1:], expected.state), train(resumed, CASE.batches[1:]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda file, size: os.truncate(file, size - 1),
            r"{name}: expected {size} bytes, found {less}: it was cut off",
        ),
        (lambda file, size: file.write_bytes(file.read_bytes()[:-1] + b"x"), r"{name}: expected \S+ with the checksum"),
        (lambda file, size: file.unlink(), r"{name}: expected a readable file, found No such file"),
        (
            lambda file, size: rmtree(file.parent),
            "there is no checkpoint .no such directory.. Expected a directory that",
        ),
    ],
    ids=["shorter", "other bytes", "no file", "no directory"],
)
def test_a_damaged_checkpoint_changes_nothing(damage: Any, said: str, tmp_path: Path) -> None:
    pipe = start(True, tmp_path)
    pipe.step(*CASE.batches[0])
    path = pipe.save(tmp_path / "saved")
    pipe.step(*CASE.batches[1])
    file = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    size = file.stat().st_size
    damage(file, size)
    with pytest.raises(PenstockError, match=said.format(name=file.name, size=size, less=size - 1)):
        pipe.load(path)
    expected = run_reference(CASE)
    assert_equal(Outcome(expected.losses[2:], expected.state), train(pipe, CASE.batches[2:]))


def weightless(place: Path | str, init_fn: Any, streamed: bool = True) -> penstock.Pipeline:
    with torch.device("meta"):
        model = make_model(FORM)
    plan = penstock.Plan.uniform(6, 3, schedule="breadth-first", microbatches=2, stages_per_rank=3)
    return penstock.Pipeline(
        model,
        (torch.zeros(2, FORM.context, dtype=torch.int64),),
        loss_fn,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        plan=replace(plan, recompute=streamed, streamed=streamed),
        init_fn=init_fn(model),
        offload_to=place,
        check="off",
    )


def test_weights_are_made_and_read_at_home_one_by_one(tmp_path: Path) -> None:
    """Never is more in memory than a few tensors of the model."""
    names = ("made", "files")
    pipes = [weightless("host", penstock.reset_parameters, streamed=False)]
    pipes[0].save_weights(tmp_path / "weights")
    makers = (penstock.reset_parameters, lambda _: penstock.load_weights(tmp_path / "weights"))
    total = sum(parameter.nbytes for parameter in pipes[0].parameters())
    largest = max(parameter.nbytes for parameter in pipes[0].parameters())
    alive = Alive()
    alive.note(live_tensors())
    before = alive.peak
    for name, init_fn in zip(names, makers, strict=True):
        with alive:
            pipes.append(weightless(tmp_path, init_fn))
        assert not any(parameter.untyped_storage().resizable() for parameter in pipes[-1].parameters()), name
    assert alive.peak - before < 4 * largest < total / 2
    x = torch.randint(FORM.vocabulary, (4, FORM.context), generator=torch.Generator().manual_seed(1))
    found = [train(pipe, [(x, x), (x, x.flip(0))]) for pipe in pipes]
    for other in found[1:]:
        assert_equal(found[0], other)


def train_parts(place: str, case: Case, options: dict[str, Any]) -> list[Outcome]:
    """This process's part."""
    folder = Path(place)
    pipe = start(True, folder, case, **options)
    pipe.step(*case.batches[0])
    path = pipe.save(folder / "saved")
    pipe.close()
    pipe = start(True, folder, case, **options)
    pipe.load(path)
    loss = float(pipe.evaluate(*case.batches[0]).loss)
    return [replace(train(pipe, case.batches[1:]), evaluated=loss)]


def test_processes_equal_the_oracle(pool: Pool, tmp_path: Path) -> None:
    """With replicas, clipping and a save in between."""
    for number, replicas in enumerate(((), (2, 2))):
        # Without buffers: a save has those of the first replica alone.
        case, options = replace(CASE, subject="perceptron", replicas=replicas), {"clip_grad_norm": 0.1}
        folder = tmp_path / str(number)
        folder.mkdir()
        outcomes = pool.run(case.processes, train_parts, str(folder), case, options)
        expected = run_reference(case, **options)
        assert_ranks_equal(outcomes, [Outcome(expected.losses[1:], expected.state)])
        assert len({outcome.evaluated for (outcome,) in outcomes}) == 1
