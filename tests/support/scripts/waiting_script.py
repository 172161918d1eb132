"""A script in which one rank stops, dies or leaves somewhere: ``waiting_script.py SCENARIO FAILING_RANK SECONDS``.

SECONDS: the ``timeout_seconds`` of its pipeline. A scenario in two words names the call before which the rank stops.
"""

import atexit
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock

SCENARIO, FAILING, SECONDS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
LITTLE = 4
"""Descriptors: fewer than a pipeline of two processes needs, and enough for a traceback."""
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def stop() -> None:
    """Stands still, with all threads."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Layer(nn.Module):
    """A layer that does something else in its fourth forward on the failing rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += torch.is_grad_enabled()
        if RANK == FAILING and self.forwards == 4:
            match SCENARIO:
                case "stop step":
                    stop()
                case "kill with child":
                    kill_beside_child()
                case "catch":
                    raise ValueError("the layer is broken")
        return torch.tanh(self.linear(x))


def kill_beside_child() -> None:
    """Is killed, and leaves a child that has all its open files."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SECONDS)
    os._exit(0)


def before(call: str) -> None:
    """Stops before `call` if the scenario says so."""
    if f"stop {call}" == SCENARIO and RANK == FAILING:
        stop()


def allow_descriptors(more: int) -> None:
    """Forbids this process to open more than `more` files beside those that it has."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + more, most))


def build() -> penstock.Pipeline:
    torch.manual_seed(0)
    return penstock.Pipeline(
        nn.Sequential(*(Layer() for _ in range(RANKS))),
        sample=(torch.randn(2, 4),),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        microbatches=2,
        timeout_seconds=SECONDS,
    )


def main() -> None:
    """Builds, trains, saves, loads, reads a timeline, exports."""
    atexit.register(lambda: print("the user's exit handler", file=sys.stderr, flush=True))
    if RANK == FAILING:
        match SCENARIO:
            case "never build":
                time.sleep(1000)
            case "end before building":
                sys.exit(3)
    if SCENARIO.endswith("probe"):
        before("probe")
        print(penstock.probe(timeout_seconds=SECONDS))
        return
    if SCENARIO == "descriptors":
        # Torch's own group is made by then.
        build().close()
        if RANK == FAILING:
            allow_descriptors(more=LITTLE)
    pipe = build()
    x = torch.randn(4, 4)
    directory = Path(tempfile.gettempdir()) / f"waiting-{os.environ['MASTER_PORT']}"
    for _ in range(3):
        try:
            print(float(pipe.step(x, x).loss), flush=True)
        except ValueError:
            # The process lives on, with its connections.
            time.sleep(1000)
    if SCENARIO == "hook save" and RANK == FAILING:
        # As IPython and others do, after the pipeline has been built.
        sys.excepthook = lambda kind, error, trace: print("an error of", kind, file=sys.stderr)
        raise OSError("the data set is gone")
    for call, work in {
        "save": lambda: pipe.save(directory),
        "load": lambda: pipe.load(directory),
        "timeline": pipe.timeline,
        "weights": lambda: pipe.full_state_dict(rank=None),
    }.items():
        if SCENARIO.split()[-1] == call:
            if call == "load":
                pipe.save(directory)
            before(call)
            work()


if __name__ == "__main__":
    main()
