"""The demo writes its figures, names every method, and shows what it promises."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import doxa
from doxa.app import demo
from doxa.errors import MethodError

pytest.importorskip("matplotlib")
pytest.importorskip("gpytorch")


def test_every_method_has_a_panel() -> None:
    """Or a reason why it has none."""
    shown = {case.method for case in demo.CASES}
    left_out = {row.name: row.demo.left_out for row in doxa.methods() if row.demo.left_out}
    assert shown.isdisjoint(left_out)
    assert shown | set(left_out) >= {r.name for r in doxa.methods() if "regression" in r.tasks}
    assert all(len(reason) > 20 for reason in left_out.values())
    assert demo.MOONS[0].method == "map"  # the point estimate comes first


def test_a_short_demo_writes_two_figures(tmp_path: Path, monkeypatch) -> None:
    short = {"steps": 150}
    few = {"draws": 5, "burn_in": 1, "thin": 1}  # too few for chains to meet
    monkeypatch.setattr(demo, "CASES", (demo.Case("linear", "", {"features": "rbf"}),
                                        demo.Case("map", "", {}, short, (8,)),
                                        demo.Case("sgld", "", few)))  # fmt: skip
    shown = []
    draw = demo.figures.regression_figure
    monkeypatch.setattr(
        demo.figures, "regression_figure", lambda *a: (shown.extend(a[5]), draw(*a))
    )
    monkeypatch.setattr(demo, "MOONS", (demo.Case("map", "point", {}, short),
                                        demo.Case("deep-ensemble", "", {}, short)))  # fmt: skip
    text = io.StringIO()
    demo.run(tmp_path / "figures", 0, Console(file=text, width=200))
    with pytest.raises(MethodError, match="'metropolis' has no panel in the demo: a random walk"):
        demo.run(tmp_path, 0, Console(file=text), methods=["metropolis"])
    for name in ("gap.png", "two_moons.png"):
        path = tmp_path / "figures" / name
        assert path.read_bytes().startswith(b"\x89PNG")
        assert str(path) in text.getvalue()
    assert "linear" in text.getvalue() and "deep-ensemble" in text.getvalue()
    assert [panel.trouble for panel in shown] == [
        "",
        "underfit",
        "not-converged",
    ]
    assert "sgld: not-converged: R-hat of the functions" in text.getvalue()


@pytest.mark.slow
def test_the_demo_shows_what_it_says() -> None:
    """Unsure in the gap, sure at the data; and the point estimate surer than the posterior."""
    from doxa import nets
    from doxa.data import simulated

    train = simulated.gap_regression(100, demo.TRAIN)
    inside = np.linspace(-0.8, 1.2, 21)[:, None]
    cases = {case.method: case for case in demo.CASES}
    for name in ("gp", "laplace", "hmc"):
        net = nets.mlp(1, 1, demo.HIDDEN, "tanh")
        posterior = demo._fit(cases[name], net, doxa.Normal(1.5), train, "gaussian", 0)
        at_data = posterior.predict(train.x).epistemic.mean()
        in_gap = posterior.predict(inside).epistemic.mean()
        assert in_gap > 4 * at_data, name
    case = cases["mean-field"]
    assert case.settings.get("temperature", 1.0) == 1.0
    posterior = demo._fit(
        case, nets.mlp(1, 1, case.hidden, "tanh"), doxa.Normal(1.5), train, "gaussian", 0
    )
    near = demo._score(posterior, simulated.gap_regression(400, demo.TEST))
    assert near["rmse"] < 1.25 * simulated.GAP_NOISE and near["coverage"] > 0.9
    moons = simulated.two_moons(120, 0.15, demo.TRAIN)
    away = np.array([[4.0, 3.2], [-3.0, -2.7], [3.5, 2.5], [-2.5, -2.0]])
    confidence = []
    for case in demo.MOONS:
        net = nets.mlp(2, 2, (50,), "tanh")
        posterior = demo._fit(case, net, doxa.Normal(1.5), moons, "categorical", 0)
        confidence.append(float(posterior.predict(away).probs.max(1).values.mean()))
    assert confidence[0] > confidence[1] + 0.1
