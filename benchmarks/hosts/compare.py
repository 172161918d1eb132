"""Which way to train is the fastest on hosts with slow links, and does the planner know?

    cd benchmarks
    python -m hosts.compare --save results/hosts.txt

joins two hosts on this machine by links of several rates (`networks.py`; needs root). At each rate all contenders take
turns in one launch: a plain loop, DDP, PyTorch's pipelining, every schedule of Penstock's, replicas, and
``plan="auto"``. The table has what was measured and what Penstock predicted. ``--hosts 3`` joins three hosts by a
switch.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from contenders.contenders import DDP
from contenders.jobs import JOBS
from hosts.launches import run_everywhere
from hosts.lineup import AUTO
from hosts.networks import NotAllowed, joined_hosts
from hosts.trials import Trial
from measurement.reports import Report, conditions, option_parser

RATES = (1e8, 4e8, 1e9, 1e10)
"""Bits per second."""
DELAYED = ("penstock 2bw", "penstock pipedream")
"""Contenders whose updates are delayed. The planner proposes none of these unless it is asked to."""
_LAUNCH_SECONDS = 1800.0


def run_trial(rate: float, options: argparse.Namespace) -> Trial:
    """One launch on hosts that are joined by links of `rate` bits per second."""
    with tempfile.TemporaryDirectory() as folder, joined_hosts(options.hosts, rate) as network:
        report = Path(folder) / "trial.json"
        arguments = ["-m", "hosts.trials", str(report), "--size", options.size, "--hosts", str(options.hosts)]
        arguments += ["--microbatches", str(options.microbatches), "--rounds", str(options.rounds)]
        arguments += ["--turn-seconds", str(options.turn_seconds)]
        arguments += [] if options.only is None else ["--only", *options.only]
        run_everywhere(network, arguments, _LAUNCH_SECONDS)
        return Trial(**json.loads(report.read_text()))


def table(rate: float, trial: Trial) -> str:
    """What was measured at `rate`, and beside it what was predicted."""
    medians = {name: statistics.median(walls) for name, walls in trial.walls.items()}
    link = {name: 1e6 * value for name, value in trial.link.items()}
    lines = [
        f"{rate / 1e6:g} Mbit/s; the probe found {trial.link['bytes_per_second'] / 1e6:.1f} MB/s, "
        f"{link['latency_seconds']:.0f} us of latency, {link['message_seconds']:.0f} us and "
        f"{1e3 * link['message_seconds_per_byte']:.2f} ns a byte for a message at each end, "
        f"{link['action_seconds']:.0f} us for an action",
        f"{'ms per step':28}{'median':>9}{'least':>9}{'most':>9}{'predicted':>11}{'ratio':>8}{'over DDP':>10}",
    ]
    for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
        walls, foreseen = trial.walls[name], trial.predicted.get(name)
        ahead = "" if foreseen is None else f"{1e3 * foreseen:11.1f}{foreseen / seconds:8.3f}"
        ratio = "" if DDP not in medians or name == DDP else f"{medians[DDP] / seconds:9.2f}x"
        lines.append(
            f"{name:28}{1e3 * seconds:9.1f}{1e3 * min(walls):9.1f}{1e3 * max(walls):9.1f}{ahead:19}{ratio:>10}".rstrip()
        )
    return "\n".join([*lines, "", trial.plan, findings(trial, medians)])


def findings(trial: Trial, medians: dict[str, float]) -> str:
    """How good the planner's choice and its prediction are; [PipeDream 2019, figure 15] has the correlation."""
    rivals = {name: taken for name, taken in medians.items() if name != AUTO and not name.startswith(DELAYED)}
    best = min(rivals, key=rivals.__getitem__)
    own = medians[AUTO]
    words = [
        f"{AUTO} takes {own / rivals[best] - 1:+.1%} beside the fastest without delayed updates, {best}",
        f"predicted {trial.predicted[AUTO] / own - 1:+.1%}, by the layers before the rounds "
        f"{trial.planned_seconds / own - 1:+.1%}",
    ]
    rates = [(1 / medians[name], 1 / trial.predicted[name]) for name in medians if name in trial.predicted]
    if len(rates) > 2:
        words.append(f"correlation of rates {statistics.correlation(*zip(*rates, strict=True)):.3f}")
    if DDP in medians:
        words.append(f"{medians[DDP] / own:.2f}x DDP")
    return "; ".join(words)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of the links, in bits per second")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--size", choices=JOBS, default="big", help="of the model")
    parser.add_argument("--microbatches", type=int, default=None, help="of two samples, in a step (default: 4 a host)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--turn-seconds", type=float, default=1.0, help="of each contender, in a round")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="contenders with one of these in their names")
    options = parser.parse_args()
    options.microbatches = options.microbatches or 4 * options.hosts
    report = Report(options.save)
    head = f"{options.size}: {options.hosts} hosts, {options.microbatches} microbatches of two samples"
    report.add(conditions("-m hosts.compare"), "", head)
    for rate in options.rates:
        try:
            report.add("", table(rate, run_trial(rate, options)))
        except NotAllowed as error:
            sys.exit(f"no hosts can be made here: {error}")


if __name__ == "__main__":
    main()
