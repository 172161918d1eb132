"""Loads batches for a pipeline: the same ones in the same order in every process, and on the device ahead of time.

Every process of a pipeline passes the same global batch to `Pipeline.step`. `loader` makes a `DataLoader` that does so,
resumes where a training stopped if `Pipeline.track` keeps its place, and gives only shapes to a process that needs no
values. `prefetch` copies the next batch to the device while the present one is computed.
"""

import inspect
import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, TypeVar

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from penstock.arguments import FLAG, SEED, Rule, check_arguments, function, integer, text_of
from penstock.capturing.initialization import read_device
from penstock.capturing.preservation import kept_generators
from penstock.capturing.randomness import microbatch_seed, seeded
from penstock.errors import PenstockError, suggestion
from penstock.progress import warn_once
from penstock.torch_internals import pytrees as pytree

B = TypeVar("B")


class Batches:
    """Iterates over batches, one epoch for every ``iter()``. `loader` makes it."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        reads: bool,
        microbatches: int | None,
        options: Mapping[str, Any],
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise PenstockError(
                f"{type(dataset).__name__} is an IterableDataset, which has no order that all processes could share: "
                "expected a dataset with len() and indices. Iterate over it yourself, the same way in every process"
            )
        self.epoch = 0
        """The epoch of the next batch."""
        self.position = 0
        """The batches of it that have been returned."""
        self.behind: tuple[int, int] | None = None
        """The place after the last batch that is used, where `prefetch` is ahead of it."""
        self.used_seconds = 0.0
        """When a batch was taken, by ``time.perf_counter()``."""
        self._dataset: Any = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._reads = reads
        self._collate: Callable[[list[Any]], Any] = options.get("collate_fn") or default_collate
        self._shapes: dict[int, Any] = {}
        self._generator = torch.Generator()
        self._check_last(microbatches)
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=_Order(weakref.proxy(self)), generator=self._generator, **options
        )
        _UNTOLD.add(self)

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        samples = len(self._dataset)
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the rest of the present epoch, and then goes to the next one.

        Raises `PenstockError` in a loop that goes on after `set_epoch` or `load_state_dict` has set another position.
        """
        self.behind, epoch = None, self.epoch
        mixed = microbatch_seed(self._seed, epoch)
        # It seeds the worker processes.
        self._generator.manual_seed(mixed)
        rest = iter(self._loader) if self._reads else map(self._shaped, self.order())
        for position in range(self.position, len(self)):
            # Without worker processes the transforms run here; they draw the same numbers in every process.
            with kept_generators(), seeded(mixed, position, ()):
                number = microbatch_seed(mixed, position)
                random.seed(number)
                numpy.random.seed(number % 2**32)
                batch = next(rest)
            self.position, self.used_seconds = position + 1, time.perf_counter()
            yield batch
            if (self.epoch, self.position) != (epoch, position + 1):
                raise PenstockError(
                    f"a loop over a loader goes on after batch {position} of epoch {epoch}, and the loader was set to "
                    f"batch {self.position} of epoch {self.epoch} meanwhile: expected a new loop. Leave this one with "
                    "break, and iterate again"
                )
        self.set_epoch(epoch + 1)

    def order(self) -> Iterator[list[int]]:
        """The indices of the samples in each batch that is left in the present epoch."""
        samples = len(self._dataset)
        indices: Any = range(samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(microbatch_seed(self._seed, self.epoch))
            indices = torch.randperm(samples, generator=generator).tolist()
        for position in range(self.position, len(self)):
            start = position * self._batch_size
            yield list(indices[start : start + self._batch_size])

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Goes to batch `position` of `epoch`, for the next ``iter()``. `PenstockError` if there is no such batch."""
        epoch = integer(0).but("give the number of an epoch").check("set_epoch(epoch=)", epoch)
        batch = integer(0, len(self)).but("give the number of a batch of an epoch")
        self.epoch, self.position, self.behind = epoch, batch.check("set_epoch(position=)", position), None

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was returned, by `prefetch` where it is ahead; for `load_state_dict` in
        another run. It also says what the order of the samples depends on.
        """
        epoch, position = self.behind or (self.epoch, self.position)
        return {
            "seed": self._seed,
            "epoch": epoch,
            "position": position,
            "samples": len(self._dataset),
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where another run stopped. Raises `PenstockError` unless seed, batch size and dataset's length are
        those of that run.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or state.keys() != own.keys():
            raise PenstockError(
                f"expected the state of a loader with {', '.join(own)}, found {state!r:.200}. Pass what state_dict() "
                "of a loader returned"
            )
        for name in sorted(own.keys() - {"epoch", "position"}):
            if state[name] != own[name]:
                raise PenstockError(
                    f"the state is of a loader with {name} {state[name]} and this one has {name} {own[name]}: expected "
                    "the same, since the order of the samples depends on it. Make the same loader, or say where to "
                    "begin with set_epoch"
                )
        self.set_epoch(state["epoch"], state["position"])

    def _check_last(self, microbatches: int | None) -> None:
        """Raises `PenstockError` if an epoch has no batch, or a last one that cannot be cut into `microbatches`."""
        samples = len(self._dataset)
        if not len(self):
            raise PenstockError(
                f"loader(dataset=): expected enough samples for one batch of {self._batch_size}, found {samples}"
                f"{' with drop_last=True' if self._drop_last else ''}: give more, or a smaller batch_size="
            )
        left = 0 if self._drop_last else samples % self._batch_size
        if not left:
            return
        if microbatches is None:
            if self._shuffle:
                warn_once(
                    "the last batch of every epoch has %d of %d samples; a step needs at least one for each "
                    "microbatch. drop_last=True leaves it out, and microbatches= checks it now",
                    left,
                    self._batch_size,
                )
        elif left < microbatches:
            raise PenstockError(
                f"loader(batch_size=): expected at least {microbatches} samples, one for each microbatch, in every "
                f"batch, found {left} in the last one of {samples} samples in batches of {self._batch_size}: pass "
                "drop_last=True, or another batch_size="
            )

    def _shaped(self, indices: list[int]) -> Any:
        size = len(indices)
        if size not in self._shapes:
            self._shapes[size] = shapes_of(self._collate([self._dataset[0]] * size))
        return self._shapes[size]


_UNTOLD: weakref.WeakSet[Batches] = weakref.WeakSet()
"""The loaders of this process that `warn_of_untracked` has not named."""


def warn_of_untracked(tracked: Iterable[object], since: float) -> None:
    """Says once of each loader that was used after `since`, and is not `tracked`, that no checkpoint has its place.

    A loader that always has the same order, and is at the beginning of it, has none to keep.
    """
    kept = set(map(id, tracked))
    for batches in [each for each in _UNTOLD if each.used_seconds > since and id(each) not in kept]:
        state = batches.state_dict()
        if state["position"] or state["shuffle"]:
            _UNTOLD.discard(batches)
            warn_once(
                "a loader that was used is not tracked (%s): a run that goes on from this checkpoint begins it anew, "
                "and trains on the same batches again. pipe.track(batches=loader), in every run, keeps its place",
                state,
            )


class _Order:
    """The batch sampler of a `Batches`, for the rest of its epoch. Its weak reference lets the loader go at once."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches.order()

    def __len__(self) -> int:
        return len(self._batches)


_RULES: Mapping[str, Rule[Any]] = {
    "dataset": Rule(
        "a dataset with len() and indices",
        # A dataset without indices has an error of its own.
        lambda value: (
            isinstance(value, IterableDataset)
            or (isinstance(value, Sized) and callable(getattr(value, "__getitem__", None)))
        ),
        lambda value: value,
        "pass a torch.utils.data.Dataset, or a list of samples",
    ),
    "batch_size": integer(1).but("give the samples of one global batch"),
    "shuffle": FLAG,
    "seed": SEED.but("give one such as 0, the same in every process"),
    "drop_last": FLAG,
    "reads": FLAG,
    "microbatches": integer(1).but("give those of the pipeline").optional,
}
_OPTION_RULES: Mapping[str, Rule[Any]] = {
    "num_workers": integer(0).but("give the number of processes that load batches"),
    "collate_fn": function(("samples",), "give one that makes a batch of a list of samples").optional,
}
_OPTIONS = sorted(
    set(inspect.signature(DataLoader).parameters)
    - {"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}
)


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    reads: bool = True,
    microbatches: int | None = None,
    **options: Any,
) -> Batches:
    """Global batches of `batch_size` samples, the same ones in the same order in every process.

    `seed` and the epoch determine the order if `shuffle` is set, and the numbers that random transforms draw from the
    generators of PyTorch, NumPy and Python, which get their states back. `drop_last` leaves out a last batch that is
    not full. `reads`: whether this process needs the values; with False only the first sample is read, and batches are
    tensors on the meta device, with the shapes of batches of this sample. `microbatches`: those of the pipeline, which
    the last batch of an epoch must have samples for. `options` go to `DataLoader`: ``num_workers``, ``pin_memory``,
    ``collate_fn`` and others. Raises `PenstockError` for a dataset without indices, for an epoch without a batch, and
    for a last batch that is too small.
    """
    used = check_arguments(
        "loader",
        _RULES,
        dataset=dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        reads=reads,
        microbatches=microbatches,
    )
    for name in options:
        if name not in _OPTIONS:
            raise PenstockError(
                f"loader({name}=): expected an option of torch.utils.data.DataLoader that loader does not set itself "
                f"({', '.join(_OPTIONS)}), found {name}={text_of(options[name])}: {suggestion(name, _OPTIONS)}Leave it "
                "out"
            )
    for name in _OPTION_RULES.keys() & options:
        options[name] = _OPTION_RULES[name].check(f"loader({name}=)", options[name])
    return Batches(**used, options=options)


class Prefetched(Generic[B]):
    """Iterates over the same batches on the device. `prefetch` makes it."""

    def __init__(self, batches: Iterable[B], device: torch.device) -> None:
        self._batches = batches
        self._device = device

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[B]:
        """Takes each batch from the source one step before it yields it."""
        source, stream = iter(self._batches), _new_stream(self._device)
        loader = self._batches if isinstance(self._batches, Batches) else None
        place: tuple[int, int] | None = None
        taken, error = self._take(source, stream)
        try:
            while taken is not None:
                batch, place = self._arrived(taken[0], stream), taken[1]
                # An error of the next batch must not hide this batch.
                taken, error = self._take(source, stream)
                if loader is not None:
                    loader.behind = place
                yield batch
            if loader is not None and loader.behind is place:
                loader.behind = None
        finally:
            if loader is not None and place is not None and loader.behind is place:
                # The loop was left: the batch ahead was not used.
                loader.set_epoch(*place)
        if error is not None:
            raise error

    def _take(
        self, source: Iterator[B], stream: torch.cuda.Stream | None
    ) -> tuple[tuple[B, tuple[int, int] | None] | None, Exception | None]:
        """The next batch, which is being copied to the device, with the place after it; None at the end or after an
        error.
        """
        try:
            batch = next(source)
        except StopIteration:
            return None, None
        except Exception as error:
            return None, error
        place = (self._batches.epoch, self._batches.position) if isinstance(self._batches, Batches) else None
        with torch.cuda.stream(stream):  # does nothing with None
            moved: B = pytree.tree_map_only(Tensor, self._move, batch)
        return (moved, place), None

    def _move(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta or tensor.device == self._device:
            return tensor
        if self._device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
            # Only a copy from pinned memory overlaps with the device's computation.
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _arrived(self, batch: B, stream: torch.cuda.Stream | None) -> B:
        """`batch`, for use on the current stream."""
        if stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(stream)
            for tensor in pytree.tree_leaves(batch):
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    # Its memory belongs to the stream of the copy, which must not reuse it too early.
                    tensor.record_stream(current)
        return batch


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made


def prefetch(batches: Iterable[B], device: torch.device | str) -> Prefetched[B]:
    """`batches` with their tensors on `device`, each taken from its source one step ahead.

    On CUDA the copy runs on a stream of its own, from pinned memory, while the batch before it is computed. On the CPU
    the source is one batch ahead and nothing is copied. Tensors on the meta device stay there.
    """
    if not isinstance(batches, Iterable):
        raise PenstockError(
            f"prefetch(batches=): expected batches to iterate over, found {text_of(batches)}: pass what "
            "penstock.loader returns, or any iterable"
        )
    return Prefetched(batches, read_device("prefetch(device=)", device))


def shapes_of(batch: B) -> B:
    """`batch` with its tensors on the meta device, and the rest unchanged."""
    result: B = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), batch)
    return result
