"""Parameters, operations and training time of transformers, against the numbers in chapter 4 of the thesis."""

from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.values.transformers import Transformer

SHAPES = st.builds(
    lambda layers, heads, size, sequence, vocabulary: Transformer(layers, heads * size, heads, sequence, vocabulary),
    st.integers(1, 200),
    st.integers(1, 160),
    st.integers(1, 200),
    st.integers(1, 8192),
    st.integers(1, 200_000),
)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions"),
    [
        (96, 12288, 96, 174.6),
        (105, 20480, 128, 529.6),
        (128, 25600, 160, 1008.0),
        (80, 12288, 96, 145.6),
        (32, 20480, 128, 162.2),
        (32, 3840, 32, 5.87),
        (24, 20480, 128, 121.9),
        (3, 20480, 128, 16.2),
    ],
)
def test_parameters_are_those_of_the_thesis(layers: int, hidden: int, heads: int, billions: float) -> None:
    found = Transformer(layers, hidden, heads).parameters / 1e9

    assert abs(found - billions) <= (0.05 if billions > 10 else 0.005)


@settings(max_examples=100, deadline=None)
@given(SHAPES)
def test_parameters_are_equation_4_3(model: Transformer) -> None:
    layers, h, s, vocabulary = model.layers, model.hidden, model.sequence, model.vocabulary

    assert isclose(model.parameters, 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h)))


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 4096))
def test_operations_are_equation_4_2(model: Transformer, batch: int) -> None:
    layers, h, s, vocabulary = model.layers, model.hidden, model.sequence, model.vocabulary
    factor = batch * s * layers * h**2

    assert isclose(model.batch_operations(batch), 96 * factor * (1 + s / (6 * h) + vocabulary / (16 * layers * h)))
    assert isclose(
        model.batch_operations(batch, recompute=False), 72 * factor * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    )


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 64))
def test_operations_are_those_of_the_matrices_one_by_one(model: Transformer, batch: int) -> None:
    h, s, size = model.hidden, model.sequence, model.hidden // model.heads
    rows = batch * s
    matrices = [(rows, h, 3 * h), (rows, h, h), (rows, h, 4 * h), (rows, 4 * h, h)]
    matrices += [(s, size, s), (s, s, size)] * (batch * model.heads)
    forward = sum(2 * m * k * n for m, k, n in matrices)
    head = 2 * rows * h * model.vocabulary

    assert model.batch_operations(batch, recompute=False) == float(3 * (model.layers * forward + head))
    assert model.batch_operations(batch) == float(4 * model.layers * forward + 3 * head)


def test_training_times_are_those_of_section_4_5_1() -> None:
    gpt3, trillion = Transformer(96, 12288, 96), Transformer(128, 25600, 160)

    assert abs(gpt3.training_days(300e9, 1024, 140e12) - 33.9) < 0.1
    assert abs(trillion.training_days(450e9, 3072, 163e12) - 83.9) < 0.1


@pytest.mark.parametrize(
    ("shape", "devices", "rate", "days"),
    [
        ((96, 12288, 96), 384, 144, 90),
        ((96, 12288, 96), 768, 88, 74),
        ((96, 12288, 96), 1536, 44, 74),
        ((105, 20480, 128), 640, 138, 169),
        ((105, 20480, 128), 1120, 98, 137),
        ((105, 20480, 128), 2240, 48, 140),
        ((96, 12288, 96), 384, 153, 84),
        ((96, 12288, 96), 768, 149, 43),
        ((96, 12288, 96), 1536, 141, 23),
        ((105, 20480, 128), 560, 171, 156),
        ((105, 20480, 128), 1120, 167, 80),
        ((105, 20480, 128), 2240, 159, 42),
    ],
)
def test_days_are_within_three_percent_of_table_4_2(
    shape: tuple[int, int, int], devices: int, rate: float, days: float
) -> None:
    found = Transformer(*shape).training_days(300e9, devices, rate * 1e12)

    # The table is rounded to whole days.
    assert abs(found - days) <= 0.03 * days + 0.5
