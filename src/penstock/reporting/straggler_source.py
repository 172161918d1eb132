"""Finds the stragglers of a running pipeline, and a better cut of its layers, from its measured timeline."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from penstock.capturing.chain import LayerChain
from penstock.capturing.work_estimates import estimate_seconds
from penstock.doctor.replanning import recut
from penstock.doctor.stragglers import Stragglers, find_slow_layers, find_stragglers, stage_seconds
from penstock.runtime.transport.collective_errors import gather_results
from penstock.runtime.transport.worlds import World
from penstock.timelines.timelines import Timeline
from penstock.values.plans import Plan
from penstock.values.profiles import Profile


class StragglerSource:
    """Compares the stages of one pipeline with `profile`, which its plan was made from, or with estimates if it is
    None.
    """

    def __init__(
        self, chain: LayerChain, plan: Plan, device: torch.device, world: World, profile: Profile | None
    ) -> None:
        self._chain, self._plan, self._device, self._world, self._profile = chain, plan, device, world, profile

    def find(
        self,
        timeline: Timeline,
        profile: Profile | None,
        tolerance: float,
        measure: Callable[..., Profile] | None,
    ) -> Stragglers:
        """The stragglers in `timeline`; of layers, too, if `measure` measures them. Collective."""
        known = profile or self._profile
        found = find_stragglers(timeline, self._plan, self._weights(), profile=known, tolerance=tolerance)
        if measure is None:
            return found

        def seconds() -> list[float]:
            return [layer.seconds for layer in measure(iterations=3, warmup=1, progress=False).layers]

        own = gather_results(self._world, "while it measured its layers", seconds)
        names = [layer.name for layer in self._chain.layers]
        return replace(found, found=(*found.found, *find_slow_layers(names, own, known, tolerance)))

    def recut(self, timeline: Timeline, profile: Profile | None) -> Plan:
        """The plan with the cut that the measured stages of `timeline` ask for. Collective."""
        known = profile or self._profile
        weights = [layer.seconds for layer in known.layers] if known is not None else self._weights()
        return recut(self._plan, weights, stage_seconds(timeline))

    def _weights(self) -> Sequence[float]:
        """The estimated work of each layer, by process 0: the plan must be the same in all."""

        def estimate() -> list[float]:
            if self._world.rank != 0:
                return []
            return list(estimate_seconds(self._chain, self._device) or [1.0] * len(self._chain.layers))

        return gather_results(self._world, "while it estimated its layers", estimate)[0]
