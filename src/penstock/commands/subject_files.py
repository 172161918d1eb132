"""``FILE.py:FUNCTION``: what a function of the user's file makes, such as a model and its sample."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from penstock.capturing.chain import LayerChain
from penstock.errors import ProfileError, suggestion
from penstock.profiling import Subject


def load_subject(spec: str) -> Subject:
    """Imports FILE.py and calls FUNCTION, without arguments; it returns ``(model, sample)`` or a `Subject`.

    Raises a `ProfileError` that names the file, the function or the result that is not as expected.
    """
    where, make = load_function(spec)
    subject = read_subject(where, make())
    return subject if subject.name else replace(subject, name=where.rpartition(":")[2])


def load_function(spec: str) -> tuple[str, Callable[[], Any]]:
    """Imports FILE.py. Returns ``FILE.py:FUNCTION`` and a function that calls FUNCTION, without arguments.

    It raises as this does: a `ProfileError` that names the file and the line, or the function that is missing.
    """
    file, colon, function = spec.rpartition(":")
    if not colon:
        file, function = spec, ""
    path = Path(file)
    if not path.is_file():
        raise ProfileError(f"{file}: no such file: expected FILE.py:FUNCTION, found {spec!r}; check the path")
    with _explained(path, "was imported"):
        module = _import(path)
    made = _function(path, function, module)

    def make() -> Any:
        with _explained(path, f"{function}() was called"):
            return made()

    return f"{file}:{function}", make


def _import(path: Path) -> ModuleType:
    name = f"penstock_subject_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ProfileError(f"{path}: expected a Python file that ends in .py: rename it")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file look their module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _function(path: Path, name: str, module: ModuleType) -> Callable[[], object]:
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    found: object = vars(module).get(name)
    if callable(found):
        return found
    there = ", ".join(own) or "none"
    if not name:
        raise ProfileError(f"{path}: expected FILE.py:FUNCTION, found no function; choose one of this file: {there}")
    raise ProfileError(
        f"{path}: there is no function {name!r}. {suggestion(name, list(own))}The functions of this file: {there}"
    )


def read_subject(where: str, result: Any) -> Subject:
    """What the function `where` has returned. Raises a `ProfileError` for anything but a `Subject` or a pair."""
    expected = "expected (model, sample) or penstock.Subject(model, sample)"
    match result:
        case Subject():
            subject = result
        case tuple() if len(result) == 2:
            subject = Subject(*result)
        case _:
            raise ProfileError(f"{where} returned {_kind(result)}: {expected}; return the model and its example inputs")
    if not _is_model(subject.model):
        raise ProfileError(
            f"{where} returned {_kind(subject.model)} as the model: {expected}; "
            "the model is a torch.nn.Module or a list of layers"
        )
    return subject


def _is_model(value: Any) -> bool:
    if isinstance(value, Sequence):
        return bool(value) and all(callable(layer) for layer in value)
    return isinstance(value, nn.Module | LayerChain)


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "nothing" if value is None else f"an object of type {type(value).__name__}"


@contextmanager
def _explained(path: Path, when: str) -> Iterator[None]:
    """Lets the file import its neighbours, as ``python FILE.py`` does, and turns an error of it into a `ProfileError`
    with its line.
    """
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    except ProfileError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == path.resolve()]
        line = error.lineno if isinstance(error, SyntaxError) and not lines else (lines or [None])[-1]
        where = f"{path}" if line is None else f"{path}, line {line}"
        hint = (
            "what a script does belongs under `if __name__ == '__main__':`"
            if isinstance(error, SystemExit)
            else "fix it there (--traceback shows how it came to it)"
        )
        raise ProfileError(f"{where}: {type(error).__name__} when {path.name} {when}: {error}; {hint}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
