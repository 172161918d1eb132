"""What a policy's objective leaves free, given to the jobs that can use it."""

from penstock.fleet.linear_programs import Infeasible, Program, Solution, Space
from penstock.fleet.problems import Floats

_SLACK = 1e-8
"""The second program may miss the optimum of the first by this share, since both are met up to a tolerance only."""


def fill(space: Space, solution: Solution, *, at_least: Floats, weights: Floats | None = None) -> Floats:
    """The shares that make the weighted sum of all normalized throughputs largest, of those where no class has less
    than `at_least`. An objective such as a maximum of minima has many optima, most of which leave workers idle.

    `solution`: an optimum that is kept if no other is found within the tolerance. `weights`: by default the workers of
    a job.
    """
    program = Program(space)
    program.throughputs_at_least(at_least * (1 - _SLACK))
    try:
        return program.maximize(space.total_rates(space.workers if weights is None else weights)).shares
    except Infeasible:
        return solution.shares
