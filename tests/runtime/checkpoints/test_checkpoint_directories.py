"""Checkpoints in a directory of steps: what is there, what stays, what is refused, and what is never touched."""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file

import penstock
from penstock.capturing.initialization import initialize
from penstock.errors import CheckpointError
from penstock.runtime.files.step_directories import recover
from support.checkpointed import SUBJECT, make, same, trained, weights


def listing(directory: Path) -> dict[str, bytes]:
    """Every file below `directory`, with its contents."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous_umask")
def test_a_step_has_a_manifest_and_safetensors(tmp_path: Path) -> None:
    pipe = trained(2)
    path = pipe.save(tmp_path / "run")

    assert path == tmp_path / "run" / "step-000002"
    assert pipe.steps == 2
    names = {"manifest.json", "model-00000.safetensors", "model.safetensors.index.json", "state-00000.safetensors"}
    assert {entry.name for entry in path.iterdir()} == names
    content = json.loads((path / "manifest.json").read_text())["content"]
    assert content["step"] == 2
    assert content["torch"] == torch.__version__
    assert "stages:" in content["plan"]
    assert same(load_file(path / "model-00000.safetensors"), weights(pipe))
    # The permissions are those of a private file, however generous the umask.
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in path.iterdir()} == {0o600}
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_the_weights_of_a_checkpoint_are_first_weights(tmp_path: Path) -> None:
    pipe = trained(2)
    path = pipe.save(tmp_path / "run")
    with torch.device("meta"):
        model = SUBJECT.build()
    read = initialize(model, penstock.load_weights(path))

    assert same(dict(read.state_dict()), weights(pipe))


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    trained().save(tmp_path / "run")
    for name, content in listing(tmp_path).items():
        # A tensor of a generator has its library in its name.
        own = content.replace(b"generators/torch/", b"")
        assert b"torch" not in own or name.endswith("manifest.json"), name
        assert not content.startswith((b"\x80", b"PK")), name


def test_the_newest_step_is_loaded(tmp_path: Path) -> None:
    pipe = trained()
    pipe.save(tmp_path / "run")
    pipe.step(*SUBJECT.batches[1])
    pipe.save(tmp_path / "run")
    first = tmp_path / "run" / "step-000001"
    os.utime(first, (2e9, 2e9))
    resumed = make()
    resumed.load(tmp_path / "run")

    assert resumed.steps == 2
    assert same(weights(resumed), weights(pipe))
    assert penstock.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step-000002"
    resumed.load(first)
    assert resumed.steps == 1


def test_a_step_of_ones_own_number_and_a_step_that_is_saved_again(tmp_path: Path) -> None:
    pipe = trained()
    assert pipe.save(tmp_path / "run", 1234567).name == "step-1234567"
    pipe.step(*SUBJECT.batches[1])
    pipe.save(tmp_path / "run", 1234567)
    resumed = make()
    resumed.load(tmp_path / "run")

    assert resumed.steps == 2
    assert same(weights(resumed), weights(pipe))
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-1234567"]


def test_the_last_ones_and_every_nth_stay(tmp_path: Path) -> None:
    pipe = trained()
    (tmp_path / "run").mkdir()
    for step in range(1, 8):
        pipe.save(tmp_path / "run", step, keep=2, keep_every=3)

    names = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert names == [f"step-00000{step}" for step in (3, 6, 7)]


def test_steps_of_a_run_that_was_given_up_are_older_than_the_one_that_is_saved(tmp_path: Path) -> None:
    pipe = trained()
    pipe.save(tmp_path / "run", 5)
    pipe.save(tmp_path / "run", 2, keep=1)

    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-000002"]


def test_a_replaced_checkpoint_gets_its_name_again_where_its_successor_was_not_published(tmp_path: Path) -> None:
    path = trained().save(tmp_path / "run", 1)
    before = listing(path)
    path.rename(tmp_path / "run" / ".penstock-replaced-000001-0123456789abcdef")
    recover(tmp_path / "run")

    assert listing(path) == before


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, their directory, and afterwards the name in the directory of the run."""
    done: list[str] = []
    sync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def note_rename(source: Any, target: Any) -> None:
        done.append(f"to {Path(target).name}")
        rename(source, target)

    pipe = trained()
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    pipe.save(tmp_path / "run", 1)
    named = done.index("to step-000001")

    assert {"manifest.json", "model-00000.safetensors", "state-00000.safetensors"} <= set(done[:named])
    assert done[named - 1].startswith(".penstock-saving-")
    assert done[named + 1] == "run"


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    pipe, run = trained(), tmp_path / "run"
    pipe.save(run, 1)
    (run / "step-000001" / "notes.txt").write_text("mine")
    (run / "notes.txt").write_text("mine")
    shutil.copytree(run / "step-000001", run / "step-000001.bak")
    (run / ".penstock-saving-0123456789abcdef").mkdir()
    (run / ".penstock-saving-0123456789abcdef" / "thesis.txt").write_text("mine")
    (run / "backup.partial").mkdir()
    before = listing(run)
    pipe.save(run, 2, keep=1)
    pipe.save(run, 3, keep=1)

    after = listing(run)
    assert {name: after.get(name) for name in before} == before
    with pytest.raises(CheckpointError, match="found files that Penstock has not written"):
        pipe.save(run, 1)
    assert listing(run) == after


def test_files_of_the_user_beside_the_run_stay(tmp_path: Path) -> None:
    pipe = trained()
    pipe.save(tmp_path / "run", 1)
    for ending in ("old", "partial", "bak"):
        shutil.copytree(tmp_path / "run", tmp_path / f"run.{ending}")
    (tmp_path / "run.partial" / "thesis.txt").write_text("mine")
    before = {name: content for name, content in listing(tmp_path).items() if not name.startswith("run/")}
    pipe.save(tmp_path / "run", 1)
    pipe.save(tmp_path / "run", 2, keep=1)

    assert {name: content for name, content in listing(tmp_path).items() if not name.startswith("run/")} == before


def foreign(place: Path) -> None:
    place.mkdir()
    (place / "thesis.txt").write_text("mine")


TARGETS = {
    "a directory of the user's": (foreign, "found other files (thesis.txt)"),
    "a file": (lambda place: place.write_text("mine"), "found a file"),
    "a dangling link": (lambda place: place.symlink_to("nowhere"), "symbolic link"),
    "a link": (lambda place: place.symlink_to("/"), "symbolic link"),
    "below a file": (lambda place: place.parent.joinpath("f").write_text("mine"), "f is a file"),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_other_places_are_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    make_place, message = TARGETS[kind]
    make_place(tmp_path / "place")
    before = listing(tmp_path)
    pipe = trained()
    with pytest.raises(CheckpointError) as caught:
        pipe.save(tmp_path / ("f/run" if kind == "below a file" else "place"))

    assert message in str(caught.value)
    assert listing(tmp_path) == before
    # The refusal changed nothing, and the pipeline goes on.
    pipe.step(*SUBJECT.batches[1])


NUMBER = "expected a whole number of at least"
NOWHERE = "expected the path of a directory|there is no checkpoint"
WRONG: list[tuple[Callable[[penstock.Pipeline, Path], object], str]] = [
    *(
        (lambda pipe, run, place=place: pipe.save(place), "expected")
        for place in ("", ".", "..", "/", 5, None, b"run", "a\0b", "/proc/x")
    ),
    *(
        (lambda pipe, run, options=options: pipe.save(run, **options), NUMBER)
        for options in ({"step": -1}, {"step": True}, {"step": 1.5}, {"keep": 0}, {"keep_every": "a"})
    ),
    *((lambda pipe, run, place=place: pipe.load(place), NOWHERE) for place in (None, "", 5)),
    (lambda pipe, run: pipe.load(run / "missing"), NOWHERE),
]


def test_wrong_arguments_are_refused_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipe = trained()
    for call, says in WRONG:
        with pytest.raises(CheckpointError, match=says):
            call(pipe, tmp_path / "run")

        assert list(tmp_path.iterdir()) == []
    assert penstock.latest_checkpoint(tmp_path) is None
    pipe.step(*SUBJECT.batches[1])


def peak_megabytes(work: Callable[[], object]) -> float:
    """By how much the memory of a forked process grows at most during `work`."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        status = Path("/proc/self/status")

        def read(name: str) -> int:
            return int(re.findall(rf"{name}:\s+(\d+) kB", status.read_text())[0])

        try:
            Path("/proc/self/clear_refs").write_text("5")
            before = read("VmRSS") - read("RssFile")
            work()
            # Code that `work` is the first to run is no memory of it: a build of PyTorch for GPUs has much.
            os.write(writer, str((read("VmHWM") - read("RssFile") - before) / 1024).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return float(found)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_load_holds_one_tensor_more_than_the_part(tmp_path: Path) -> None:
    """Weights of 16 MB in tensors of 4 MB, and twice as much of the optimizer."""
    x = torch.randn(4, 1024)

    def build(steps: int) -> penstock.Pipeline:
        layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
        pipe = penstock.Pipeline(layers, (x,), F.mse_loss, lambda p: torch.optim.AdamW(p, foreach=False), stages=2)
        for _ in range(steps):
            pipe.step(x, x)
        return pipe

    path = build(1).save(tmp_path / "run")
    fresh, used = build(0), build(1)

    assert peak_megabytes(lambda: fresh.load(path)) < 32 + 2 * 4 + 8
    # The old state goes first.
    assert peak_megabytes(lambda: used.load(path)) < 2 * 4 + 16


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_pytorch_reads_the_weights(tmp_path: Path) -> None:
    pipe = trained()
    path = pipe.save(tmp_path / "run")
    found = {name: torch.zeros_like(tensor) for name, tensor in weights(pipe).items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)

    assert same(found, weights(pipe))
