"""Flight records survive their files, and damaged files are no records."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.doctor.records import JobRecord, RankRecord, dump_record, read_record
from penstock.doctor.run_directories import RunDirectory, examine
from penstock.errors import PenstockError
from penstock.process_states import ProcessIdentity
from penstock.scheduling.schedules import Schedule
from penstock.values.documents import YamlNode
from support.run_records import record_of, waiting_for

RECORD = waiting_for(record_of(Schedule("1f1b-flush", ranks=2, microbatches=4), 1, 3), (0,))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write(RECORD)

    assert directory.read(1) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0001.json"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("steps",), "three"),
        (("rows", 0, "done"), 1.5),
        (("rows", 0, "program"), "1F0@0"),
        (("threads",), None),
        (("usual",), [1]),
        (("wait", "surprise"), 1),
        (("left",), 0),
    ],
)
def test_a_damaged_record_is_refused(path: tuple[str | int, ...], value: object) -> None:
    document = json.loads(dump_record(RECORD))
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value

    with pytest.raises(PenstockError, match=r"record\.json.*(expected|unknown key)"):
        read_record(RankRecord, YamlNode("record.json", "", document, PenstockError))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"job": "x"}', "\x00\xff"])
def test_a_broken_file_counts_as_no_record(tmp_path: Path, content: str) -> None:
    directory = RunDirectory(tmp_path)
    directory.record_file(1).write_text(content)

    assert directory.read(1) is None


def test_a_directory_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=r"expected the directory of a run .* found none: give the directory"):
        examine(RunDirectory(tmp_path))


def test_a_wait_that_is_no_number_of_seconds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="wait: expected seconds, 0 or more, found nan"):
        examine(RunDirectory(tmp_path), float("nan"))


def test_records_of_another_run_in_the_same_directory_are_not_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write(JobRecord("new", "gpipe", 1, 1, plan="", processes=(ProcessIdentity.own(),)))
    directory.write(record_of(Schedule("gpipe", ranks=1, microbatches=1), 0, 0))
    (found,) = examine(directory, 0.0).processes

    assert found.record is None


def test_the_last_process_removes_the_directory(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    for rank in (0, 1):
        directory.write(record_of(Schedule("gpipe", ranks=2, microbatches=1), rank, 0))
    directory.request()

    directory.remove(0, processes=2)
    assert directory.path.exists()
    directory.remove(1, processes=2)
    assert not directory.path.exists()


def test_a_process_that_has_written_no_record_still_needs_the_directory(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.write(record_of(Schedule("gpipe", ranks=2, microbatches=1), 0, 0))

    directory.remove(0, processes=2)
    directory.write(record_of(Schedule("gpipe", ranks=2, microbatches=1), 1, 0))
    assert directory.read(1)


@pytest.mark.parametrize("call", ["listdir", "scandir"])
def test_two_processes_may_remove_the_directory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The other one is done with it when this one has begun to look for records."""
    directory, real = RunDirectory(tmp_path / "run"), getattr(os, call)
    directory.path.mkdir()

    def list_late(path: Path) -> Any:
        monkeypatch.undo()
        shutil.rmtree(directory.path)
        return real(path)

    monkeypatch.setattr(os, call, list_late)
    directory.remove(0, processes=1)
    assert not directory.path.exists()
