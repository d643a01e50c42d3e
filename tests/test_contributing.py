"""The skeletons in CONTRIBUTING.md work as they are printed: the method samples a known posterior
and keeps what the protocol promises; the others are compared with scipy and closed forms."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from trial import curve, held_to_the_protocol

import doxa
from doxa.app.report.text import short
from doxa.decide.acquisition import acquisition
from doxa.decide.design import Box, Experiment
from doxa.linalg import Structure, structure
from doxa.linalg.layout import Entry, Layout

GUIDE = Path(__file__).parent.parent / "CONTRIBUTING.md"


def block(heading: str, folder: Path) -> ModuleType:
    """The Python block below a heading of the guide, imported."""
    _, found, below = GUIDE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    assert found, f"CONTRIBUTING.md has no section {heading!r}"
    blocks = re.findall(r"```python\n(.*?)```", below.partition("\n## ")[0], re.DOTALL)
    assert len(blocks) == 1
    name = "guide_" + heading.lower().replace(" ", "_")
    path = folder / f"{name}.py"
    path.write_text(blocks[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return block("The skeleton of a method", tmp_path_factory.mktemp("guide"))


@pytest.mark.slow
def test_the_skeleton_samples_the_exact_posterior(skeleton: ModuleType, tmp_path: Path) -> None:
    """y = wx + ε with noise 1 and w ~ N(0, 1): w | D ~ N(Σxy/(Σx² + 1), 1/(Σx² + 1))."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 1))
    y = 0.7 * x + rng.normal(size=(20, 1))
    precision = float((x**2).sum() + 1.0)
    exact_mean, exact_std = float((x * y).sum()) / precision, precision**-0.5
    posterior = doxa.fit(
        nn.Linear(1, 1, bias=False).double(), (x, y), skeleton.MySGLD(),
        likelihood=doxa.Gaussian(noise=1.0), members=50, steps=4000, lr=0.06, batch_size=20,
        schedule="constant",
    )  # fmt: skip
    draws = posterior.draw()["weight"].flatten().numpy()
    assert draws.size == 50 * 200
    # 50 independent chains: the mean of the chain means has a standard error of at most std/√50.
    # The step is η = lr/n = 0.003: the variance is 1/(1 − η·precision/2) times the exact one. A
    # chain forgets in 1/(η·precision) = 21 steps and a draw is kept every ten, so that there are
    # some 2,400 independent draws and the error of their standard deviation is 1.4 %.
    wide = exact_std / np.sqrt(1.0 - 0.003 * precision / 2)
    assert abs(draws.mean() - exact_mean) < 4 * exact_std / np.sqrt(50)
    assert draws.std() == pytest.approx(wide, rel=0.06)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=nn.Linear(1, 1, bias=False).double())
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


@pytest.mark.parametrize("name, values", [("lr", [0.01, 0.05]), ("temperature", [0.2, 1.0])])
def test_a_grid_gives_the_runs_that_single_fits_give(
    skeleton: ModuleType, name: str, values: list[float]
) -> None:
    net = doxa.nets.mlp(1, 1, (5,), "tanh").double()
    options = {"steps": 40, "batch_size": 8, "members": 2, "lr": 0.02, "progress": False}
    runs = doxa.Runs(grid={name: values})
    sweep = doxa.fit(net, curve(), skeleton.MySGLD(), runs=runs, **options)
    assert not torch.allclose(sweep[0].samples, sweep[1].samples, rtol=1e-2)
    for run, value in zip(sweep, values, strict=True):
        rate = {"lr": value} if name == "lr" else {}
        method = skeleton.MySGLD(**({} if rate else {name: value}))
        alone = doxa.fit(net, curve(), method, **(options | rate))
        torch.testing.assert_close(run.samples, alone.samples, rtol=1e-8, atol=1e-10)


def test_members_are_their_own_and_a_run_is_resumed(skeleton: ModuleType, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(1, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    method = skeleton.MySGLD(thin=5)
    posterior = held_to_the_protocol(net, curve(), method, tmp_path, steps=80, lr=0.1)
    assert posterior.samples.shape[:2] == (3, 8)
    assert posterior.buffers["1.num_batches_tracked"].tolist() == [80, 80, 80]


def test_weights_outside_the_subset_are_points(skeleton: ModuleType) -> None:
    net = doxa.nets.mlp(1, 1, (5,), "tanh").double()
    posterior = doxa.fit(
        net, curve(), skeleton.MySGLD(), subset="last_layer", steps=60, members=2, lr=0.05
    )
    draws = posterior.layout.unflatten(posterior.samples)  # {name: [2, T, ...]}
    sampled = {*posterior.network.subset_names, "likelihood.log_noise"}
    assert 0 < len(sampled) < len(draws)
    for name, value in draws.items():
        assert bool((value.std(1) > 0).all()) == (name in sampled), name


def test_the_guide_names_the_protocol() -> None:
    """What a method may write, or declare, is in the section on methods."""
    _, _, below = GUIDE.read_text(encoding="utf-8").partition("\n# Adding a method\n")
    guide = below.partition("\n# Adding other parts\n")[0]
    internal = {"name", "current_settings", "settings", "per_run"}
    names = {name for name in vars(doxa.Method) if not name.startswith("_")} - internal
    assert {"prepare", "own_weights", "kept_draws"} < names
    missing = sorted(name for name in names if not re.search(rf"`{name}\b", guide))
    assert not missing, f"CONTRIBUTING.md does not describe {missing}"


def test_the_skeleton_checks_its_settings(skeleton: ModuleType) -> None:
    with pytest.raises(doxa.errors.MethodError):
        skeleton.MySGLD(thin=0)


def test_the_likelihood(tmp_path: Path) -> None:
    likelihood = block("A likelihood", tmp_path).Exponential()
    f = torch.linspace(-1.0, 1.5, 6, dtype=torch.float64).reshape(6, 1)
    y = torch.tensor([[0.1], [0.5], [2.0], [0.3], [4.0], [1.0]], dtype=torch.float64)
    exact = stats.expon(scale=f.exp().numpy())
    given: dict[str, torch.Tensor] = {}
    assert np.allclose(likelihood.log_prob(f, y, given)[:, None], exact.logpdf(y))
    for name, value in (("mean", exact.mean()), ("variance", exact.var())):
        assert np.allclose(getattr(likelihood, name)(f, given), value)
    assert np.allclose(likelihood.entropy(f, given), exact.entropy())
    assert np.allclose(likelihood.cdf(y, f, given), exact.cdf(y))
    many = torch.full((4000, 1), 0.7, dtype=torch.float64)
    draws = likelihood.sample(many, given, torch.Generator().manual_seed(0))
    assert stats.kstest(draws.flatten(), stats.expon(scale=np.exp(0.7)).cdf).pvalue > 1e-3
    # The Fisher information is the expected negative second derivative, E[y exp(−f)], here by
    # Gauss–Laguerre quadrature of y exp(−f).
    nodes, weights = np.polynomial.laguerre.laggauss(20)
    assert np.allclose(likelihood.curvature(f, given), (nodes * weights).sum())
    net = doxa.nets.mlp(1, 1, (4,), "tanh").double()
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).unsqueeze(1)
    fit = doxa.fit(net, (x, (1.0 + x).exp()), "map", likelihood=likelihood, steps=400, lr=0.05)
    assert torch.allclose(fit.predict(x).mean.log(), 1.0 + x, atol=0.4)
    with pytest.raises(doxa.errors.DataError, match="row 2"):
        likelihood.prepare_targets(torch.tensor([[1.0], [0.0], [-1.0]]), (1,))


def test_the_prior(tmp_path: Path) -> None:
    prior = block("A prior", tmp_path).LogisticPrior(0.7)
    bound = prior.bind(Layout((Entry("weight", (2, 3)), Entry("norm", (2,), centre=1.0))))
    centre = torch.tensor([0.0] * 6 + [1.0] * 2, dtype=torch.float64)
    w = torch.linspace(-2, 3, 8, dtype=torch.float64).requires_grad_()
    exact = stats.logistic(loc=centre.numpy(), scale=0.7).logpdf(w.detach().numpy()).sum()
    value = bound.log_prob(w)
    assert float(value.detach()) == pytest.approx(exact, rel=1e-12)
    family = bound.parts[0].family
    (slope,) = torch.autograd.grad(value, w, create_graph=True)
    assert torch.allclose(family.score(w - centre), slope)
    (bend,) = torch.autograd.grad(slope.sum(), w)
    assert torch.allclose(family.curvature(w - centre), -bend)
    draws = bound.sample(3000, torch.Generator().manual_seed(0))[:, 0]
    assert stats.kstest(draws, stats.logistic(scale=0.7).cdf).pvalue > 1e-3


def test_the_score_and_the_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doxa.app.report import report
    from doxa.evaluate import metrics, table

    score, section = block("A score", tmp_path), block("A section of the report", tmp_path)
    monkeypatch.setattr(table, "SCORES", (*table.SCORES, score.ROW))
    monkeypatch.setattr(report, "SECTIONS", (*report.SECTIONS, section.PART))
    x = np.arange(12.0)[:, None]
    posterior = doxa.fit(nn.Linear(1, 1).double(), (x, 2 * x), "linear", progress=False)
    y = 2 * x + 3.0
    y[5] += 40.0
    error = float((y - posterior.predict(x).mean.numpy()).mean())
    assert score.mean_error(posterior.predict(x), y) == pytest.approx(error)
    assert metrics(posterior.predict(x), y)["mean_error"] == pytest.approx(error)
    text = report.write(
        posterior, tmp_path / "report.html", test=(x, y), diagnose=False
    ).read_text()
    shown = text.partition('id="errors"')[2]
    assert "mean error" in text and short(error) in text and "near 0" in text
    assert "Largest errors" in shown and re.search(r"<t[dh][^>]*>\s*5\s*</t", shown)


def test_the_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from doxa.diagnose import doctor

    module = importlib.import_module("doxa.diagnose.doctor")
    monkeypatch.setitem(module.EACH_HEAD, "bias", block("A diagnosis", tmp_path).bias)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    y = x + 0.3 * rng.normal(size=(200, 1))
    posterior = doxa.fit(nn.Linear(1, 1).double(), (x[:100], y[:100]), "linear", progress=False)
    train = (x[:100], y[:100])
    assert doctor(posterior, train, (x[100:], y[100:]))["bias"].status == "good"
    shifted = doctor(posterior, train, (x[100:], y[100:] + 0.3))["bias"]
    assert shifted.status == "bad" and shifted.value == pytest.approx(1.0, abs=0.4)
    assert doctor(posterior, train)["bias"].status == "not checked"


def test_the_acquisition_function(tmp_path: Path) -> None:
    least_confidence = block("An acquisition function", tmp_path).least_confidence
    p = doxa.Predictive.from_probs(torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.3, 0.3]]))
    assert torch.allclose(least_confidence(p), torch.tensor([0.1, 0.6]))
    assert acquisition(least_confidence) is least_confidence


def test_the_estimator_of_information_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """y = dθ + ε with standard normals: the gain is ½ log(1 + d²), and the bound is tight."""
    module = importlib.import_module("doxa.decide.design.eig")
    estimator = block("An estimator of information gain", tmp_path).normal_marginal
    monkeypatch.setitem(module._TAKES, "normal-marginal", {"outer": 20_000})
    monkeypatch.setitem(module._CALLED, "normal-marginal", estimator)
    zero, one = torch.zeros(()).double(), torch.ones(()).double()
    experiment = Experiment(
        torch.distributions.Normal(zero, one),
        lambda theta, d: torch.distributions.Normal(theta * d, one),
        space=Box(0.0, 5.0),
    )
    designs = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    found = module.eig(experiment, designs, "normal-marginal")
    exact = 0.5 * (1 + designs.square()).log()
    # The terms are chi-squared variables of order 1, so that the error is about 0.007.
    assert bool((found.errors > 0).all()) and bool((found.errors < 0.01).all())
    assert bool(((found.values - exact).abs() < 4 * found.errors).all())


def test_the_covariance_structure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Structure, "_named", dict(Structure._named))
    v = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    ours = block("A covariance structure", tmp_path).Isotropic(v, torch.ones(2, 3).double())
    dense = v[:, :, None] * torch.eye(3, dtype=torch.float64)  # [K, P, P]
    rows = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 2, 3)  # [T, K, P]
    assert torch.allclose(ours.dense(), dense) and torch.allclose(ours.logdet(), dense.logdet())
    assert torch.allclose(ours.matmul(rows), torch.einsum("kpq,tkq->tkp", dense, rows))
    assert torch.allclose(ours.solve(ours.matmul(rows)), rows)
    assert torch.allclose(ours.sample(rows), torch.einsum("k,tkp->tkp", v[:, 0].sqrt(), rows))
    assert torch.allclose(ours.scaled(3.0).dense(), 3.0 * dense)
    assert torch.allclose(structure("isotropic", ours.state()).diagonal(), ours.diagonal())
    assert torch.allclose(ours.member(1).dense(), dense[1:])
