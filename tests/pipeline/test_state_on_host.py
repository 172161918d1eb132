"""The optimizer's state and weight versions that are on the host: the numbers of the oracle, and less memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import PenstockError
from penstock.runtime.devices.host_copies import ThreadStaging
from penstock.runtime.devices.staging import Staged, layout_of, on_host
from penstock.runtime.parameters.version_slots import Window
from support.jobs.peak_jobs import Training, measure_peaks
from support.optimizers import GlobalNorm, GroupCounter, OwnCounter
from support.processes import Pool
from support.training import Case, Outcome, assert_equal, run_pipeline, run_reference, train

CASES = {
    **{name: Case("layered", name, 3, 4, "adamw") for name in ("1f1b-flush", "zb-h1", "pipedream", "vertical")},
    "zb-v": Case("layered", "zb-v", 2, 4, stages_per_rank=2),
    "2bw": Case("normalized", "2bw", 3, 4),
    "skips": Case("skipping", "2bw", 4, 4, "adamw", drain_after=(1,)),
    "turns": Case("layered", "pipedream", 2, 4, "adamw", replicas=(2, 1)),
    "split": Case("normalized", "2bw", 2, 4, replicas=(1, 2), split=True),
}


def run_on_host(case: Case, **options: Any) -> Outcome:
    return run_pipeline(case, state_on_host=True, **options)


@pytest.mark.parametrize("moved", [True, False])
def test_checkpoints_are_those_without_it(moved: bool, tmp_path: Path) -> None:
    case, files = CASES["1f1b-flush"], []

    def start(moved: bool) -> penstock.Pipeline:
        return penstock.Pipeline(case.build(), **case.options, check="off", state_on_host=moved, offload_to=tmp_path)

    for number, kept in enumerate((moved, not moved)):
        pipe = start(kept)
        for batch in case.batches[:2]:
            pipe.step(*batch)
        path = pipe.save(tmp_path / str(number))
        files.append({each.name: each.read_bytes() for each in path.glob("*.safetensors")})
        pipe.close()
    assert files[0] == files[1] != {}
    pipe = start(not moved)
    pipe.step(*case.batches[-1])
    pipe.load(tmp_path / "0")
    expected = run_reference(case)
    assert_equal(Outcome(expected.losses[2:], expected.state), train(pipe, case.batches[2:]))


def test_the_state_is_readable_where_it_always_is_and_in_files(tmp_path: Path) -> None:
    case, found = CASES["2bw"], []
    options: list[dict[str, Any]] = [{}, {"state_on_host": True, "offload_to": tmp_path}]
    for given in options:
        pipe = penstock.Pipeline(case.build(), **case.options, **given)
        losses = [float(call(*batch).loss) for batch in case.batches for call in (pipe.step, pipe.evaluate)]
        buffers = [state["momentum_buffer"] for one in pipe.optimizers for state in one.state.values()]
        assert {not buffer.untyped_storage().resizable() for buffer in buffers} == {bool(given)}
        found.append((losses, [buffer.tolist() for buffer in buffers], pipe.state_dict()["optimizer"]["options"]))
        pipe.close()

    assert found[0] == found[1]


def test_weights_that_are_written_between_steps_are_those_that_train(tmp_path: Path) -> None:
    """The newest version is on the device then: an older one is read before the newest, and must not undo it."""
    case = CASES["pipedream"]

    def run(**options: Any) -> Outcome:
        pipe = penstock.Pipeline(case.build(), **case.options, check="off", **options)
        pipe.step(*case.batches[0])
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.mul_(0.9)
        return train(pipe, case.batches[1:])

    assert_equal(run(), run(state_on_host=True, offload_to=tmp_path))


def hooked(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(parameters, lr=0.1)
    made.register_step_post_hook(lambda *_: None)
    return made


REFUSED = {
    "OwnCounter with other numbers where small ones are stepped in halves": OwnCounter,
    "GlobalNorm with other numbers where": GlobalNorm,
    "SparseAdam with a failure where small ones are stepped: RuntimeError": torch.optim.SparseAdam,
    "SGD with hooks on its steps": hooked,
}


@pytest.mark.parametrize("found", REFUSED)
def test_an_optimizer_that_needs_all_parameters_at_once_is_refused(found: str) -> None:
    with pytest.raises(PenstockError, match=f"steps each parameter by itself, .* found {found}"):
        run_on_host(CASES["1f1b-flush"], optimizer=REFUSED[found])


def two(parameters: penstock.NamedParameters) -> list[torch.optim.Optimizer]:
    """The first one has two groups, the second one state from the beginning."""
    odd = parameters.where(lambda name, p: p.ndim > 1 and sum(map(ord, name)) % 2 == 1)
    even = parameters.where(lambda name, p: p.ndim > 1 and sum(map(ord, name)) % 2 == 0)
    groups: list[dict[str, Any]] = [{"params": odd}, {"params": even, "weight_decay": 0.1}]
    biases = parameters.where(lambda name, p: p.ndim == 1)
    return [torch.optim.Adam(groups, lr=0.01, amsgrad=True), torch.optim.Adagrad(biases, lr=0.05)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", [GroupCounter, two], ids=["counter", "two"])
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_other_optimizers_equal_the_oracle(schedule: str, optimizer: Any, tmp_path: Path) -> None:
    case = CASES[schedule]

    expected = run_reference(case, optimizer=optimizer)
    assert_equal(expected, run_on_host(case, optimizer=optimizer, offload_to=tmp_path))


def test_a_breach_has_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that is not copied back, and a version that is overwritten before its last backward."""

    case = CASES["pipedream"]

    def forget(self: ThreadStaging, tensors: Any, memory: Any = None, *, kept: bool = False) -> Staged:
        return on_host([memory(layout_of(each)).zero_() for each in tensors])

    for kind, name, breach in ((ThreadStaging, "to_host", forget), (Window, "_keep", lambda self: None)):
        with monkeypatch.context() as patched:
            patched.setattr(kind, name, breach)
            try:
                assert run_on_host(case).losses != run_reference(case).losses
            except PenstockError as error:
                # A version that was never written is any numbers.
                assert "expected a finite number" in str(error)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw", "pipedream"])
def test_peaks_fall_as_predicted(pool: Pool, schedule: str, tmp_path: Path) -> None:
    """What is in files is not counted."""
    trainings = [Training(schedule), Training(schedule, away=str(tmp_path))]
    for kept, moved in pool.run(2, measure_peaks, trainings):
        for peak in (kept, moved):
            assert peak.predicted == pytest.approx(peak.measured["allocated"], rel=0.05)
        assert moved.measured["allocated"] < 0.8 * kept.measured["allocated"]


def test_plans_count_what_is_on_the_device() -> None:
    layers = [penstock.LayerProfile(f"{i}", 1.0, 2.0, 1.0, 2.0, 100.0) for i in range(4)]
    profile, cluster = penstock.Profile(tuple(layers), 1), penstock.Cluster.uniform(2, 1e9)
    options: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 4, "stages": 2, "straight": True}
    kept, moved = (penstock.plan(profile, cluster, **options, state_on_host=each).predicted for each in (False, True))
    assert kept is not None and moved is not None

    assert [a - b for a, b in zip(kept.peak_bytes, moved.peak_bytes, strict=True)] == [400.0, 400.0]
    with pytest.raises(PenstockError, match="nothing fits"):
        penstock.plan(profile, replace(cluster, memory_bytes=500.0), **options)
    penstock.plan(profile, replace(cluster, memory_bytes=500.0), **options, state_on_host=True)


def test_a_directory_that_is_removed_in_the_training_is_needed_no_more(tmp_path: Path) -> None:
    case, place = CASES["2bw"], tmp_path / "place"
    place.mkdir()
    pipe = penstock.Pipeline(case.build(), **case.options, check="off", state_on_host=True, offload_to=place)
    place.rmdir()
    assert_equal(run_reference(case), train(pipe, case.batches))
