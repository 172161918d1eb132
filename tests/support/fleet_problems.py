"""Problems of a fleet: the thesis's examples, random ones, and a second way to solve them.

`Reference` writes the formulas of the specification down one by one, in raw units and dense matrices. It shares no code
with the library's programs, which normalize, join equal jobs and are sparse.
"""

from itertools import combinations

import numpy
from hypothesis import strategies as st

from penstock.fleet import Job, Kind, Pair, Problem

THESIS = Problem(
    (Job("job 0", 100), Job("job 1", 100), Job("job 2", 100)),
    (Kind("V100", 1, 2.48), Kind("K80", 1, 0.45)),
    ((40, 10), (12, 4), (100, 50)),
)
"""The worked example of [Narayanan 2021, section 5.4.1]."""


@st.composite
def fleet_problems(draw, *, most_jobs=5, most_kinds=3, most_workers=2, pairs=False, prices=True):
    """Problems with jobs of one to `most_workers` workers, some of which cannot run on some kinds."""
    kinds = draw(st.integers(1, most_kinds))
    # Kinds that differ by less than a tolerance would make programs whose errors mean nothing.
    speeds = st.integers(0, 1000).map(lambda tenths: tenths / 10)
    jobs, rows = [], []
    for m in range(draw(st.integers(1, most_jobs))):
        row = draw(st.lists(speeds, min_size=kinds, max_size=kinds).filter(any))
        age = draw(st.sampled_from([0.0, 10.0]))
        jobs.append(
            Job(
                f"job {m}",
                steps=draw(st.floats(1, 1000)),
                workers=draw(st.integers(1, most_workers)),
                weight=draw(st.sampled_from([1.0, 2.0, 0.5])),
                elapsed_seconds=age,
                isolated_seconds=age,
            )
        )
        rows.append(row)
    sizes = st.integers(most_workers, 4)
    machines = [Kind(f"kind {j}", draw(sizes), draw(st.floats(0.5, 10)) if prices else 0.0) for j in range(kinds)]
    found = []
    if pairs:
        for a, b in combinations(range(len(jobs)), 2):
            if jobs[a].workers != jobs[b].workers:
                continue
            share = draw(st.floats(0.2, 1.0))
            one, two = (tuple(share * speed for speed in rows[m]) for m in (a, b))
            found.append(Pair((a, b), (one, two)))
    return Problem(tuple(jobs), tuple(machines), tuple(map(tuple, rows)), tuple(found))


class Reference:
    """The valid allocations of a problem without pairs, as dense matrices in raw units."""

    def __init__(self, problem):
        self.problem = problem
        self.jobs, self.kinds = len(problem.jobs), len(problem.kinds)
        self.speeds = numpy.array(problem.throughputs)

    def effective(self):
        """The matrix of effective throughputs."""
        rows = numpy.zeros((self.jobs, self.jobs * self.kinds))
        for m in range(self.jobs):
            rows[m, m * self.kinds : (m + 1) * self.kinds] = self.speeds[m]
        return rows

    def best(self, objective, least=None, also=()):
        """The greatest `objective` @ X where each throughput is at least `least`; None if there is no such X.

        `also`: pairs of a row and the bound that it must not exceed.
        """
        matrix = [numpy.repeat(numpy.eye(self.jobs), self.kinds, axis=1)]
        bounds = [numpy.ones(self.jobs)]
        sizes = numpy.array([job.workers for job in self.problem.jobs])
        matrix.append(numpy.array([numpy.kron(sizes, numpy.eye(self.kinds)[j]) for j in range(self.kinds)]))
        bounds.append(numpy.array([kind.workers for kind in self.problem.kinds]))
        if least is not None:
            matrix.append(-self.effective())
            bounds.append(-numpy.asarray(least))
        for row, bound in also:
            matrix.append(numpy.asarray(row)[None, :])
            bounds.append(numpy.array([bound]))
        limits = [(0, 1 if speed else 0) for speed in self.speeds.ravel()]
        from scipy.optimize import linprog  # takes a second

        found = linprog(-numpy.asarray(objective), numpy.vstack(matrix), numpy.concatenate(bounds), bounds=limits)
        return None if found.status == 2 else -found.fun

    def reaches(self, least, also=()):
        """Whether all jobs can have these throughputs at once."""
        return self.best(numpy.zeros(self.jobs * self.kinds), least, also) is not None

    def rise(self, least, direction):
        """How often `direction` can be added to the throughputs `least`, by bisection."""
        rising = direction > 0
        low, high = 0.0, float((self.speeds.max(axis=1)[rising] / direction[rising]).min())
        for _ in range(22):
            middle = (low + high) / 2
            low, high = (middle, high) if self.reaches(least + middle * direction) else (low, middle)
        return low

    def fair_units(self):
        """The throughput of each job that is a share of 1: that of an equal time on each worker, over its workers."""
        workers = numpy.array([kind.workers for kind in self.problem.kinds])
        return self.speeds @ (workers / workers.sum()) / numpy.array([job.workers for job in self.problem.jobs])


def is_greatest(found, holds, near=1e-5):
    """Whether `holds` for a number just below `found`, and not for one just above."""
    return holds(found * (1 - near)) and not holds(found * (1 + near))
