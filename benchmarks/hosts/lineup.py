"""The contenders on the hosts: DDP, PyTorch's schedules, all of Penstock's, replicas, and the plan of the planner."""

from collections.abc import Sequence

import penstock
from contenders.contenders import GLOO, Absent, Entry, Running, pipeline, running_pipeline
from contenders.jobs import Setting, plain_microbatch
from contenders.lineup import entries_of
from penstock.values.plans import Routing

AUTO, REPLICAS, SPLIT = 'penstock plan="auto"', "penstock replicas", "penstock split replicas"
LAYERS = "layers"
"""No contender: forwards and backwards of the whole model on all hosts at once, for what layers take in each round."""


def lineup(setting: Setting, words: Sequence[str] | None = None) -> list[Entry | Absent]:
    """The contenders in the order of the table: those with one of `words` in their names, the plain loop, and the plan
    of the planner.
    """
    # Between hosts everything goes through Gloo in any case.
    known = [entry for entry in entries_of(setting) if not entry.name.endswith(GLOO)]
    known += [_replicas(REPLICAS, "round-robin", setting), _replicas(SPLIT, "split", setting)]
    known += [Entry(LAYERS, _layers), Entry(AUTO, _automatic)]
    kept = (known[0].name, LAYERS, AUTO)
    return [
        entry for entry in known if words is None or entry.name in kept or any(word in entry.name for word in words)
    ]


def _replicas(name: str, routing: Routing, setting: Setting) -> Entry | Absent:
    """The whole model on every host: data parallelism by Penstock's own all-reduce."""
    layers = setting.job.cuts(1)[-1]
    stage = penstock.Stage(0, layers, tuple(range(setting.processes)))
    if setting.microbatches % setting.processes:
        return Absent(name, f"{setting.microbatches} microbatches do not divide by {setting.processes} processes")
    plan = penstock.Plan((stage,), "1f1b-flush", setting.microbatches, routing=routing)
    return Entry(name, lambda setting: running_pipeline(pipeline(setting, plan=plan), setting))


def _automatic(setting: Setting) -> Running:
    made = pipeline(setting, plan="auto", microbatches=setting.microbatches)
    return running_pipeline(made, setting)


def _layers(setting: Setting) -> Running:
    run = plain_microbatch(setting.job)

    def step() -> tuple[()]:
        run()
        return ()

    return Running(step, {})
