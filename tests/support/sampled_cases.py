"""A plugin of pytest: the suite runs some cases of a test that has many, and a nightly run all of them.

With `@pytest.mark.sampled(3)` the suite runs three cases of a test, spread over all, always the same; with 0 it leaves
the test out. All cases run with ``--all-cases``, and those of a test or a case that is named by its node id.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest

_SPREAD = (5**0.5 - 1) / 2
"""Multiples of it modulo 1 lie evenly, and avoid the periods that the parameters of a test have."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run all cases of the tests that are marked as sampled")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("all_cases") or any("::" in argument for argument in config.args):
        return
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = {item for found in cases.values() for item in _left_out(found)}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def chosen(cases: Sequence[Mapping[str, int]], count: int) -> set[int]:
    """The indices of `count` of the `cases`, each the number of its value for every parameter: values that were seldom
    taken come first, so that all values of a parameter are taken about equally often.
    """
    left = sorted(range(len(cases)), key=lambda index: index * _SPREAD % 1)
    met: Counter[tuple[str, int]] = Counter()
    taken: set[int] = set()
    while left and len(taken) < count:
        index = min(left, key=lambda index: sum(met[value] for value in cases[index].items()))
        left.remove(index)
        taken.add(index)
        met.update(cases[index].items())
    return taken


def _left_out(cases: list[pytest.Function]) -> list[pytest.Function]:
    mark = cases[0].get_closest_marker("sampled")
    assert mark is not None
    taken = chosen([case.callspec.indices if hasattr(case, "callspec") else {} for case in cases], *mark.args)
    return [case for index, case in enumerate(cases) if index not in taken]
