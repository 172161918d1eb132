"""Streamed stages: weights and gradients at home on the host between visits. The bits are the oracle's."""

import gc
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import penstock
from penstock.errors import PenstockError, PlanError
from penstock.runtime.parameters.residence import StreamedWeights
from penstock.scheduling import define_by_programs
from penstock.testing import faults
from support.optimizers import OwnCounter
from support.training import Case, Outcome, assert_equal, run_reference, train

CASES = {
    "gpipe": Case("layered", "gpipe", 1, 4, "adamw"),
    "breadth-first": Case("layered", "breadth-first", 1, 4, "adamw", stages_per_rank=4),
    "two ranks": Case("normalized", "breadth-first", 2, 4, "adamw", stages_per_rank=2),
    "1f1b-flush": Case("layered", "1f1b-flush", 3, 4, "adamw"),
    "interleaved": Case("skipping", "interleaved", 2, 4, "momentum", stages_per_rank=2),
    "zb-v": Case("layered", "zb-v", 2, 4, "adamw", stages_per_rank=2),
    "replicas": Case("layered", "breadth-first", 2, 6, "adamw", stages_per_rank=2, replicas=(2, 2)),
    "split": Case("layered", "gpipe", 2, 4, replicas=(2, 3), split=True),
    "turned": Case("layered", "breadth-first", 2, 4, "adamw", stages_per_rank=2, turned=True),
}


def streaming(case: Case, streamed: Any = True, places: int = 2, **options: Any) -> penstock.Pipeline:
    given = {**case.options, **options}
    plan = replace(given["plan"], recompute=True, streamed=streamed, places=places)
    return penstock.Pipeline(case.build(), **{"check": "off", **given, "plan": plan})


@contextmanager
def poisoned() -> Iterator[list[int]]:
    """A context in which memory that weights leave is freed, which is looked at, and overwritten before. Collects how
    many weights have been on the device at once.
    """
    fetch, release = StreamedWeights.fetch, StreamedWeights.release
    present: dict[int, nn.Parameter] = {}
    most: list[int] = []

    def watched_fetch(self: StreamedWeights, weights: Any, gradients: Any) -> None:
        fetch(self, weights, gradients)
        present.update((id(weight), weight) for weight in weights.values())
        most.append(len(present))

    def watched_release(self: StreamedWeights, weights: Any) -> None:
        weights = list(weights)
        self.arrive(weights)
        before = [weight.data for weight in weights]
        release(self, weights)
        gone = [memory for memory, weight in zip(before, weights, strict=True) if self.host.is_home(weight)]
        for weight in weights:
            if self.host.is_home(weight):
                present.pop(id(weight), None)
        freed = [StorageWeakRef(memory.untyped_storage()) for memory in gone]
        for memory in gone:
            memory.fill_(float("nan"))
        del before, gone
        # A loop leaves its last one.
        memory = None
        assert all(each.expired() for each in freed)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StreamedWeights, "fetch", watched_fetch)
        patched.setattr(StreamedWeights, "release", watched_release)
        yield most
    assert not present


def run(case: Case, **options: Any) -> Outcome:
    with poisoned() as most:
        found = train(streaming(case, **options), case.batches, case.drain_after, evaluates=case.turned)
    assert most
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_oracle(name: str, tmp_path: Path) -> None:
    """The numbers, and memory that is really free."""
    case = CASES[name]

    # Memory and files differ in their copies alone.
    for place in ("host", tmp_path) if name in ("breadth-first", "replicas") else (tmp_path,):
        assert_equal(run_reference(case), run(case, offload_to=place))


def test_places_bound_what_is_on_the_device() -> None:
    case = CASES["breadth-first"]

    for places in (1, 2, 3):
        with poisoned() as most:
            train(streaming(case, places=places), case.batches[:1])
        # A stage has two layers, of two parameters each.
        assert max(most) == 4 * places


GROUPS = """
rank 0: 0F0@0 0F1@0 1F0@0 1F1@0 2F0@0 2B0@0 2F1@0 2B1@0 1B0@0 1B1@0 0B0@0 0B1@0
 0F2@0 0F3@0 1F2@0 1F3@0 2F2@0 2B2@0 2F3@0 2B3@0 1B2@0 1B3@0 0B2@0 0B3@0 0U1<0 1U1<0 2U1<0
"""


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}])
def test_gradients_of_groups_add_up_as_ever(options: dict[str, Any], tmp_path: Path) -> None:
    """What the first group made goes home, and comes back with the weights of a backward."""
    case = replace(CASES["breadth-first"], stages_per_rank=3)
    schedule = define_by_programs("groups", " ".join(GROUPS.split()))
    plan = replace(case.options["plan"], schedule=schedule)
    expected = run_reference(case, **options)
    fetch, brought = StreamedWeights.fetch, list[bool]()

    def watched(self: StreamedWeights, weights: Any, gradients: Any) -> None:
        brought.append(bool(own := list(gradients)))
        fetch(self, weights, own)

    # In the second group stage 0 has one visit with what is before it; with two places stage 1 stays.
    for places, coming in ((1, [False] * 6 + [True] * 3), (2, [False] * 4 + [True] * 2)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(StreamedWeights, "fetch", watched)
            assert_equal(expected, run(case, plan=plan, places=places, offload_to=tmp_path, **options))
        assert brought == coming * len(case.batches)
        brought.clear()


OPTIONS: dict[str, dict[str, Any]] = {
    "clipping": {"clip_grad_norm": 0.05},
    "scaling": {"loss_scale": penstock.LossScale(initial=2.0**1023, growth=2.0, backoff=2.0**-10, interval=2)},
    "scheduler": {"lr_scheduler": lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.5)},
    "average": {"update_hooks": penstock.WeightAverage(0.5)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_the_oracle(name: str, tmp_path: Path) -> None:
    for case in (CASES["turned"], CASES["replicas"]):
        expected = run_reference(case, **OPTIONS[name])
        assert_equal(expected, run(case, offload_to=tmp_path, **OPTIONS[name]))


def test_layers_that_are_recomputed_alone_need_no_weights_in_between() -> None:
    for name in ("breadth-first", "1f1b-flush"):
        assert_equal(run_reference(CASES[name]), run(CASES[name], recompute="layers"))


def test_some_stages_stay() -> None:
    case = CASES["breadth-first"]
    assert_equal(run_reference(case), run(case, streamed=(1, 2)))


def test_evaluations_and_predictions_visit_each_stage_once(tmp_path: Path) -> None:
    case, found = CASES["turned"], []
    for pipe in (streaming(case, offload_to=tmp_path), penstock.Pipeline(case.build(), **case.options, check="off")):
        with poisoned():
            pipe.step(*case.batches[0])
            for parameter in pipe.parameters():
                parameter.grad = torch.ones_like(parameter)
            loss, values = float(pipe.evaluate(*case.batches[0]).loss), pipe.predict(case.batches[1][0])
            # What is there between steps is the user's.
            assert all(parameter.grad is not None for parameter in pipe.parameters())
            pipe.close()
        found.append((loss, values))

    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_frozen_weights_and_adapters(tmp_path: Path) -> None:
    """A frozen weight has a home and no gradient."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 6).requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.base(x) + self.up(self.down(x)))

    def build() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(*(Adapted() for _ in range(8))).double()

    case = CASES["breadth-first"]
    plain = {**case.options, "loss_fn": lambda output, target: nn.functional.cross_entropy(output, target)}
    reference = penstock.reference_train(build(), case.batches, **plain)
    model = build()
    plan = replace(plain["plan"], recompute=True, streamed=True)
    with poisoned():
        pipe = penstock.Pipeline(model, **{**plain, "plan": plan}, check="off", offload_to=tmp_path)
        found = train(pipe, case.batches)
    assert_equal(Outcome(reference.losses, reference.state), found)


def test_weights_are_the_users_between_steps(tmp_path: Path) -> None:
    """They are read and written as ever; memory in the place of a weight's own is refused."""
    case = CASES["breadth-first"]

    def halved(pipe: penstock.Pipeline) -> Outcome:
        pipe.step(*case.batches[0])
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.mul_(0.5)
        return train(pipe, case.batches[1:])

    plain = penstock.Pipeline(case.build(), **case.options, check="off")
    assert_equal(halved(plain), halved(streaming(case, offload_to=tmp_path)))
    pipe = streaming(case)
    name, parameter = next(pipe.named_parameters())
    parameter.data = parameter.data.clone()
    with pytest.raises(PenstockError, match=rf"parameter {name}: its memory was replaced .* Write in it instead"):
        pipe.step(*case.batches[0])


@pytest.mark.parametrize("action", ["1G", "2B", "2Q", "0Q"])
def test_a_failed_step_leaves_weights_at_home_and_as_they_were(action: str, tmp_path: Path) -> None:
    case = CASES["breadth-first"]
    pipe = streaming(case, offload_to=tmp_path)
    pipe.step(*case.batches[0])
    before = {name: parameter.clone() for name, parameter in pipe.named_parameters()}
    with faults.inject([faults.Raise(rank=0, step=1, action=action)]), pytest.raises(faults.InjectedError):
        pipe.step(*case.batches[1])
    assert all(torch.equal(before[name], parameter) for name, parameter in pipe.named_parameters())
    assert not any(parameter.untyped_storage().resizable() for parameter in pipe.parameters())
    pipe.close()


def test_what_cannot_stream_is_refused_by_name(tmp_path: Path) -> None:
    """A refused pipeline leaves no file open."""

    class Other(nn.Parameter):
        pass

    case = Case("layered", "gpipe", 2, 2)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
    plan = replace(case.options["plan"], recompute=True, streamed=True)
    given: dict[str, Any] = {**case.options, "plan": plan, "sample": (torch.zeros(3, 6),)}
    with pytest.raises(PenstockError, match=r"parameter 0\.weight: .* stage 0, .* second form .*version_dtype"):
        penstock.Pipeline(model, **given, autocast=torch.bfloat16, version_dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="expected stages that recompute"):
        penstock.Pipeline(model, **given, recompute=False)
    with pytest.raises(PenstockError, match="expected an optimizer that steps each parameter by itself"):
        penstock.Pipeline(model, **{**given, "optimizer": OwnCounter})
    model[0].weight = Other(model[0].weight.detach())
    with pytest.raises(PenstockError, match=r"expected a plain parameter, .* found .*Other, whose memory is not its"):
        penstock.Pipeline(model, **given, offload_to=tmp_path)
    gc.collect()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place]).returncode:
        pytest.skip("only root can mount")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_is_full_is_an_error_before_the_first_step(small_disk: Path) -> None:
    """A home takes a page at least. Weights have their numbers, wherever they are by then."""
    case = CASES["breadth-first"]
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        model, others = case.build(), case.build()
        for layer in list(model.modules()):
            if isinstance(layer, nn.Linear) and optimizer is torch.optim.SGD:
                layer.register_parameter("spare", nn.Parameter(torch.zeros(4096, dtype=torch.float64)))
        plan = replace(case.options["plan"], recompute=True, streamed=True)
        given = {**case.options, "plan": plan, "optimizer": optimizer}
        with pytest.raises(PenstockError, match=r"disk': expected room for \d+ bytes there, found: No space left"):
            penstock.Pipeline(model, **given, check="off", offload_to=small_disk)
        state = model.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in others.state_dict().items())
        assert not list(small_disk.iterdir())


def test_a_disk_that_takes_no_more_is_an_error_of_the_step(tmp_path: Path) -> None:
    """Gradients could not go home: no weight has changed."""
    case = CASES["breadth-first"]
    pipe = streaming(case, offload_to=tmp_path)
    pipe.step(*case.batches[0])
    before = {name: parameter.clone() for name, parameter in pipe.named_parameters()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        with pytest.raises(PenstockError, match=r"expected room for \d+ bytes there, found: File too large"):
            pipe.step(*case.batches[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(torch.equal(before[name], parameter) for name, parameter in pipe.named_parameters())
    assert not any(parameter.untyped_storage().resizable() for parameter in pipe.parameters())
    pipe.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["before a step", "in a step", "before a save", "before an evaluation"])
def test_a_file_that_is_truncated_is_an_error(when: str, tmp_path: Path) -> None:
    """No number is computed from what is left, however the file grows again."""
    case = CASES["breadth-first"]
    pipe = streaming(case, offload_to=tmp_path)
    pipe.step(*case.batches[0])
    (file,) = (each for each in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(each.resolve()))
    size = file.stat().st_size
    cut = partial(os.truncate, file, size // 2)
    said = (
        rf"expected {size} bytes in the file .*descriptor {file.name} of .*, found {size // 2}: .* the last checkpoint"
    )
    losing = pytest.raises(PenstockError, match=said)
    with losing:
        if when == "in a step":
            fetch = StreamedWeights.fetch
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(StreamedWeights, "fetch", lambda *given: (cut(), fetch(*given)))
                pipe.step(*case.batches[1])
        cut()
        if when == "before a step":
            pipe.step(*case.batches[1])
        elif when == "before a save":
            pipe.save(tmp_path / "saved")
        else:
            pipe.evaluate(*case.batches[0])
    # It does not go on by itself.
    with pytest.raises(PenstockError):
        pipe.step(*case.batches[1])
    pipe.close()


def test_a_directory_that_is_removed_is_needed_no_more(tmp_path: Path) -> None:
    """The file has no name: a process that is killed leaves nothing."""
    case, place = CASES["breadth-first"], tmp_path / "place"
    place.mkdir()
    pipe = streaming(case, offload_to=place)
    place.rmdir()
    assert_equal(run_reference(case), train(pipe, case.batches))
