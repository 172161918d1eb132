"""Packing: sequences of different lengths as microbatches that take equally long, without padding.

The time of a sequence grows with its length, and that of its attention with the square, so that microbatches of equally
many tokens are not equally long. `pack` balances seconds; `packed_batch` puts the sequences of a microbatch one after
the other, with positions that begin anew at each: attention that reads them looks at one sequence alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.arguments import Entries, FieldRules, check_arguments, integer, number, text_of
from penstock.errors import PenstockError
from penstock.training.losses import IGNORED
from penstock.values.profiles import Profile

_RULES: FieldRules = {
    "lengths": Entries(integer(1, unit="tokens").but("give the tokens of each sequence")),
    "microbatches": integer(1).but("give how many microbatches a step has"),
    "memory_bytes": number(above=0, unit="bytes").but("give what a microbatch may keep, or leave it out").optional,
}
_ROUNDS = 1_000
"""Sequences are exchanged between microbatches so often at most; a round makes the longest microbatch shorter."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """What a sequence takes, by its length."""

    linear: float
    square: float = 0.0

    def __call__(self, length: int) -> float:
        return self.linear * length + self.square * length**2

    @classmethod
    def through(cls, points: Mapping[int, float]) -> "_Curve":
        """The curve nearest to `points`, relative to each; no part of it falls."""
        lengths, values = np.array(list(points), dtype=float), np.array(list(points.values()))
        scale = np.where(values > 0, values, 1.0)
        parts = np.stack([lengths, lengths**2], axis=1) / scale[:, None]
        found = np.linalg.lstsq(parts, values / scale, rcond=None)[0] if len(points) > 1 else (-1.0, -1.0)
        if min(found) >= 0:
            return cls(*map(float, found))
        # The measurements bend downwards, or there is one: a straight line.
        return cls(float(parts[:, 0] @ (values / scale) / (parts[:, 0] @ parts[:, 0])))


def pack(
    lengths: Sequence[int],
    profiles: Mapping[int, Profile] | float,
    *,
    microbatches: int,
    memory_bytes: float | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The sequences of each of `microbatches`, as places in `lengths`, ascending; none is empty.

    The longest microbatch takes as little as was found: the longest sequences are dealt first, and then exchanged.
    `lengths`: the tokens of each sequence. `profiles`: of one model, by the length of the sequences that each was
    measured with; seconds are a curve of the length and its square through them, from two lengths on. Or the seconds of
    a token, for models whose time has no such part. `memory_bytes`: the most that a microbatch keeps for its backward,
    by the same curve of the profiles' bytes. Raises `PenstockError` if the sequences do not fit, and says how many
    microbatches are enough.
    """
    lengths, microbatches, memory_bytes = check_arguments(
        "pack", _RULES, lengths=lengths, microbatches=microbatches, memory_bytes=memory_bytes
    ).values()
    seconds_of, bytes_of = _read_profiles(profiles, limited=memory_bytes is not None)
    if len(lengths) < microbatches:
        raise PenstockError(
            f"pack: expected a sequence for each of {microbatches} microbatches, found {len(lengths)}: pass more, or "
            f"microbatches={max(1, len(lengths))}"
        )
    seconds, sizes = list(map(seconds_of, lengths)), list(map(bytes_of, lengths))
    most = inf if memory_bytes is None else memory_bytes
    if max(sizes) > most:
        longest = sizes.index(max(sizes))
        raise PenstockError(
            f"pack: expected sequences that keep at most {most:.4g} bytes each, found sequence {longest} of "
            f"{lengths[longest]} tokens with {sizes[longest]:.4g}: cut it, or give more memory"
        )
    dealt = _deal(seconds, sizes, microbatches, most)
    if dealt is None:
        enough = next(
            count for count in range(microbatches + 1, len(lengths) + 1) if _deal(seconds, sizes, count, most)
        )
        raise PenstockError(
            f"pack: expected sequences that fit in {microbatches} microbatches of {most:.4g} bytes, found "
            f"{sum(sizes):.4g} bytes that do not: pass microbatches={enough}, or give more memory"
        )
    _exchange(dealt, seconds, sizes, most)
    return tuple(sorted(tuple(sorted(each)) for each in dealt))


def _read_profiles(profiles: Any, *, limited: bool) -> tuple[_Curve, _Curve]:
    """The seconds and the bytes of a sequence, by its length."""
    if not isinstance(profiles, Mapping):
        per_token = number(above=0, unit="seconds").but("give the seconds of a token, or profiles by length")
        if limited:
            raise PenstockError(
                "pack(memory_bytes=): expected profiles by length, which say what sequences keep, found the seconds of "
                f"a token, {text_of(profiles)}: pass {{512: profile}}, or leave memory_bytes= out"
            )
        return _Curve(per_token.check("pack(profiles=)", profiles)), _Curve(0.0)
    rule = integer(1, unit="tokens").but("name each profile by the length of its sequences, as in {512: profile}")
    seconds, sizes = dict[int, float](), dict[int, float]()
    for length, each in profiles.items():
        rule.check("pack(profiles=)", length)
        if not isinstance(each, Profile):
            raise PenstockError(
                f"pack(profiles=): expected Profiles, found {text_of(each)}: measure with penstock.profile"
            )
        layers, samples = each.layers, each.microbatch_size
        seconds[length] = sum(layer.forward_seconds + layer.backward_seconds for layer in layers) / samples
        sizes[length] = sum(layer.saved_bytes for layer in layers) / samples
    if not seconds:
        raise PenstockError("pack(profiles=): expected a profile at least, found none: pass one, as in {512: profile}")
    return _Curve.through(seconds), _Curve.through(sizes)


def _deal(seconds: Sequence[float], sizes: Sequence[float], count: int, most: float) -> list[list[int]] | None:
    """The sequences, the longest first, each to the microbatch with the least seconds that has room; None without."""
    dealt: list[list[int]] = [[] for _ in range(count)]
    taken, held = [0.0] * count, [0.0] * count
    for place in sorted(range(len(seconds)), key=lambda place: -seconds[place]):
        able = [each for each in range(count) if held[each] + sizes[place] <= most]
        if not able:
            return None
        chosen = min(able, key=lambda each: (taken[each], len(dealt[each])))
        dealt[chosen].append(place)
        taken[chosen] += seconds[place]
        held[chosen] += sizes[place]
    return dealt


def _exchange(dealt: list[list[int]], seconds: Sequence[float], sizes: Sequence[float], most: float) -> None:
    """Moves a sequence of the longest microbatch to the shortest, or exchanges two, while that makes both shorter than
    the longest was.
    """
    for _ in range(_ROUNDS):
        order = sorted(range(len(dealt)), key=lambda each: sum(map(seconds.__getitem__, dealt[each])))
        short, long = dealt[order[0]], dealt[order[-1]]
        (least, low), (longest, high) = (
            (sum(map(of.__getitem__, own)) for of in (seconds, sizes)) for own in (short, long)
        )
        found, nothing = (longest * (1 - 1e-12), -1, -1), [-1] if len(long) > 1 else []
        for mine in long:
            for theirs in (*short, *nothing):
                moved, more = (of[mine] - (of[theirs] if theirs >= 0 else 0.0) for of in (seconds, sizes))
                if moved > 0 and low + more <= most and high - more <= most:
                    found = min(found, (max(longest - moved, least + moved), mine, theirs))
        _, mine, theirs = found
        if mine < 0:
            return
        long[:] = [each for each in long if each != mine] + [each for each in (theirs,) if each >= 0]
        short[:] = [each for each in short if each != theirs] + [mine]


def packed_batch(
    sequences: Sequence[Tensor], labels: Sequence[Tensor] | None = None, *, ignored: int = IGNORED
) -> dict[str, Tensor]:
    """The inputs of a language model of transformers for `sequences` of tokens, one after the other, without padding.

    ``input_ids``, ``position_ids``, which begin at 0 in each sequence, and ``labels``, each of shape (1, tokens); pass
    no attention mask: attention then keeps to each sequence (transformers 5). `labels`: of each, by default its tokens;
    the first of each is `ignored`, since nothing predicts it. With ``loss_weight=penstock.token_count("labels",
    shifted=True)`` the loss is the mean over the tokens of all sequences, as without packing. Raises `PenstockError`.
    """
    own = [each for each in sequences if isinstance(each, Tensor) and each.ndim == 1 and len(each)]
    if not own or len(own) != len(sequences):
        wrong = next((each for each in sequences if not any(each is one for one in own)), None)
        raise PenstockError(
            f"packed_batch: expected tensors of tokens with one dimension and no fewer than one token, found "
            f"{'none' if wrong is None else text_of(wrong)}: pass such as tokens[0]"
        )
    targets = sequences if labels is None else labels
    sizes = list(map(len, sequences)), list(map(len, targets))
    if sizes[0] != sizes[1]:
        raise PenstockError(
            f"packed_batch(labels=): expected a label for each token, {sizes[0]}, found {sizes[1]}: pass as many, with "
            f"{ignored} where nothing is to be learnt"
        )
    starts = [torch.cat([each.new_full((1,), ignored), each[1:]]) for each in targets]
    positions = [torch.arange(size, device=sequences[0].device) for size in sizes[0]]
    parts = {"input_ids": sequences, "position_ids": positions, "labels": starts}
    return {name: torch.cat(list(each))[None] for name, each in parts.items()}
