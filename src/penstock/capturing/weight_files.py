"""First weights out of safetensors files: one file, or several with an index, as model hubs store them.

The names, shapes and types of all tensors are in the headers of the files. So the whole model is compared with the
files before anything is read, on every process alike. Then a process reads the tensors of its own stages, one after
the other, straight into their memory.

Law of this file: a file is opened anew for every tensor. The library maps a file into memory, and what was read of it
stays resident as long as it is open.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.arguments import PATH, TEXT, Rule, check_arguments, function, instance, text_of
from penstock.capturing.initialization import InitFn, WeightSource, named_tensors, reset_parameters
from penstock.capturing.module_state import same_content
from penstock.capturing.preservation import SavedBuffers
from penstock.errors import CheckpointError, PenstockError, visible
from penstock.torch_internals.subclasses import packed, packs
from penstock.torch_internals.tensors import times_written
from penstock.values.documents import INDEX_KIND, read_json

Rename: TypeAlias = Callable[[str], str] | Mapping[str, str]
"""The name in the files for a name in the model: a function, or regular expressions and what replaces them."""
Convert: TypeAlias = Callable[[str, Tensor], Tensor]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NEW = ".weights.new"
"""In a directory: the whole set of files that `Pipeline.save_weights` is moving into it."""

TYPE_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""How the headers of safetensors files call PyTorch's types."""

_FLOATING = ("F64", "F32", "F16", "BF16")
"""These are converted into each other. Smaller ones need scales, which are tensors of their own in the files."""


_RULES: Mapping[str, Rule[Any]] = {
    "rename": (
        instance(Mapping, "a function of a name or a dict of regular expressions", "give one, or leave it out")
        | function(("name",), "")
    ).optional,
    "missing": function(("name", "tensor"), "pass one such as penstock.reset_parameters(model)").optional,
    "convert": function(("name", "tensor"), "let it return what the model gets in place of the tensor").optional,
}


def load_weights(
    path: str | Path, *, rename: Rename | None = None, missing: InitFn | None = None, convert: Convert | None = None
) -> InitFn:
    """An `init_fn` that reads the weights of a model on the meta device from safetensors files.

    Each process reads the tensors of its own stages only, and its memory never holds more than them and the one that
    is being read. Values take the type of the parameter; to train in bfloat16, say ``model.to(torch.bfloat16)`` while
    the model is on the meta device. A weight with several names may have any of them in the files. Buffers outside
    the state dict are not in files; they get what `reset_parameters` makes, or `missing` where it makes nothing.

    Args:
        path: a file, or a directory with ``model.safetensors`` or ``model.safetensors.index.json``.
        rename: the names in the files, from those of the model: a function, or a dict of regular expressions and what
            replaces them (``re.sub``, in their order), as ``{r"^model\\.": ""}``.
        missing: an `init_fn` for the parameters and buffers that the files do not have (a new head, adapters).
        convert: ``convert(name, tensor)`` returns what the model gets in place of a tensor that was read, such as one
            that torchao has quantized; or the tensor.

    A parameter that packs its numbers when it is moved to a device, such as those of bitsandbytes, is packed before the
    next one is read. Files may have it packed already, with its scales.

    Before anything is read, the files are compared with the whole model. Raises `CheckpointError` with all names that
    are missing or differ in shape or type. It warns once, on rank 0, of tensors in the files that the model has not.
    Needs the package ``safetensors`` (the extra ``hub``).
    """
    PATH.check("load_weights(path=)", path, CheckpointError)
    check_arguments("load_weights", _RULES, rename=rename, missing=missing, convert=convert)
    return _WeightFiles(Path(path), rename, missing, convert)


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Where a tensor is, and what the header of its file says of it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    code: str


class _WeightFiles(WeightSource):
    """The tensors in the files of `path`, under the names of a model."""

    def __init__(self, path: Path, rename: Rename | None, missing: InitFn | None, convert: Convert | None) -> None:
        self.path, self.rename, self.missing, self.convert = path, _renaming(rename), missing, convert
        self._homes: dict[str, tuple[_StoredTensor, ...]] = {}
        """By the first name of each tensor of the model."""
        self._scales: dict[str, dict[str, _StoredTensor]] = {}
        """Of those that the files have packed, what they have beside each, by what its name adds."""
        self._reset: InitFn | None = None
        self._computed: frozenset[str] = frozenset()
        """The buffers outside of the state dict."""
        self._warned = False

    @cached_property
    def stored(self) -> Mapping[str, _StoredTensor]:
        """What the files have, by name. A tensor that an index names is that of the file which it names."""
        files, places = _files_of(self.path)
        return {
            stored.name: stored
            for file in files
            for stored in _read_header(file)
            if places.get(stored.name, file.name) == file.name
        }

    def examine(self, model: nn.Module, given: Collection[str]) -> None:
        names = _names(model)
        persistent = {*SavedBuffers(model), *(name for name, _ in model.named_parameters(remove_duplicate=False))}
        self._computed = frozenset(first for first, known in names.items() if not persistent.intersection(known))
        self._reset = reset_parameters(model)
        self._homes = {
            first: found
            for first, known in names.items()
            if first not in self._computed and (found := self._find(known))
        }
        self._scales = dict(self._packed_in_files(model, names))
        self._compare(model, names, given)

    def _packed_in_files(
        self, model: nn.Module, names: Mapping[str, list[str]]
    ) -> Iterator[tuple[str, dict[str, _StoredTensor]]]:
        tensors, taken = named_tensors(model), {self.rename(name) for known in names.values() for name in known}
        for first, homes in self._homes.items():
            if packs(tensors[first]) and any(_differences(first, tensors[first], homes)):
                path, point, leaf = homes[0].name.rpartition(".")
                beside = sorted(name for name in self.stored.keys() - taken if name.startswith(path + point))
                suffixes = (name.removeprefix(path + point).removeprefix(f"{leaf}.") for name in beside)
                if beside:
                    yield first, dict(zip(suffixes, map(self.stored.__getitem__, beside), strict=True))

    def packed(self, name: str, like: Tensor, device: torch.device) -> Tensor | None:
        if name not in self._scales:
            return None
        stored = self._homes[name][0]
        values, scales = _value_of(stored), {suffix: _value_of(each) for suffix, each in self._scales[name].items()}
        for suffix, scale in scales.items():
            if scale.is_floating_point() and not bool(scale.isfinite().all()):
                raise CheckpointError(
                    f"{self._scales[name][suffix].file}: expected finite numbers in {self._scales[name][suffix].name}, "
                    f"which {name} is packed with, found others. The file is damaged: download or write it again"
                )
        try:
            return cast(Tensor, packed(values.to(device), like, scales))
        except Exception as error:
            raise CheckpointError(
                f"{self.path}: {type(like).__name__} refuses {stored.name} with {', '.join(scales)}, as the files have "
                f"{name}: {type(error).__name__}: {error}. Expected what its library writes. Write the files again"
            ) from error

    def converted(self, name: str, tensor: Tensor) -> Tensor:
        if self.convert is None or name not in self._homes:
            return tensor
        found = self.convert(name, tensor)
        if not isinstance(found, Tensor) or found.shape != tensor.shape:
            raise PenstockError(
                f"convert={text_of(self.convert)}: expected a tensor of the shape {tuple(tensor.shape)} for {name}, "
                f"found {text_of(found)}. Return the tensor itself where there is nothing to convert"
            )
        registered = isinstance(found, nn.Parameter) or not isinstance(tensor, nn.Parameter)
        return found if registered else nn.Parameter(found, requires_grad=False)

    def has(self, name: str) -> bool:
        return name in self._homes

    def __call__(self, name: str, tensor: Tensor) -> None:
        if name in self._computed:
            self._compute(name, tensor)
            return
        homes = self._homes.get(name) or self._find([name])
        if homes:
            _read(name, homes, tensor)
        elif self.missing is not None:
            self.missing(name, tensor)
        else:
            raise CheckpointError(
                f"{self.path}: expected {self.rename(name)!r}, the weights of {name}, found no such tensor. Pass "
                "rename= with the names of the files, or missing= with what makes weights that they do not have"
            )

    def _compute(self, name: str, tensor: Tensor) -> None:
        """Has the model write a buffer, or `missing` if the model does not."""
        assert self._reset is not None, "it is after `examine`"
        version = times_written(tensor)
        self._reset(name, tensor)
        if times_written(tensor) == version and self.missing is not None:
            self.missing(name, tensor)

    def _find(self, known: Collection[str]) -> tuple[_StoredTensor, ...]:
        """The tensors in the files under the names `known` of one tensor of the model."""
        places = dict.fromkeys(self.rename(name) for name in known)
        return tuple(self.stored[place] for place in places if place in self.stored)

    def _compare(self, model: nn.Module, names: Mapping[str, list[str]], given: Collection[str]) -> None:
        """Raises `CheckpointError` for what is missing or misshapen, and warns of what is unexpected."""
        tensors = named_tensors(model)
        lacking = [
            self._asked(first, known)
            for first, known in names.items()
            if not (first in self._homes or first in self._computed or first in given)
        ]
        if self.missing is not None and self._homes:
            lacking = []
        whole = {first: homes for first, homes in self._homes.items() if first not in self._scales}
        unlike = [text for first, homes in whole.items() for text in _differences(first, tensors[first], homes)]
        expected = {self.rename(name) for known in names.values() for name in known}
        expected.update(stored.name for scales in self._scales.values() for stored in scales.values())
        unexpected = sorted(self.stored.keys() - expected)
        if lacking or unlike:
            raise CheckpointError(_complaint(self.path, lacking, unlike, unexpected))
        if unexpected and not self._warned and _rank() == 0:
            warnings.warn(
                f"penstock: {self.path}: the model has no place for {len(unexpected)} tensor(s) of the files, which "
                f"are not read: {visible(', '.join(unexpected))}. If it should have one, pass rename=",
                stacklevel=2,
            )
        self._warned = True

    def _asked(self, first: str, known: Collection[str]) -> str:
        """``name`` or ``name (as 'name in the files')``."""
        places = dict.fromkeys(self.rename(name) for name in known)
        return first if list(places) == [first] else f"{first} (as {' or '.join(map(repr, places))})"


def _names(model: nn.Module) -> dict[str, list[str]]:
    """All names of every tensor of `model`, by the first of them."""
    firsts = {id(tensor): name for name, tensor in named_tensors(model).items()}
    result: dict[str, list[str]] = {name: [] for name in firsts.values()}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        result[firsts[id(tensor)]].append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        result[firsts[id(buffer)]].append(name)
    return result


def _renaming(rename: Rename | None) -> Callable[[str], str]:
    if rename is None:
        return str
    rules = rename.items() if isinstance(rename, Mapping) else ()

    def renamed(name: str) -> str:
        try:
            if callable(rename):
                return TEXT.check(f"rename({name!r})", rename(name))
            for pattern, new in rules:
                name = re.sub(pattern, new, name)
        except PenstockError:
            raise
        except Exception as error:
            raise PenstockError(
                f"rename= fails for {name!r}: {type(error).__name__}: {error}. Expected a function that returns the "
                "name in the files, or a dict of regular expressions (\\. is a dot) and texts that replace them"
            ) from error
        return name

    # A wrong expression is found before a model is looked at.
    if rules:
        renamed("")
    return renamed


def _files_of(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files that hold the tensors, and what an index says: the name of the file of each tensor. `CheckpointError`
    if there are none, or one is absent.
    """
    if path.is_file():
        return ([path], {}) if path.name != INDEX else _indexed(path)
    if (path / SINGLE).is_file():
        return [path / SINGLE], {}
    if (path / INDEX).is_file():
        return _indexed(path / INDEX)
    found = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
    if NEW in found:
        raise CheckpointError(
            f"{path}: expected {SINGLE} or {INDEX}, found {', '.join(found)}. A process was killed while it published "
            f"weights here. They are whole: move the files of {NEW} up into this directory"
        )
    raise CheckpointError(
        f"{path}: expected a safetensors file, or a directory with {SINGLE} or {INDEX}, found "
        f"{', '.join(found) if found else 'an empty directory' if path.is_dir() else 'nothing'}. Download a model of "
        "the hub with huggingface_hub.snapshot_download(name), which returns its directory. Convert files of another "
        "format with from_pretrained(...).save_pretrained(...)"
    )


def read_index(index: Path) -> dict[str, str]:
    """By tensor, the name of its file beside `index`. `CheckpointError` if it is no index."""
    document = read_json(index, CheckpointError)
    places = document.value.get("weight_map") if isinstance(document.value, dict) else None
    for found in places.values() if isinstance(places, dict) else [places]:
        if not isinstance(found, str) or Path(found).name != found or len(found) > 255:
            raise CheckpointError(
                f"{index}: expected a JSON object whose weight_map has the name of a file beside it for each tensor, "
                f"found {document.found(found, INDEX_KIND)}. Download it again, or remove it"
            )
    return dict(places) if isinstance(places, dict) else {}


def _indexed(index: Path) -> tuple[list[Path], Mapping[str, str]]:
    places = read_index(index)
    files = [index.parent / name for name in dict.fromkeys(places.values())]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{index}: expected the {len(files)} files that it names, found {len(files) - len(absent)}. Absent: "
            f"{', '.join(absent)}. Download them"
        )
    return files, places


def _read_header(file: Path) -> Iterator[_StoredTensor]:
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118  # it is no mapping
            part = opened.get_slice(name)
            yield _StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise PenstockError(
            "load_weights reads its files with the package safetensors, which is not installed: pip install "
            "safetensors, or Penstock with its extra hub"
        ) from error
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: expected a whole safetensors file, found {type(error).__name__}: {error}. Download or write it "
            "again"
        ) from error


def _differences(name: str, tensor: Tensor, homes: Collection[_StoredTensor]) -> Iterator[str]:
    """What stands between `tensor` and each of its `homes` in the files."""
    own = TYPE_CODES.get(tensor.dtype, str(tensor.dtype))
    for home in homes:
        if home.shape != tuple(tensor.shape):
            yield f"{name}: {tuple(tensor.shape)} in the model, {home.shape} in {home.file.name}"
        elif home.code != own and not (home.code in _FLOATING and own in _FLOATING):
            yield f"{name}: {own} in the model, {home.code} in {home.file.name}"


def _complaint(path: Path, lacking: list[str], unlike: list[str], unexpected: list[str]) -> str:
    lines = [f"{path}: the files do not fit the model."]
    if lacking:
        lines.append(f"The files lack {len(lacking)} tensor(s) of the model: {', '.join(lacking)}.")
    if unlike:
        lines.append(f"{len(unlike)} tensor(s) differ in shape or type: {'; '.join(unlike)}.")
    if unexpected:
        lines.append(f"The model lacks {len(unexpected)} tensor(s) of the files: {', '.join(unexpected)}.")
    lines.append(
        "Build the model with the configuration of the files. Pass rename= if only names differ, and "
        "missing=penstock.reset_parameters(model) if the files are right not to have some. Build layers of the library "
        "that has quantized a file (bitsandbytes), or convert the file before"
    )
    return "\n".join(lines)


def _value_of(stored: _StoredTensor) -> Tensor:
    with _opened(stored.file) as opened:
        # A copy: the other is the memory of the file.
        return cast(Tensor, opened.get_tensor(stored.name).clone())


def _read(name: str, homes: tuple[_StoredTensor, ...], tensor: Tensor) -> None:
    """Reads the first of `homes` into `tensor`. `CheckpointError` if the others are not the same."""
    first, *others = homes
    with torch.no_grad(), _opened(first.file) as opened:
        tensor.copy_(opened.get_tensor(first.name))
    for other in others:
        with _opened(first.file) as opened, _opened(other.file) as again:
            alike = same_content(opened.get_tensor(first.name), again.get_tensor(other.name))
        if not alike:
            raise CheckpointError(
                f"{first.name} ({first.file.name}) and {other.name} ({other.file.name}) have different values, and are "
                f"one tensor in the model ({name}): expected them alike. Untie the weights in the model "
                "(tie_word_embeddings=False in its configuration), or remove one of them with rename="
            )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
