"""Every rank makes the same calls with the same batches: each announces its calls, and one rank compares them.

The comparing rank is the first one of the last stage. At every step, drain, evaluation and prediction each other rank
sends it the name of the call and facts about the batch, and it sends its own to each of them. Where messages between
stages change their form (another call, other shapes), no rank sends or receives anything for the call before all have
announced it: a rank that expected another form would read garbage. Otherwise no rank waits for announcements: each
makes its own when it has to wait for something else, and a difference is found when the announcement has arrived.

Batches are compared by digests. A digest covers the bytes of a tensor: all of them up to `FULL_BYTES`, and above that
elements at equal distances. A probe covers `PROBE_BYTES` of the first microbatch; it costs microseconds. Tensors on the
meta device have no values, so their digest is empty and is compared with none.

Invariants of this file:
  1. The n-th announcements of all ranks belong together.
  2. Announcements have one size, so that they can be read whatever the ranks do.
  3. A rank has announced its call before it waits for another rank.
"""

import ctypes
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.capturing.samples import flatten
from penstock.errors import TransportError
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.collectives.failures import SAME_CALLS
from penstock.runtime.collectives.store_watch import StoreWatch
from penstock.runtime.transport.transport import Channel, Edge, PendingMessage, Transport

FULL_BYTES = 2**20
"""The most bytes of one input, or of the target, that a full digest reads."""
PROBE_BYTES = 2**9
"""The most bytes that a probe reads."""
MOST_INPUTS = 15
"""The inputs that are described one by one; the rest are described together."""
_LONGEST = 64
"""Characters of a shape's text."""
_DIGEST_BYTES = 6
_SAMPLES = attrgetter("samples")
_FORM = attrgetter("samples", "signature")


class TensorFacts(NamedTuple):
    """One input, or the target. Both texts are empty where this process was given nothing."""

    shape: str
    """The shapes and dtypes in the microbatches, each once."""
    digest: str


class BatchFacts(NamedTuple):
    """What ranks compare of a batch."""

    samples: int
    inputs: tuple[TensorFacts, ...]
    """In the order of the model's inputs, without those that are not tensors."""
    target: TensorFacts


NO_BATCH = BatchFacts(0, (), TensorFacts("", ""))
"""The facts of a call without a batch."""


def describe_batch(microbatches: Sequence[Microbatch], *, full: bool) -> BatchFacts:
    """The facts of a batch that was cut into `microbatches`. `full`: whether digests are full ones.

    A full digest of tensors on an accelerator waits for it. A probe does not: their digest is then empty.
    """
    if not microbatches:
        return NO_BATCH
    chosen = microbatches if full or len(microbatches) < 2 else (microbatches[0], microbatches[-1])
    names, inputs = list(chosen[0].inputs), list[TensorFacts]()
    for name in names[:MOST_INPUTS]:
        inputs.append(_facts(chosen, [name], full))
    if len(names) > MOST_INPUTS:
        inputs.append(_facts(chosen, names[MOST_INPUTS:], full))
    return BatchFacts(sum(map(_SAMPLES, microbatches)), tuple(inputs), _facts(chosen, (), full))


def _facts(microbatches: Sequence[Microbatch], names: Sequence[str], full: bool) -> TensorFacts:
    """The facts of the inputs `names`, or without names of all leaves of the targets."""
    forms, read = [], []
    for number, each in enumerate(microbatches):
        target: list[Any] = [each.target] if names or isinstance(each.target, Tensor) else flatten(each.target)[0]
        for value in map(each.inputs.get, names) if names else target:
            if isinstance(value, Tensor):
                forms.append((value.shape, value.dtype))
                if full or number == 0:
                    read.append(value)
    return TensorFacts(_text_of(tuple(forms)), digest_values(read, full))


@lru_cache(maxsize=64)
def _text_of(forms: tuple[tuple[torch.Size, torch.dtype], ...]) -> str:
    shapes = dict.fromkeys(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in forms)
    text = ", ".join(shapes)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 9]} {hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()[:8]}"


def digest_values(tensors: Sequence[Tensor], full: bool) -> str:
    """The digest of the values of `tensors`; empty where one has none that can be read. `full`: not a probe's."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for tensor in tensors:
        if not _is_readable(tensor, full):
            return ""
        found.update(_sample(tensor, (FULL_BYTES if full else PROBE_BYTES) // len(tensors)))
    return found.hexdigest() if tensors else ""


def _sample(tensor: Tensor, most: int) -> bytes:
    """The bytes of elements of `tensor` at equal distances, at most about `most`."""
    step = max(1, -(-tensor.nbytes // max(most, tensor.element_size())))
    sample = tensor
    # Most probes need no copy. They come with every step, and each call of PyTorch costs microseconds.
    if step > 1 or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        flat = tensor.detach().reshape(-1)
        if flat.is_conj() or flat.is_neg():
            flat = flat.resolve_conj().resolve_neg()
        # On the device first, so that only the sample is copied.
        sample = (flat[::step] if step > 1 else flat).cpu().contiguous()
    return ctypes.string_at(sample.data_ptr(), sample.nbytes) if sample.nbytes else b""


def _is_readable(tensor: Tensor, full: bool) -> bool:
    plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    strided = plain and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return strided and not tensor.is_meta and (full or tensor.is_cpu)


_FIRST_STEPS = 3
"""In this many first steps of a pipeline the values of the batch are compared, before the step begins."""
_CHECKED_EVERY = 100
"""In every step whose number is a multiple of this the values of the batch are compared again."""
_KIND = ("call",)
_BYTES = 512 + 80 * (MOST_INPUTS + 2)
"""More than an announcement has."""
_ADVICE = (
    "Every rank must pass the same global batch to every call, in the same order: take batches from "
    "penstock.loader(dataset, ...). A DistributedSampler, which gives every rank another part of the data, a shuffle "
    "without a common seed, and samples that one rank leaves out are the usual causes"
)


class AnnouncedCall(NamedTuple):
    name: str
    """The method that was called, or ``refusal`` if this rank refused a call."""
    trained: int
    """The microbatches trained before it."""
    seed: str
    batch: BatchFacts = NO_BATCH
    reason: str = ""
    """Why this rank refused; one line."""

    @property
    def text(self) -> str:
        """What the rank does, for errors."""
        return f"refuses a call ({self.reason})" if self.reason else f"calls {self.name}"

    def facts(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """What the rank does and has, and what to do where another rank differs. A text is empty where the rank was
        given no values. `names`: of the inputs, and of the target.
        """
        where = f"{self.name} after {self.trained} microbatches of training"
        yield f"calls {where}", "Load the same state on every rank"
        yield f"has seed {self.seed}", "Pass the same seed= on every rank"
        yield f"has {self.batch.samples} samples in {where}", _ADVICE
        for name, tensor in zip(names, (*self.batch.inputs, self.batch.target), strict=False):
            yield tensor.shape and f"has {name} as {tensor.shape} in {where}", _ADVICE
            yield tensor.digest and f"has {name} with values of digest {tensor.digest} in {where}", _ADVICE

    def encode(self) -> bytes:
        """The call in `_BYTES` bytes."""
        batch = self.batch
        words = [self.name, str(self.trained), self.seed, self.reason, str(batch.samples)]
        for tensor in (*batch.inputs, batch.target):
            words += (tensor.shape, tensor.digest)
        text = "\n".join(words).encode()
        assert len(text) <= _BYTES, "its texts are short"
        return text.ljust(_BYTES, b"\0")

    @classmethod
    def decode(cls, code: bytes) -> "AnnouncedCall":
        """The call that `encode` made `code` of."""
        name, trained, seed, reason, samples, *words = code.rstrip(b"\0").decode().split("\n")
        *inputs, target = [TensorFacts(*pair) for pair in zip(words[::2], words[1::2], strict=True)]
        return cls(name, int(trained), seed, BatchFacts(int(samples), tuple(inputs), target), reason)


@dataclass(slots=True)
class _PendingCall:
    code: bytes
    seen: dict[int, AnnouncedCall]
    """By rank: the own call, and those that were announced in other words, such as by ranks without values."""
    receives: dict[int, PendingMessage]
    """By rank: the announcements that have not arrived."""


def call_edges(ranks: int, comparing: int) -> list[Edge]:
    pairs = [(rank, comparing) for rank in range(ranks) if rank != comparing]
    return [Edge(*way, Channel.CALLS) for pair in pairs for way in (pair, pair[::-1])]


class CallAgreement:
    """Announces the calls of `rank` out of `ranks`, and compares them with those of the others.

    `comparing`: the rank that compares all. It does nothing if `ranks` is 1.
    """

    def __init__(self, transport: Transport, rank: int, ranks: int, comparing: int) -> None:
        self._transport, self._rank, self._comparing = transport, rank, comparing
        others = range(ranks) if rank == comparing else (comparing,)
        self.peers = [peer for peer in others if peer != rank] if ranks > 1 else []
        """The ranks to which this one announces its calls."""
        self._inputs: list[str] = []
        """The names of the model's inputs in the last batch."""
        self._form: tuple[object, ...] = ()
        """What the forms of the messages between stages depend on, in the last call."""
        self._pending: deque[_PendingCall] = deque()
        """The own calls that are not compared with all others yet, oldest first."""
        self._steps = 0
        self.watch: StoreWatch | None = None
        """Knows the method that the user has called."""

    def announce(
        self, name: str, microbatches: Sequence[Microbatch], trained: int, seed: int | None
    ) -> Callable[[], None] | None:
        """Announces a call. Waits for the others if the form of messages changes, and in the first steps. Of a step
        that need not wait, returns what announces it, which must be called before this rank waits for another one.

        Raises `TransportError` if another rank made another call, now or before, or passed another batch; so does what
        it returns.
        """
        if not self.peers:
            return None
        steps = name == "step"
        if name == "drain" and self.watch is not None and self.watch.call not in ("", "step()"):
            # A method that drains first.
            name = self.watch.call.removesuffix("()")
        first = steps and self._steps < _FIRST_STEPS
        full = first or (steps and self._steps % _CHECKED_EVERY == 0)
        self._steps += steps
        form = name, *map(_FORM, microbatches)
        waits, self._form = first or form != self._form, form
        made = partial(AnnouncedCall, name, trained, str(seed)[:24])
        if steps and not waits:
            return partial(self._exchange, made, waits, microbatches, full)
        self._exchange(made, waits, microbatches, full)
        return None

    @property
    def compares_weights(self) -> bool:
        """Whether the weights of replicas are to be compared at the step that was announced."""
        number = self._steps - 1
        return number == _FIRST_STEPS or (number > 0 and number % _CHECKED_EVERY == 0)

    def refuse(self, reason: str) -> bool:
        """Announces that this rank refused a call before it began, and waits for the others. Returns whether all of
        them did, so that all can go on.
        """
        if not self.peers:
            return True
        self._form = ()
        line = " ".join(reason.split()).encode("ascii", "replace").decode()
        try:
            self._exchange(partial(AnnouncedCall, "refusal", -1, "", reason=line[:160]), True)
        except TransportError:
            return False
        return True

    def _exchange(
        self,
        made: Callable[..., AnnouncedCall],
        waits: bool,
        microbatches: Sequence[Microbatch] = (),
        full: bool = False,
    ) -> None:
        """Exchanges the call that ``made(batch=facts)`` makes."""
        if microbatches:
            self._inputs = list(microbatches[0].inputs)
        call = made(batch=describe_batch(microbatches, full=full))
        code, posted = call.encode(), dict[int, PendingMessage]()
        compares = self._rank == self._comparing
        for peer in self.peers:
            posted[peer] = self._transport.post(Edge(peer, self._rank, Channel.CALLS), _KIND)
        self._pending.append(_PendingCall(code, {self._rank: call}, posted))
        if compares and waits:
            # The others go on when they hear from this rank, which is when all agree.
            self._settle(waits=True)
        message = torch.frombuffer(bytearray(code), dtype=torch.uint8)
        for peer in self.peers:
            self._transport.send(Edge(self._rank, peer, Channel.CALLS), _KIND, (message,))
        self._settle(waits=waits)

    def _settle(self, waits: bool) -> None:
        """Compares the calls whose announcements have arrived; all of them if it `waits`."""
        while self._pending:
            pending = self._pending[0]
            for peer, receive in list(pending.receives.items()):
                if waits or receive.ready():
                    (message,) = receive.wait()
                    assert message is not None
                    del pending.receives[peer]
                    if (code := message.numpy().tobytes()) != pending.code:
                        found = AnnouncedCall.decode(code)
                        for rank, other in pending.seen.items():
                            self._compare(rank, other, peer, found)
                        pending.seen[peer] = found
            if pending.receives:
                return
            self._pending.popleft()

    def _compare(self, rank: int, one: AnnouncedCall, peer: int, other: AnnouncedCall) -> None:
        facts = [(one.text, other.text, SAME_CALLS)]
        if one.name == other.name:
            rest = ["one of the other inputs"] if len(self._inputs) > MOST_INPUTS else []
            names = [*self._inputs[:MOST_INPUTS], *rest, "target"]
            both = zip(one.facts(names), other.facts(names), strict=False)
            facts = [(mine, its, advice) for (mine, advice), (its, _) in both if mine and its]
        for mine, its, advice in facts:
            if mine != its:
                error = TransportError(
                    f"the ranks are out of step: rank {rank} {mine}, and rank {peer} {its}. Expected the same on all "
                    f"ranks. {advice}"
                )
                # The rank that refuses says why.
                error.repeats = str(error) if one.reason or other.reason else ""
                raise error
