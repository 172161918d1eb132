"""The cases that the suite runs of a test that has many."""

from collections import Counter

import pytest

from support.sampled_cases import chosen


def test_they_are_as_many_as_the_mark_says() -> None:
    assert [len(chosen([{"case": index} for index in range(12)], count)) for count in (0, 1, 5, 12, 20)] == [
        0,
        1,
        5,
        12,
        12,
    ]


@pytest.mark.parametrize(("outer", "inner"), [(9, 4), (4, 9), (6, 5), (2, 10)])
def test_all_values_of_a_parameter_are_taken_equally_often(outer: int, inner: int) -> None:
    cases = [{"outer": index // inner, "inner": index % inner} for index in range(outer * inner)]
    taken = [cases[index] for index in chosen(cases, max(outer, inner))]

    for name, values in (("outer", outer), ("inner", inner)):
        often = Counter(case[name] for case in taken)
        assert len(often) == values and max(often.values()) - min(often.values()) <= 1


def test_the_suite_leaves_cases_out(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> None:
    """Looks at the items of this very run."""
    items = [item for item in request.session.items if item.get_closest_marker("sampled") is not None]
    if not pytestconfig.getoption("all_cases") and not any("::" in argument for argument in pytestconfig.args):
        by_test: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for found in by_test.values():
            mark = found[0].get_closest_marker("sampled")
            assert mark is not None and len(found) <= mark.args[0]
