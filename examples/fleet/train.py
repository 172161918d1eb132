"""One of the small jobs of fleet.yaml: a network on random numbers, in as many stages as there are processes.

It can lose its workers at any step: on SIGUSR1 Penstock saves and leaves, and `resume=` goes on from there. At its end
it writes a digest of its weights, by which two trainings can be compared to the bit.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import penstock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="of the checkpoints")
    parser.add_argument("steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument(
        "--step-seconds", nargs="*", default=[], metavar="KIND=S", help="emulate kinds on which a step takes this long"
    )
    arguments = parser.parse_args()
    paces = dict(pace.split("=") for pace in arguments.step_seconds)
    step_seconds = float(paces.get(os.environ.get("PENSTOCK_FLEET_KIND", ""), 0))

    torch.manual_seed(arguments.seed)
    torch.set_default_dtype(torch.float64)
    width = arguments.width
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
    x, y = torch.randn(256, width), torch.randn(256, width)
    pipe = penstock.Pipeline(
        model,
        sample=(x[:2],),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        schedule="1f1b-flush",
        microbatches=4,
        resume=arguments.directory,
    )
    loss = float("nan")
    batches = penstock.loader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True)
    pipe.track(batches=batches)
    while pipe.steps < arguments.steps:
        for inputs, target in batches:
            began = time.monotonic()
            loss = float(pipe.step(inputs, target).loss)
            if pipe.rank == 0 and pipe.steps % 50 == 0:
                print(f"step {pipe.steps}: loss {loss:.4f}", flush=True)
            time.sleep(max(0.0, began + step_seconds - time.monotonic()))
            if pipe.steps == arguments.steps:
                pipe.save(arguments.directory)
                break
    state = pipe.full_state_dict()
    if pipe.rank == 0:
        digest = hashlib.sha256()
        for name in sorted(state):
            digest.update(state[name].numpy().tobytes())
        result = {"steps": pipe.steps, "loss": loss, "digest": digest.hexdigest()}
        Path(arguments.directory, "..", "result.json").write_text(json.dumps(result) + "\n")
    pipe.close()


if __name__ == "__main__":
    main()
