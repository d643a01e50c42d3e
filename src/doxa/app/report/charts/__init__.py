"""Charts as inline SVG: no script, no style of their own, a description and a table each."""

from doxa.app.report.charts.grid import Grid
from doxa.app.report.charts.marks import Bars, Line, Points, Ribbon, Segments
from doxa.app.report.charts.picture import data_png
from doxa.app.report.charts.plot import Axis, Plot, figure
from doxa.app.report.charts.scales import short

__all__ = [
    "Axis", "Bars", "Grid", "Line", "Plot", "Points", "Ribbon", "Segments", "data_png", "figure",
    "short",
]  # fmt: skip
