"""Moves of stages: a cut by a layer, and which stages recompute. They change seconds and bytes at once."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.values.plans import Plan


@dataclass(frozen=True, slots=True)
class StageMoves:
    """Which moves a search may make: of cuts, and of recomputation."""

    cuts: bool = False
    recomputation: bool = False

    def of(self, plan: Plan) -> Iterator[Plan]:
        """The plans that are one move away from `plan`, which has no prediction."""
        for stage, (before, behind) in enumerate(zip(plan.stages, plan.stages[1:], strict=False) if self.cuts else ()):
            for cut in (before.stop - 1, before.stop + 1):
                if before.start < cut < behind.stop:
                    moved = replace(before, stop=cut), replace(behind, start=cut)
                    yield replace(plan, stages=(*plan.stages[:stage], *moved, *plan.stages[stage + 2 :]))
        if self.recomputation:
            changes = ({stage} for stage in range(len(plan.stages)))
            sets = [*(plan.recomputed ^ change for change in changes), range(len(plan.stages)), ()]
            yield from (replace(plan, recompute=tuple(again)) for again in sets if plan.recomputed != {*again})
