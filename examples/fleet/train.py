"""One of the small jobs of fleet.yaml: a network on random numbers, in as many stages as there are processes.

It can lose its workers at any step: on SIGUSR1 Penstock saves and leaves, and `resume=` goes on from there. At its end
it writes a digest of its weights, by which two trainings can be compared to the bit.
"""

import argparse
import hashlib
import json
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
    arguments = parser.parse_args()

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
    while pipe.steps < arguments.steps:
        for inputs, target in batches:
            loss = float(pipe.step(inputs, target).loss)
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
