"""Times recurrences whose backward is a parallel scan beside PyTorch's, a loop in Python and `associative_scan`.

    python benchmarks/scan.py --save benchmarks/results/scan.txt

The task is that of Wang, Bai and Pekhimenko (MLSys 2020, section 4.1): samples of a bit stream, a few hidden values,
and a loss on the last ones; the paper has 16 samples and 20 hidden values. All contenders take turns in one launch, and
each ratio is to the first row of its kind. Forwards and backwards are timed apart. A contender that would take too long
or too much memory at a length is left out there. On one thread of a CPU the processor's time is taken, which other
programs disturb less. The last lines say what ``method="auto"`` would have lost against the fastest method.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from measurement.reports import Report, conditions, option_parser
from penstock.scan import DiagonalRecurrence, ScanGRU, ScanLSTM, ScanRNN, diagonal_recurrence, estimate
from penstock.scan.estimates import GATES, LayerMethod

LENGTHS = (10, 30, 100, 300, 1000, 3000, 10000, 30000)
LONGEST_LOOP = 1000
"""A loop in Python is timed up to this length. Contenders are warmed up, and have four times as many turns."""
METHODS: tuple[LayerMethod, ...] = ("linear", "blelloch", "chunked")
MOST_BYTES = 2**31
"""The most that the Jacobians of a layer may take."""

KINDS: dict[str, tuple[Any, Any]] = {"rnn": (nn.RNN, ScanRNN), "gru": (nn.GRU, ScanGRU), "lstm": (nn.LSTM, ScanLSTM)}

Forward = Callable[[Tensor], Tensor]


def python_loop(cell: nn.RNNCell, inputs: Tensor) -> Tensor:
    """The last state, step by step."""
    state = inputs.new_zeros(inputs.shape[1], cell.hidden_size)
    for step in inputs:
        state = cell(step, state)
    return state


def recurrences(kind: str, width: int, inputs: Tensor) -> dict[str, Forward]:
    """The contenders of a kind, a key of `KINDS`, by name; the first is PyTorch's."""
    length, batch, values = inputs.shape
    factory: dict[str, Any] = {"device": inputs.device, "dtype": inputs.dtype}
    (plain, scanning), state = KINDS[kind], width * (2 if kind == "lstm" else 1)
    found: dict[str, Forward] = {f"torch {kind}": partial(_last, plain(values, width, **factory))}
    if kind == "rnn" and length <= LONGEST_LOOP:
        found["loop in Python"] = partial(python_loop, nn.RNNCell(values, width, **factory))
    for method in METHODS:
        if method == "linear" or 12 * length * batch * state**2 <= MOST_BYTES:
            found[f"{kind}, {method}"] = partial(_last, scanning(values, width, method=method, **factory))
    return found


def _last(module: nn.Module, inputs: Tensor) -> Tensor:
    outputs, last = module(inputs)
    result: Tensor = outputs[-1] if isinstance(last, tuple) else last
    return result


def diagonal(width: int, length: int, batch: int, device: torch.device) -> dict[str, Forward]:
    """Recurrences without mixing; the first is a loop where one is timed."""
    layer = DiagonalRecurrence(1, width).to(device)
    decay = torch.exp(-torch.exp(layer.log_rate)).detach()
    found: dict[str, Forward] = {}

    def loop(inputs: Tensor) -> Tensor:
        state, states = inputs.new_zeros(inputs.shape[1], width), []
        for step in inputs.expand(-1, -1, width).unbind():
            state = decay * state + step
            states.append(state)
        return torch.stack(states)[-1]

    def scanned(inputs: Tensor) -> Tensor:
        return diagonal_recurrence(decay, inputs.expand(-1, -1, width))[-1]

    def associative(inputs: Tensor) -> Tensor:
        from torch._higher_order_ops import associative_scan

        def then(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            return left[0] * right[0], left[1] * right[0] + right[1]

        steps = inputs.expand(-1, -1, width)
        _, states = associative_scan(then, (decay.expand_as(steps), steps), dim=0, combine_mode="generic")
        result: Tensor = states[-1]
        return result

    if length <= LONGEST_LOOP:
        found["loop in Python, diagonal"] = loop
    found["scan, diagonal"] = scanned
    found["associative_scan, diagonal"] = associative
    return found


def seconds_now(device: torch.device) -> float:
    """The clock: that of this process's work on one thread of a CPU, else that on the wall."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def time_once(forward: Forward, inputs: Tensor, device: torch.device) -> tuple[float, float]:
    """Seconds of one forward and of its backward."""
    marks = []
    for work in (lambda: forward(inputs), None):
        _wait(device)
        start = seconds_now(device)
        if work is not None:
            result = work()
        else:
            result.sum().backward()  # type: ignore[no-untyped-call]
        _wait(device)
        marks.append(seconds_now(device) - start)
    return marks[0], marks[1]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Times = dict[str, tuple[float, float]]
"""By contender, the seconds of a forward and of a backward."""


def compare(contenders: dict[str, Forward], inputs: Tensor, rounds: int) -> tuple[list[str], Times]:
    """A row for each contender: milliseconds, and how many times as fast as the first one."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    failed: dict[str, str] = {}
    short = len(inputs) <= LONGEST_LOOP
    for number in range(4 * rounds + 1 if short else rounds):
        for name, forward in contenders.items():
            if name in failed:
                continue
            try:
                pair = time_once(forward, inputs, inputs.device)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:60]
                continue
            if number or not short:
                taken[name].append(pair)
    rows, first = [], next(iter(contenders))
    medians: Times = {}
    for name, pairs in taken.items():
        if pairs:
            forwards, backwards = zip(*pairs, strict=True)
            medians[name] = statistics.median(forwards), statistics.median(backwards)
    for name in contenders:
        if name in failed:
            rows.append(f"{len(inputs):>7} {name:28} {failed[name]}")
            continue
        before, after = medians[name]
        base = medians.get(first, medians[name])
        rows.append(
            f"{len(inputs):>7} {name:28} {before * 1e3:10.2f} {after * 1e3:10.2f} "
            f"{base[1] / after:10.2f}x {sum(base) / (before + after):10.2f}x"
        )
    return rows, medians


def lost_by_auto(kind: str, inputs: Tensor, width: int, times: Times) -> tuple[str, float]:
    """What ``method="auto"`` takes, and its backward's time over that of the fastest method that was measured."""
    measured: dict[LayerMethod, float] = {"torch": times[f"torch {kind}"][1]}
    for method in METHODS:
        if f"{kind}, {method}" in times:
            measured[method] = times[f"{kind}, {method}"][1]
    gates = GATES[KINDS[kind][1](1, 1).mode]
    predicted = estimate(len(inputs), inputs.shape[1], width, gates=gates, device=inputs.device.type).seconds
    chosen = min(measured, key=predicted.__getitem__)
    lost = measured[chosen] / min(measured.values())
    return f"{len(inputs):>7} auto for {kind}: {chosen}, {lost:.2f} times the time of the fastest", lost


def main() -> None:
    """Prints the table."""
    parser = option_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--widths", type=int, nargs="*", default=[4, 20], help="hidden values")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16], help="samples")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender; four times as many if short")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    wish = parser.parse_args()
    device = torch.device(wish.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    clock = "processor time" if device.type == "cpu" and torch.get_num_threads() == 1 else "time on the wall"
    report = Report(wish.save)
    report.add(
        conditions("benchmarks/scan.py"),
        f"{name}, {torch.get_num_threads()} thread(s), {wish.rounds} rounds, {clock}",
        "Ratios are to the first row of the same length and kind: above 1 is faster.",
    )
    every_lost = []
    for width, batch in product(wish.widths, wish.batches):
        report.add(
            f"\n{width} hidden values, {batch} sample(s)",
            f"{'length':>7} {'':28} {'forward ms':>10} {'backward ms':>10} {'backward':>10} {'step':>11}",
        )
        for length in wish.lengths:
            torch.manual_seed(0)
            inputs = torch.bernoulli(torch.full((length, batch, 1), 0.5, device=device)).requires_grad_()
            for kind in ("rnn", "gru"):
                rows, times = compare(recurrences(kind, width, inputs), inputs, wish.rounds)
                row, lost = lost_by_auto(kind, inputs, width, times)
                every_lost.append(lost)
                report.add(*rows, row)
            rows, _ = compare(diagonal(width, length, batch, device), inputs, wish.rounds)
            report.add(*rows)
    report.add(
        f"\nauto takes {statistics.mean(every_lost):.2f} times the time of the fastest method on average, "
        f"{max(every_lost):.2f} times at worst"
    )


if __name__ == "__main__":
    main()
