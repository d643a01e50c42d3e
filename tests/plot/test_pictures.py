"""Pictures by their content: the numbers of the lines, the labels and the ranges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import doxa
from doxa.errors import DataError, MethodError, ShapeError, Unavailable
from doxa.likelihoods import Categorical, Gaussian

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from doxa.plot.style import SERIES

ROWS = 400


@pytest.fixture
def ax() -> Any:
    figure = Figure()
    FigureCanvasAgg(figure)
    return figure.subplots()


def drawn(ax: Any) -> Any:
    """The same axes, after everything on them was drawn once."""
    ax.figure.canvas.draw()
    return ax


def line(ax: Any, label: str) -> tuple[np.ndarray, np.ndarray]:
    (found,) = [each for each in ax.get_lines() if each.get_label() == label]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


def numbers(std: float = 1.0) -> tuple[doxa.Predictive, torch.Tensor]:
    """Predictions with standard deviation `std` of targets whose own is 1, around a known mean."""
    source = torch.Generator().manual_seed(0)
    mean = torch.linspace(-2.0, 2.0, ROWS, dtype=torch.float64)[:, None]
    y = mean + torch.randn(ROWS, 1, generator=source, dtype=torch.float64)
    f = torch.stack([mean - 0.1, mean + 0.1])
    return doxa.Predictive.from_samples(f, Gaussian(noise=std)), y


def classes(rows: int = ROWS) -> tuple[doxa.Predictive, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    f = torch.randn(5, rows, 3, generator=source, dtype=torch.float64)
    p = doxa.Predictive.from_samples(f, Categorical())
    return p, torch.multinomial(p.probs, 1, generator=source)[:, 0]


def test_reliability_of_classes_is_that_of_evaluate(ax: Any) -> None:
    p, y = classes()
    assert drawn(doxa.plot.reliability(p, y, bins=8, ax=ax)) is ax
    found = doxa.evaluate.reliability(p, y, 8)
    here = found.count > 0
    points = ax.collections[-1].get_offsets()
    assert np.allclose(points[:, 0], found.confidence[here])
    assert np.allclose(points[:, 1], found.accuracy[here])
    assert f"ECE {doxa.evaluate.ece(p, y, bins=8):.3f}" in ax.get_title("left")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("confidence", "accuracy")
    assert ax.get_xlim() == ax.get_ylim() == (0.0, 1.0)


def test_reliability_of_numbers_bends_with_overconfidence(ax: Any) -> None:
    sure, y = numbers(0.3)
    at, observed = line(doxa.plot.reliability(sure, y, ax=ax), "predictions")
    assert observed[at < 0.2].min() > 0.2 and observed[at > 0.8].max() < 0.8
    assert np.array_equal(*line(ax, "calibrated"))


def test_pit_has_its_bars_and_its_band(ax: Any) -> None:
    p, y = numbers()
    drawn(doxa.plot.pit(p, y, bins=10, ax=ax))
    heights = [bar.get_height() for bar in ax.containers[0]]
    assert np.allclose(heights, doxa.evaluate.pit_histogram(p, y, 10).density)
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    half = 1.96 * (0.9 * 10 / ROWS) ** 0.5
    assert band.y0 == pytest.approx(1 - half) and band.y1 == pytest.approx(1 + half)


def test_intervals_hold_the_share_in_the_title_and_mark_the_others(ax: Any) -> None:
    p, y = numbers()
    drawn(doxa.plot.intervals(p, y, level=0.8, most=ROWS, ax=ax))
    low, high = (bound.flatten() for bound in p.interval(0.8))
    inside = (low <= y[:, 0]) & (y[:, 0] <= high)
    assert f"hold {100 * float(inside.double().mean()):.0f} %" in ax.get_title("left")
    assert len(line(ax, "y outside")[0]) == int((~inside).sum())
    segments = np.array(ax.collections[0].get_segments())  # rows are in order of the mean already
    assert np.allclose(segments[:, 0, 1], low) and np.allclose(segments[:, 1, 1], high)
    assert np.allclose(line(ax, "mean")[1], p.mean.flatten())
    with pytest.raises(ShapeError, match="y has 3 values, and there are 400"):
        doxa.plot.intervals(p, y[:3], ax=ax)
    with pytest.raises(MethodError, match="decomposition"):
        doxa.plot.intervals(classes()[0], ax=ax)


def test_decomposition_adds_up(ax: Any) -> None:
    p, _ = classes(100)
    drawn(doxa.plot.decomposition(p, ax=ax))
    top = ax.collections[1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(float(p.entropy.max()))
    share = float(p.mutual_information.sum() / p.entropy.sum())
    assert ax.get_title("left") == f"uncertainty, {100 * share:.0f} % of it epistemic"
    q, _ = numbers(0.5)
    labels = doxa.plot.decomposition(q, ax=Figure().subplots()).get_legend_handles_labels()[1]
    assert labels == ["aleatoric: noise", "epistemic: of the function"]


def test_ood_has_the_area_and_both_medians(ax: Any) -> None:
    inside, outside = np.linspace(0, 1, 101), np.linspace(0.5, 2.5, 101)
    drawn(doxa.plot.ood({"knn": inside}, {"knn": outside}, ax=ax))
    area = doxa.evaluate.auroc(torch.as_tensor(inside), torch.as_tensor(outside))
    assert f"AUROC {area:.3f}" in ax.get_title("left") and ax.get_xlabel() == "knn"
    assert [each.get_xdata()[0] for each in ax.get_lines()] == [0.5, 1.5]
    with pytest.raises(DataError, match="no score 'far'; there are knn"):
        doxa.plot.ood({"knn": inside}, {"knn": outside}, score="far", ax=ax)


CHAINS = {"a": torch.randn(3, 200, generator=torch.Generator().manual_seed(2)),
          "b": torch.randn(3, 200, 2, generator=torch.Generator().manual_seed(3))}  # fmt: skip


def test_traces_and_ranks_have_every_chain(ax: Any) -> None:
    drawn(doxa.plot.trace(CHAINS, ["a", "b[1]"], ax=ax))
    first, second = ax.child_axes
    assert [len(small.get_lines()) for small in (first, second)] == [3, 3]
    assert np.array_equal(second.get_lines()[2].get_ydata(), CHAINS["b"][2, :, 1].numpy())
    assert re.fullmatch(r"b\[1\]   R-hat \d\.\d{3}", second.get_title("left"))
    other = Figure().subplots()
    apart = {"a": CHAINS["a"] + torch.tensor([18.0, 0.0, 9.0])[:, None]}
    doxa.plot.rank(apart, bins=6, ax=other)
    found = [patch.get_data().values for patch in other.patches if hasattr(patch, "get_data")]
    thirds = [values.reshape(3, 2).sum(1).tolist() for values in found]
    assert thirds == [[0, 0, 200], [200, 0, 0], [0, 200, 0]]  # each chain has a third of the ranks
    with pytest.raises(DataError, match="no parameter is called 'c'; there are a, b"):
        doxa.plot.trace(CHAINS, ["c"], ax=ax)


def test_pairs_and_energy_of_draws(ax: Any) -> None:
    draws = doxa.sample(
        lambda v: -0.5 * (v["x"].square().sum() + v["y"].square()), {"x": torch.zeros(2), "y": 0.0},
        doxa.HMC(draws=30, burn_in=20, leapfrog=4), members=2, progress=False,
    )  # fmt: skip
    drawn(doxa.plot.pairs(draws, ax=ax))
    assert sum(small.get_visible() for small in ax.child_axes) == 6
    below = ax.child_axes[3].get_lines()[0]  # the second row: x[1] over x[0]
    assert np.allclose(below.get_xdata(), draws["x"][:, :, 0].flatten())
    assert np.allclose(below.get_ydata(), draws["x"][:, :, 1].flatten())
    other = Figure().subplots()
    doxa.plot.energy(draws, ax=other)
    worst = min(draws.diagnostics["ebfmi"])
    said = float(re.findall(r"E-BFMI ([\d.]+)", other.get_title("left"))[0])
    assert said == pytest.approx(worst, abs=0.006)
    assert draws.plot(ax=Figure().subplots()).child_axes  # a trace
    with pytest.raises(Unavailable, match="HMC and NUTS keep them"):
        doxa.plot.energy(CHAINS, ax=other)


@pytest.fixture(scope="module")
def fitted() -> doxa.Posterior:
    x = torch.linspace(-1, 1, 40)[:, None]
    y = 3.0 * x[:, 0] + 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(4))
    return doxa.fit(
        doxa.nets.mlp(1, 1, (8,)), (x, y), "deep-ensemble", members=2, steps=60, progress=False
    )


def test_functions_show_the_predictive(ax: Any, fitted: doxa.Posterior) -> None:
    grid = np.linspace(2.0, -2.0, 21)
    drawn(doxa.plot.functions(fitted, grid, data=([0.5], [1.5]), ax=ax))
    p = fitted.predict(torch.linspace(-2.0, 2.0, 21)[:, None])
    at, mean = line(ax, "mean")
    assert np.allclose(at, grid[::-1]) and np.allclose(mean, p.mean, atol=1e-5)
    total = ax.collections[0].get_paths()[0].vertices
    assert total[:, 1].max() == pytest.approx(float((p.mean + 2 * p.std).max()), rel=1e-4)
    assert ax.get_title("left") == f"deep-ensemble: {fitted.status}"
    assert line(ax, "data") == (np.array([0.5]), np.array([1.5]))
    with pytest.raises(DataError, match="functions are of a posterior"):
        doxa.plot.functions(numbers()[0], grid, ax=ax)


def test_learning_curves_are_the_history(ax: Any, fitted: doxa.Posterior) -> None:
    drawn(fitted.plot(ax=ax))
    at, loss = line(ax, "loss on training rows, per row")
    assert at.tolist() == [step for step, _ in fitted.history["loss"]]
    assert np.allclose(loss, [np.mean(values) for _, values in fitted.history["loss"]])
    other = doxa.plot.learning_curve({"bald": [(10, 0.5), (20, 0.7)]}, ax=Figure().subplots())
    assert line(other, "bald")[1].tolist() == [0.5, 0.7]
    with pytest.raises(DataError, match=r"active\.learn, not of list"):
        doxa.plot.learning_curve([1], ax=ax)


def test_weights_are_those_of_the_draws(ax: Any, fitted: doxa.Posterior) -> None:
    drawn(doxa.plot.weights(fitted, ax=ax))
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    means = fitted.draw()["0.weight"].double().mean(0)
    span = ax.collections[0].get_segments()[0][:, 0]
    assert np.allclose(span, np.quantile(means, [0.05, 0.95]))


def test_eig_marks_the_best_design(ax: Any) -> None:
    from doxa.decide.design import Study, working_memory

    study = Study(working_memory())
    gains = study.gains()
    drawn(doxa.plot.eig(study, ax=ax))
    best = float(gains.best_design)
    assert line(ax, f"best: {best:g}")[0].tolist() == [best]
    assert np.allclose(line(ax, gains.estimator)[1], gains.values)


def test_closeness_has_the_closest_first(ax: Any) -> None:
    p, _ = numbers()
    away = {name: doxa.evaluate.closeness(numbers(std)[0], p) for name, std in
            (("wide", 3.0), ("near", 1.1))}  # fmt: skip
    drawn(doxa.plot.closeness(away, ax=ax))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["near", "wide"]
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [away["near"].total_variation, away["wide"].total_variation]
    with pytest.raises(DataError, match="'near' has no agreement"):
        doxa.plot.closeness({"near": away["near"]}, metric="agreement", ax=ax)


def test_plot_of_a_result_is_its_own_picture(ax: Any) -> None:
    p, y = numbers()
    assert "intervals, which hold" in p.plot(y, level=0.5, ax=ax).get_title("left")
    assert "of it epistemic" in classes()[0].plot(ax=Figure().subplots()).get_title("left")


def test_the_colours_are_those_of_the_report() -> None:
    style = Path(doxa.__file__).parent / "app" / "report" / "templates" / "style.css"
    light = style.read_text(encoding="utf-8").partition("}")[0]
    assert tuple(re.findall(r"--(?:one|two|three|four): (#\w+)", light)) == SERIES
