"""Times recurrences in the sizes of tables 4 to 6 of Wang, Bai and Pekhimenko (MLSys 2020), and LSTMs.

    python benchmarks/scan_papers.py --save benchmarks/results/scan-papers.txt

Those are an RNN of 20 hidden values on a bit stream, at several lengths (table 4, figure 8a) and with several samples
(table 5, figure 8d), and a GRU of as many on spectrograms of three sizes (table 6, figure 9), drawn here. The paper has
seconds of an epoch on a V100; here they are milliseconds of a training step, forward and backward apart. Contenders and
clock are those of benchmarks/scan.py.
"""

import torch

import scan
from measurement.reports import Report, conditions, option_parser

WIDTH = 20
LENGTHS, SAMPLES = (10, 30, 100, 300, 1000, 3000), (1, 2, 4, 8, 16, 32, 64, 128, 256)
SETS = {"S": (259, 38), "M": (517, 24), "L": (1034, 12)}
"""Frames and coefficients of the spectrograms, the paper's table 3."""
HEAD = f"{'length':>7} {'':28} {'forward ms':>10} {'backward ms':>10} {'backward':>10} {'step':>11}"


def rows_of(kind: str, inputs: torch.Tensor, rounds: int) -> list[str]:
    """A row for each contender, and one for what "auto" takes."""
    rows, times = scan.compare(scan.recurrences(kind, WIDTH, inputs), inputs, rounds)
    return [*rows, scan.lost_by_auto(kind, inputs, WIDTH, times)[0]]


def main() -> None:
    """Prints the tables."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender; four times as many if short")
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="the most steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    wish = parser.parse_args()
    report = Report(wish.save)
    clock = "processor time" if wish.device == "cpu" and torch.get_num_threads() == 1 else "time on the wall"
    report.add(
        conditions("benchmarks/scan_papers.py"),
        f"{wish.device}, {torch.get_num_threads()} thread(s), {wish.rounds} rounds, {clock}, {WIDTH} hidden values",
        "Ratios are to the first row of the same size: above 1 is faster.",
    )
    torch.manual_seed(0)
    device = torch.device(wish.device)

    def bits(length: int, batch: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.bernoulli(torch.full((length, batch, 1), 0.5, dtype=dtype, device=device)).requires_grad_()

    report.add("\ntable 4: RNN, 16 samples", HEAD)
    for length in LENGTHS:
        if length <= wish.longest:
            report.add(*rows_of("rnn", bits(length, 16), wish.rounds))
    length = min(1000, wish.longest)
    for batch in SAMPLES:
        report.add(f"\ntable 5: RNN, {batch} sample(s)", HEAD, *rows_of("rnn", bits(length, batch), wish.rounds))
    for name, (frames, coefficients) in SETS.items():
        for batch in (1, 16, 32, 64):
            inputs = torch.randn(min(frames, wish.longest), batch, coefficients, device=device).requires_grad_()
            report.add(
                f"\ntable 6: GRU, set {name}, {frames} x {coefficients}, {batch} sample(s)",
                HEAD,
                *rows_of("gru", inputs, wish.rounds),
            )
    for dtype in (torch.float32, torch.float64):
        for batch in (1, 16):
            report.add(
                f"\nLSTM, {str(dtype).removeprefix('torch.')}, {batch} sample(s)",
                HEAD,
                *rows_of("lstm", bits(length, batch, dtype), wish.rounds),
            )


if __name__ == "__main__":
    main()
