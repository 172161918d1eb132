"""Speeds of devices: what counts as equal, and what a slow device is."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.profiling.training_loops import compare_seconds


def test_devices_that_differ_little_are_equal() -> None:
    assert compare_seconds([1.0, 1.29, 0.995]) == ()
    assert compare_seconds([2.0]) == ()
    assert compare_seconds([0.0, 0.0]) == ()


def test_a_device_that_takes_twice_as_long_is_half_as_fast() -> None:
    assert compare_seconds([1.0, 2.0]) == (1.0, 0.5)
    assert compare_seconds([2.0, 1.0, 2.0]) == (1.0, 2.0, 1.0)


def test_nearly_equal_devices_get_the_speed_of_the_middle_one() -> None:
    assert compare_seconds([1.0, 1.1, 1.05, 4.0, 4.2]) == (1.0, 1.0, 1.0, 1.05 / 4.2, 1.05 / 4.2)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_a_speed_is_close_to_the_ratio_of_the_seconds(seconds: list[float]) -> None:
    speeds = compare_seconds(seconds)

    assert len(speeds) in (0, len(seconds))
    if not speeds:
        assert max(seconds) <= 1.3 * min(seconds)
    assert sorted(speeds, reverse=True) == [speed for _, speed in sorted(zip(seconds, speeds, strict=bool(speeds)))]
