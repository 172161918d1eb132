"""Draws the pictures of docs/gallery.md with the library: every schedule on four ranks, eight microbatches in a step.

    python docs/gallery.py [FOLDER]

A forward, an input backward and a weight backward of a layer take equally long, and messages take no time.
"""

import sys
from pathlib import Path

import penstock
from penstock.scheduling import METHODS

PICTURES = Path(__file__).resolve().parent / "pictures"
RANKS, MICROBATCHES, LAYERS = 4, 8, 8


def pictures() -> dict[str, str]:
    """The SVG of each schedule, by the name of its file: one step, or three of a schedule that does not flush."""
    layer = penstock.LayerProfile("layer", 1e-3, 2e-3, 0, 5e8, 2.5e8, weight_seconds=1e-3)
    profile = penstock.Profile((layer,) * LAYERS, microbatch_size=1)
    cluster = penstock.Cluster.uniform(RANKS, bandwidth=1e15)
    made = {}
    for method in METHODS:
        stages_per_rank = 2 if method.layout.has_several else 1
        schedule = penstock.Schedule(method, RANKS, MICROBATCHES, stages_per_rank)
        minibatches = 1 if method.flushes else 3
        timeline = penstock.simulate(schedule, profile, cluster, minibatches=minibatches, split_seconds=0)
        made[f"schedule-{method.name}.svg"] = timeline.svg()
    return made


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    for name, picture in pictures().items():
        (folder / name).write_text(picture, encoding="utf-8")
