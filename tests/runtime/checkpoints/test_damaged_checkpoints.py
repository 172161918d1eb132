"""Damaged files: an error that names the file and leaves the weights alone, or the checkpoint before with a warning."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.manifests import manifest_text
from support.checkpointed import SUBJECT, make, same, weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    run = tmp_path_factory.mktemp("saved") / "run"
    with make() as pipe:
        for x, y in SUBJECT.batches[:2]:
            pipe.step(x, y)
            pipe.save(run)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy, whose second checkpoint a test damages."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(at: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return change


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "first byte": flip(0),
    "header": flip(0.05),
    "middle": flip(0.5),
    "a pipe": pipe_instead,
    "replaced": lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR."),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("file", ["manifest.json", "model-00000.safetensors", "state-00000.safetensors"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_found_and_passed_over(
    run: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = run / "step-000002" / file
    DAMAGES[damage](path)
    if (file, damage) == ("manifest.json", "longer"):
        path.write_text(path.read_text()[:-1] + "}")
    pipe = make()
    before = weights(pipe)
    with pytest.raises(CheckpointError) as caught:
        pipe.load(run / "step-000002")

    assert file in str(caught.value)
    assert same(weights(pipe), before)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        pipe.load(run)
    assert pipe.steps == 1
    assert file in caplog.text
    assert "is damaged and is passed over" in caplog.text
    # A damaged checkpoint does not hinder the next save of its step.
    pipe.step(*SUBJECT.batches[1])
    if damage != "a pipe":
        pipe.save(run)
        make().load(run / "step-000002")


def test_if_all_are_damaged_the_last_error_is_raised(run: Path) -> None:
    for path in run.glob("*/manifest.json"):
        path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-000001.manifest\.json"):
        make().load(run)


def test_a_checkpoint_under_another_step_is_damaged(run: Path) -> None:
    (run / "step-000002").rename(run / "step-000009")
    pipe = make()
    pipe.load(run)

    assert pipe.steps == 1


HOSTILE = {
    "a file outside": lambda content: content["tensors"].update(
        {key: {**entry, "file": "../../etc/passwd"} for key, entry in content["tensors"].items()}
    ),
    "files outside": lambda content: content.update(files={"../x": content["files"]["model-00000.safetensors"]}),
    "a huge tensor": lambda content: [entry.update(shape=[10**18]) for entry in content["tensors"].values()],
    "a negative size": lambda content: [entry.update(shape=[-1]) for entry in content["tensors"].values()],
    "no parts": lambda content: content.clear(),
    "other kinds": lambda content: content.update(optimizer=3, tensors=[], files={}),
    "code": lambda content: content["own"][0].update(objects={"!": ["code", "print(1)"]}),
}


def test_a_manifest_of_an_unknown_author_is_only_data(run: Path) -> None:
    path = run / "step-000002" / "manifest.json"
    written, pipe = path.read_text(), make()
    before = weights(pipe)
    for attack, change in HOSTILE.items():
        content = json.loads(written)["content"]
        change(content)
        # With a right checksum.
        path.write_text(manifest_text(path, content))
        with pytest.raises(CheckpointError, match="step-000002"):
            pipe.load(run / "step-000002")

        assert same(weights(pipe), before), attack
