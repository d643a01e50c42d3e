"""Charts: where things are drawn, what ticks say, pictures that decode to what went in."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doxa.app.figures import encode
from doxa.app.report.charts import (
    MOST_POINTS,
    Axis,
    Bars,
    Grid,
    Line,
    Plot,
    Points,
    Ribbon,
    Segments,
    as_picture,
    extent,
    tick_labels,
    ticks,
)  # fmt: skip
from doxa.app.report.html import Picture, drawing, gallery
from doxa.app.report.text import short
from doxa.errors import ShapeError

NO_NUMBER = re.compile(r"\b(nan|inf)\b")
finite = st.floats(-1e12, 1e12, allow_nan=False)


def drawn(*marks: object, **axes: Axis) -> str:
    x, y = axes.get("x", Axis("x")), axes.get("y", Axis("y"))
    return str(drawing(Plot("key", "a title", "a description", x, y, list(marks))))


def circles(svg: str) -> np.ndarray:
    return np.array(re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', svg), float)


@given(finite, st.floats(1e-6, 1e12))
def test_ticks_are_round_inside_and_neither_few_nor_many(low: float, width: float) -> None:
    high = low + width
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high)
    step = (high - low) * 1e-6
    assert all(low - step <= t <= high + step for t in found)
    assert 1 <= len(found) <= 7
    gaps = np.diff(found)
    if len(gaps):
        mantissa = gaps[0] / 10.0 ** np.floor(np.log10(gaps[0]) + 1e-9)
        assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-3
        labels = tick_labels(found)
        assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0"), (7.014, "7.01"), (-0.5, "−0.500"), (1234.5, "1,234"), (1.5e9, "1.5e9"),
     (2e-7, "2e−7"), (float("nan"), "not a number"), (float("inf"), "infinite"), (20.04, "20.0")],
)  # fmt: skip
def test_numbers_as_people_write_them(value: float, words: str) -> None:
    assert short(value) == words


@pytest.mark.parametrize("values", [[], [np.nan], [np.inf, -np.inf], [3.0], [3.0, 3.0], [0.0, 0.0]])
def test_a_range_is_never_empty(values: list[float]) -> None:
    low, high = extent([np.array(values)])
    assert np.isfinite([low, high]).all()
    assert low < high


def test_points_stand_where_an_affine_map_puts_them() -> None:
    x, y = np.array([0.0, 1.0, 4.0]), np.array([10.0, 30.0, 20.0])
    at = circles(drawn(Points(x, y)))
    share = (at[:, 0] - at[0, 0]) / (at[2, 0] - at[0, 0])
    np.testing.assert_allclose(share, x / 4.0, atol=1e-3)
    up = (at[:, 1] - at[0, 1]) / (at[1, 1] - at[0, 1])
    np.testing.assert_allclose(up, (y - 10.0) / 20.0, atol=1e-3)
    assert at[1, 1] < at[0, 1]  # larger is higher on the page


def test_bars_are_as_high_as_their_values_and_stack() -> None:
    under, heights = np.array([1.0, 2.0]), np.array([3.0, 1.0])
    edges = np.array([0.0, 1.0, 2.0])
    svg = drawn(Bars(edges, under), Bars(edges, heights, "two", None, under), y=Axis("y", 0.0))
    pattern = " ".join(f'{name}="([\\d.]+)"' for name in ("x", "y", "width", "height"))
    boxes = np.array(re.findall(rf'class="bar \w+" {pattern}', svg), float)
    np.testing.assert_allclose(boxes[:, 3] / boxes[0, 3], [1, 2, 3, 1], atol=0.01)
    np.testing.assert_allclose(boxes[2, 1] + boxes[2, 3], boxes[0, 1], atol=0.11)


def test_a_line_has_a_gap_where_a_value_is_not_finite() -> None:
    y = np.array([1.0, 2.0, np.nan, 4.0, np.inf, 5.0])
    path = re.search(r'class="line one" d="([^"]+)"', drawn(Line(np.arange(6.0), y)))
    assert path is not None
    assert path[1].count("M") == 3
    assert path[1].count("L") == 1
    assert not NO_NUMBER.search(path[1])


def test_nothing_drawable_is_a_chart_all_the_same() -> None:
    bad = np.full(4, np.nan)
    svg = drawn(Line(bad, bad), Ribbon(bad, bad, bad), Points(bad, bad), Segments(bad, bad, bad))
    assert not NO_NUMBER.search(svg)
    assert "<path" not in svg


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    x = np.arange(100_000.0)
    path = re.search(r'd="(M[^"]+)"', drawn(Line(x, x)))
    assert path is not None
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", path[1])
    assert len(points) == MOST_POINTS
    assert float(points[-1][0]) > float(points[0][0]) + 300


@given(st.lists(st.floats(width=64), min_size=1, max_size=20))
def test_any_numbers_can_be_drawn(values: list[float]) -> None:
    y = np.array(values)
    svg = drawn(Line(np.arange(float(len(y))), y), Points(np.arange(float(len(y))), y))
    assert not NO_NUMBER.search(svg)


def test_a_grid_writes_every_count() -> None:
    counts = np.array([[5, 1], [0, 1234]])
    svg = str(drawing(Grid("k", "t", "d", ["a", "b"], ["a", "b"], counts, "true", "predicted")))
    assert re.findall(r'class="number[^>]*>([\d,]+)<', svg) == ["5", "1", "0", "1,234"]


@pytest.mark.parametrize("shape", [(5, 7), (6, 4, 3)])
def test_a_picture_decodes_to_its_pixels(shape: tuple[int, ...]) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).uniform(size=shape)
    page = str(gallery([([Picture(pixels, "noise")], ["below"])]))
    found = re.search('src="data:image/png;base64,([^"]+)"', page)
    assert found is not None
    read = np.asarray(image.open(io.BytesIO(base64.b64decode(found[1])))) / 255.0
    np.testing.assert_allclose(read, pixels, atol=0.5 / 255 + 1e-9)
    levels = (255 * pixels).astype(np.uint8)
    np.testing.assert_array_equal(np.asarray(image.open(io.BytesIO(encode(levels)))), levels)


def test_what_is_no_picture_is_refused_or_left_alone() -> None:
    with pytest.raises(ShapeError):
        encode(np.zeros((2, 3, 4)))
    assert as_picture(np.zeros(784)) is None
    assert as_picture(np.zeros((2, 8, 8))) is None
    channels_first = as_picture(np.arange(3 * 8 * 6, dtype=float).reshape(3, 8, 6))
    assert channels_first is not None
    assert channels_first.shape == (8, 6, 3)
    large = as_picture(np.zeros((1, 1000, 500)))
    assert large is not None
    assert max(large.shape) <= 64
