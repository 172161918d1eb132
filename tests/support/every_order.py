"""Every order of a tiny pipeline, to try them all."""

from collections.abc import Iterator

from penstock.planning.orders.rows import BACKWARD, FORWARD, WEIGHT, OrderCosts, Row


def all_rows(costs: OrderCosts, rank: int) -> list[Row]:
    """Every order of the operations of a rank that keeps within its limit, microbatches ascending."""
    kinds = (FORWARD, BACKWARD) if costs.whole else (FORWARD, BACKWARD, WEIGHT)
    steps = [(kind, stage) for stage in costs.held[rank] for kind in kinds]

    def go_on(row: Row, done: dict[tuple[int, int], int]) -> Iterator[Row]:
        if len(row) == len(steps) * costs.microbatches:
            yield row
        for kind, stage in steps:
            if done[kind, stage] < (done[kind - 1, stage] if kind else costs.microbatches):
                longer = [*row, (kind, stage, done[kind, stage])]
                if costs.fits(longer, rank):
                    yield from go_on(longer, done | {(kind, stage): done[kind, stage] + 1})

    return list(go_on([], dict.fromkeys(steps, 0)))
