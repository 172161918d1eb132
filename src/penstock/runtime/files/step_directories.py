"""The directory of a run: a directory for each saved step, which appears whole by one rename and is never changed.

    run/step-000100/            a checkpoint
    run/.penstock-saving-...    one that is being written, or was when its process ended
    run/.penstock-replaced-...  an older checkpoint of a step that is saved again, while the new one takes its place
    run/.penstock-removed-...   one that is being removed
    run/.penstock-lock          the file that the job which changes the directory has locked

Laws of this file:
  1. Nothing is removed or replaced but files with Penstock's names in directories with Penstock's names. A directory
     that has anything else in it stays whole.
  2. At every moment each published checkpoint is whole, under its own name or as the replaced one.
  3. Only the process that holds the lock changes the directory.
"""

import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.arguments import is_count
from penstock.errors import CheckpointError
from penstock.runtime.files.safetensors_files import write_through

MANIFEST = "manifest.json"
LOCK = ".penstock-lock"
_INDEX = "model.safetensors.index.json"
_STEP = re.compile(r"step-(\d{6,})")
_REPLACED = re.compile(r"\.penstock-replaced-(\d{6,})-[0-9a-f]{16}")
_LEFT = re.compile(r"\.penstock-(?:saving|removed)-[0-9a-f]{16}")
_FILE = re.compile(r"(?:model|state)-\d{5,}\.safetensors")


def step_of(name: str) -> int | None:
    """The step whose directory has the name `name`; None if it is no such name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def file_name(part: str, rank: int) -> str:
    """The name of the data file of process `rank` for `part`: ``model`` or ``state``."""
    return f"{part}-{rank:05d}.safetensors"


def is_file_name(name: object) -> bool:
    """Whether `name` is one that `file_name` makes."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def steps_in(run: Path) -> list[tuple[int, Path]]:
    """The directories of steps in `run` with their numbers, the newest first; a replaced one follows its successor."""
    found = []
    for entry in _entries(run):
        if match := _STEP.fullmatch(entry.name):
            found.append((int(match[1]), True, entry))
        elif match := _REPLACED.fullmatch(entry.name):
            found.append((int(match[1]), False, entry))
    return [(step, entry) for step, _, entry in sorted(found, reverse=True) if entry.is_dir()]


def check_target(run: Path) -> None:
    """Raises `CheckpointError` unless checkpoints may be written to `run`, which is changed by nothing here."""
    advice = "Give the name of a new directory, or of one that Pipeline.save(...) wrote to"
    if run.name in ("", "..") or str(run) in (".", ""):
        raise CheckpointError(f"{str(run)!r}: expected a directory with a name, for checkpoints alone. {advice}")
    if run.is_symlink():
        raise CheckpointError(f"{run}: expected a directory, found a symbolic link, which is not followed. {advice}")
    for parent in run.parents:
        if parent.exists():
            if not parent.is_dir():
                raise CheckpointError(f"{run}: expected a directory, found that {parent} is a file. {advice}")
            break
    if not run.exists():
        return
    if not run.is_dir():
        raise CheckpointError(f"{run}: expected a directory or nothing, found a file. {advice}")
    names = [entry.name for entry in _entries(run)]
    if names and not any(_is_ours(run / name) for name in names):
        raise CheckpointError(
            f"{run}: expected an empty directory or one with checkpoints, found other files ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}). {advice}"
        )


def make_directory(run: Path) -> None:
    """Makes `run` where it is missing."""
    missing = [path for path in (run, *run.parents) if not path.exists()]
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in missing:
        write_through(path.parent)


def begin(run: Path) -> Path:
    """Makes a new empty directory in `run` for the files of a checkpoint, and `run` where it is missing."""
    make_directory(run)
    path = run / f".penstock-saving-{secrets.token_hex(8)}"
    path.mkdir(mode=0o700)
    return path


def recover(run: Path) -> None:
    """Finishes what processes that were killed have begun in `run`: removes what is half written or half removed, and
    gives a replaced checkpoint its name again if its successor was not published.
    """
    for entry in _entries(run):
        if match := _REPLACED.fullmatch(entry.name):
            target = run / f"step-{match[1]}"
            if not os.path.lexists(target):
                entry.rename(target)
            else:
                _clear(entry)
        elif _LEFT.fullmatch(entry.name):
            _clear(entry)


def publish(written: Path, step: int) -> Path:
    """Gives the directory `written` the name of `step`, in place of an older checkpoint of the same step."""
    write_through(written)
    run = written.parent
    target = run / f"step-{step:06d}"
    replaced = run / f".penstock-replaced-{step:06d}-{secrets.token_hex(8)}"
    if os.path.lexists(target):
        if not _only_ours(target):
            raise CheckpointError(
                f"{target}: expected a checkpoint or nothing, found files that Penstock has not written. Move them "
                "away, or save under another step"
            )
        target.rename(replaced)
    written.rename(target)
    write_through(run)
    _clear(replaced)
    return target


def remove(path: Path) -> bool:
    """Removes the checkpoint `path`. False if it holds files that are not Penstock's, and then nothing is removed."""
    if not _only_ours(path):
        logging.getLogger("penstock").warning("%s has files that Penstock has not written, and stays", path)
        return False
    away = path.with_name(f".penstock-removed-{secrets.token_hex(8)}")
    path.rename(away)
    _clear(away)
    return True


@dataclass(frozen=True, slots=True)
class Retention:
    """The last `keep` checkpoints stay (all, if it is None), and those whose step `keep_every` divides."""

    keep: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            if value is not None and not is_count(value, 1):
                raise CheckpointError(f"{name}={value!r}: expected a whole number of at least 1, or None. Give one")

    def apply(self, run: Path, saved: int) -> None:
        """Removes from `run` what need not stay after step `saved`. An error here is only logged.

        Later steps, from a run that was given up, count as older than `saved`.
        """
        if self.keep is None:
            return
        steps = steps_in(run)
        order = sorted(steps, key=lambda found: (found[0] <= saved, found[0]), reverse=True)
        for step, path in order[self.keep :]:
            if self.keep_every is None or step % self.keep_every:
                try:
                    remove(path)
                except OSError as error:
                    logging.getLogger("penstock").warning("%s could not be removed: %s", path, error)


def _clear(directory: Path) -> None:
    """Removes `directory` if it has files with Penstock's names only."""
    if not _only_ours(directory):
        return
    # A directory without a manifest is no checkpoint, whatever is left of the other files.
    (directory / MANIFEST).unlink(missing_ok=True)
    for entry in _entries(directory):
        entry.unlink(missing_ok=True)
    directory.rmdir()


def _only_ours(directory: Path) -> bool:
    if directory.is_symlink() or not directory.is_dir():
        return False
    return all(
        (entry.name in (MANIFEST, _INDEX) or is_file_name(entry.name)) and entry.is_file() and not entry.is_symlink()
        for entry in _entries(directory)
    )


def _is_ours(entry: Path) -> bool:
    """Whether `entry` is a mark of Penstock's: a step with a manifest, or what a job that was ended has left."""
    if _STEP.fullmatch(entry.name):
        return (entry / MANIFEST).is_file()
    return bool(entry.name == LOCK or _LEFT.fullmatch(entry.name) or _REPLACED.fullmatch(entry.name))


def _entries(directory: Path) -> Iterator[Path]:
    """What is in `directory`, by name; nothing if it is missing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from sorted(directory.iterdir())
