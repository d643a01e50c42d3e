"""Rows left out are asked about the likelihood: by whom, when, and what stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

import doxa
from doxa.app import fitting
from doxa.driver import finish
from doxa.driver.setup import own_parts
from doxa.laplace import posterior as links
from doxa.likelihoods import infer
from doxa.sklearn import BayesianRegressor
from doxa.tables.schema import TableSpec, inferred

N = 600
Data = tuple[Tensor, Tensor]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(heavy: bool) -> Data:
    """y = x plus normal errors, every fifth of them eight times as large."""
    x, e = torch.randn(N, 1, generator=generator(1)), torch.randn(N, generator=generator(2))
    if heavy:
        e[::5] *= 8.0
    return x, x[:, 0] + 0.2 * e


def classes() -> Data:
    """The second class has the logit x."""
    x = 2.0 * torch.randn(N, 1, generator=generator(3))
    return x, (torch.rand(N, generator=generator(4)) < x[:, 0].sigmoid()).long()


def fitted(data: Data, method: Any = "map", **options: Any) -> Any:
    """Networks that are right about numbers, and three times too sure of classes, as they are
    given (a rate of almost zero)."""
    number = data[1].is_floating_point()
    net = torch.nn.Linear(1, 1 if number else 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0]] if number else [[0.0], [3.0]]))
    options = {"steps": 2, "progress": False, "lr": 1e-9, "init": "given"} | options
    return doxa.fit(net, data, method, **options)


def test_it_is_said_saved_and_shown(tmp_path: Path) -> None:
    for data in (numbers(True), classes()):
        posterior = fitted(data, "deep-ensemble", members=3)
        likelihood = posterior.base_likelihood
        calibrated = posterior.diagnostics["held_out_calibration"]
        rows, message = calibrated["rows"], calibrated["likelihood"]
        assert rows == 3 * len(data[0]) // 10
        assert f"{message}, by {rows} held-out rows" in repr(posterior)
        posterior.save(tmp_path / likelihood.name)
        net = torch.nn.Linear(1, 1 if likelihood.name == "student-t" else 2, bias=False)
        loaded = doxa.load(tmp_path / likelihood.name, net)
        assert loaded.base_likelihood == likelihood and repr(loaded) == repr(posterior)
        assert loaded.fitted_likelihood == posterior.fitted_likelihood != likelihood
        for each in (posterior, loaded):
            p = each.predict(data[0])
            assert torch.equal(p.log_prob(data[1]), posterior.predict(data[0]).log_prob(data[1]))


def test_the_former_key_of_the_diagnostics_is_read(tmp_path: Path) -> None:
    posterior = fitted(numbers(True))
    now, shown = posterior.diagnostics["held_out_calibration"], repr(posterior)
    posterior.record.diagnostics["left_out"] = posterior.record.diagnostics.pop(
        "held_out_calibration"
    )
    posterior.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run", torch.nn.Linear(1, 1, bias=False))
    assert loaded.diagnostics["held_out_calibration"] == now
    with pytest.warns(DeprecationWarning, match="held_out_calibration"):
        assert loaded.diagnostics["left_out"] == now
    assert "left_out" not in loaded.diagnostics and repr(loaded) == shown


def test_former_names_still_work() -> None:
    model = doxa.Model(torch.nn.Linear(1, 1))
    with pytest.warns(DeprecationWarning, match="with_likelihood"):
        assert model.meaning("student-t").likelihood == doxa.StudentT()
    y = (torch.arange(40) % 2).double()[:, None]
    rows = (8.0 * (2 * y - 1)[None], 1 - y, {}, torch.ones(40))
    with pytest.warns(DeprecationWarning, match="calibrate_held_out"):
        assert doxa.Bernoulli().left_out(*rows) == doxa.Bernoulli().calibrate_held_out(*rows)
    found = infer(torch.tensor([0, 1, 1]), ())
    with pytest.warns(DeprecationWarning, match="Inferred.message"):
        assert found.said == found.message == f"bernoulli, because {found.reason}"


def test_only_what_nobody_gave_is_asked_for() -> None:
    heavy, sure = numbers(True), classes()
    assert isinstance(fitted(heavy).base_likelihood, doxa.StudentT)
    assert fitted(numbers(False)).base_likelihood == doxa.Gaussian()
    assert fitted(heavy, likelihood="gaussian").base_likelihood == doxa.Gaussian()
    assert fitted(heavy, validation=None).base_likelihood == doxa.Gaussian()
    sampled = fitted(heavy, doxa.SGLD(draws=5, burn_in=5), lr=1e-3, validation=0.3)
    assert sampled.base_likelihood == doxa.Gaussian()
    assert fitted(sure, likelihood="categorical").base_likelihood.temperature > 1.5
    given = doxa.Categorical(temperature=1.0)
    assert fitted(sure, likelihood=given).base_likelihood == given
    assert fitted(sure, validation=None).base_likelihood == doxa.Categorical()


@pytest.mark.parametrize(("rows", "asked"), [(9, False), (10, True)])
def test_ten_rows_are_asked_and_nine_are_not(rows: int, asked: bool) -> None:
    """Half of them are labelled against a network that is sure."""
    x = torch.tensor([[2.0], [-2.0]] * 5)[:rows]
    y = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 1])[:rows]
    posterior = fitted(classes(), validation=(x, y))
    assert (posterior.base_likelihood.temperature is not None) == asked


def _two_rows_wider(errors: np.ndarray, df: float) -> float:
    """By scipy: the scale of Student-t errors under which Σ log p + 2 log s is largest."""
    value = lambda u: -(stats.t.logpdf(errors, df, scale=np.exp(u)).sum() + 2.0 * u)  # noqa: E731
    return float(np.exp(optimize.minimize_scalar(value, bounds=(-5.0, 2.0)).x))


def test_the_scale_is_that_of_the_errors_left_out() -> None:
    """The network is right, so that rows left out have the errors y − x."""
    x, y = numbers(True)
    splits = own_parts([torch.arange(N)], [0], [0])
    assert splits is not None and splits.held_out is not None
    errors = (y - x[:, 0])[splits.held_out[0]].double().numpy()
    posterior = fitted((x, y))
    df = posterior.base_likelihood.df
    scale = _two_rows_wider(errors, df)
    assert float(posterior.draw()["likelihood.log_scale"].exp()) == pytest.approx(scale, rel=1e-3)
    std = scale * (df / (df - 2)) ** 0.5
    assert float(posterior.predict(x[:1]).std) == pytest.approx(std, rel=1e-3)


def test_runs_are_asked_each_by_its_own_rows() -> None:
    (x, y), (_, heavy) = numbers(False), numbers(True)
    both = torch.cat([x, x]), torch.cat([y, heavy])
    rows = [torch.arange(N), torch.arange(N, 2 * N)]
    sweep = fitted(both, runs=doxa.Runs(rows=rows))
    assert [p.base_likelihood.name for p in sweep] == ["gaussian", "student-t"]
    alone = fitted((x, heavy))
    assert sweep[1].base_likelihood.name == alone.base_likelihood.name


def test_a_fit_that_goes_on_says_the_same(tmp_path: Path) -> None:
    whole = fitted(numbers(True))
    with pytest.raises(KeyboardInterrupt):
        fitted(numbers(True), checkpoint=tmp_path, checkpoint_every=0.0, callbacks=[_at_once])
    again = fitted(numbers(True), checkpoint=tmp_path)
    assert again.base_likelihood == whole.base_likelihood
    assert torch.equal(again.samples, whole.samples)


def _at_once(step: int, info: Any) -> bool:
    raise KeyboardInterrupt


def test_a_row_is_given_to_the_mixture_moved_to_the_member_that_left_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Tensor, Tensor, int]] = []

    def calibrate(_: Any, f: Tensor, y: Tensor, *rest: Any, stopped: int) -> None:
        seen.append((f, y, stopped))

    monkeypatch.setattr(doxa.Categorical, "calibrate_held_out", calibrate)
    monkeypatch.setattr(finish, "compare_with_yardsticks", lambda *_: None)  # calibrated, too
    x, y = classes()
    posterior = fitted((x, y), "deep-ensemble", members=3, init="fresh")
    splits = own_parts([torch.arange(N)], range(3), [0])
    assert splits is not None and splits.held_out is not None
    f, asked, stopped = seen[0]
    assert stopped == 3 and torch.equal(asked, y[torch.cat(splits.held_out)])
    outputs = posterior.predict(x).samples  # [3, N, 2]
    own = torch.cat([outputs[m, rows] for m, rows in enumerate(splits.held_out)])
    torch.testing.assert_close(f.mean(0), own)
    torch.testing.assert_close(f.var(0), outputs[:, torch.cat(splits.held_out)].var(0))
    given = (x[:60], y[:60])  # no training was stopped by them
    fitted((x, y), doxa.Laplace(train=False), validation=given)
    assert len(seen) == 2 and seen[1][2] == 0


def test_a_temperature_divides_logits_wherever_they_are() -> None:
    """Against the same functions at T = 1, divided by hand: samples, moments, a closed link."""
    f, t = torch.randn(7, 5, 3, generator=generator(6)).double(), 1.7
    cold = doxa.Predictive(f, doxa.Categorical(temperature=t))
    torch.testing.assert_close(cold.samples, f / t)
    torch.testing.assert_close(cold.probs, (f / t).softmax(2).mean(0))
    again = doxa.Predictive.from_samples(cold.samples, cold.likelihood)
    torch.testing.assert_close(again.probs, cold.probs)
    for link in ("probit", "bridge"):
        spread = torch.eye(3).double().expand(7, 5, 3, 3)
        variance = torch.ones_like(f)
        one, two = (
            links._form(doxa.Categorical(temperature=own), links._Logits(*parts), {}, link).probs
            for own, parts in (
                (t, (f, variance, spread)), (None, (f / t, variance / t**2, spread / t**2)),
            )
        )  # fmt: skip
        torch.testing.assert_close(one, two)


def test_estimators_and_tables_ask_like_fit() -> None:
    x, y = (t.numpy() for t in numbers(True))
    asked = {"members": 1, "steps": 100, "lr": 0.05, "hidden": (4,)}
    estimator = BayesianRegressor("deep-ensemble", **asked).fit(x, y)
    frame = pd.DataFrame({"x": x[:, 0], "y": y})
    schema = inferred(frame, TableSpec("y"), None)
    table = fitting.fit_arrays(schema, x, y, "deep-ensemble", (), fitting.Plan(**asked))
    for posterior in (estimator.posterior_, table):
        assert posterior.base_likelihood.name == "student-t"
    assert not inferred(frame, TableSpec("y", "gaussian"), None).assumed


def test_gaussians_over_functions_are_drawn_to_be_asked() -> None:
    """Laplace's predictive with Gaussian noise is a closed form; heavy errors matter to it too."""
    (x, y), (_, heavy) = numbers(False), numbers(True)
    assert fitted((x, y), "laplace").base_likelihood == doxa.Gaussian()
    posterior = fitted((x, heavy), doxa.Laplace(tune=None))
    point = fitted((x, heavy))  # doubt about one weight of 540 rows is hardly any
    assert posterior.base_likelihood == point.base_likelihood
    scales = [float(p.draw()["likelihood.log_scale"].mean()) for p in (posterior, point)]
    assert scales[0] == pytest.approx(scales[1], abs=0.02)
    scores = [p.predict(x).log_prob(heavy).mean() for p in (posterior, point)]
    torch.testing.assert_close(scores[0], scores[1], atol=5e-3, rtol=0)
    closed = fitted((x, heavy), doxa.Laplace(tune=None), likelihood="gaussian")
    assert scores[0] > closed.predict(x).log_prob(heavy).mean() + 0.1
    members = fitted((x, heavy), doxa.Laplace(tune=None), members=3)
    assert isinstance(members.base_likelihood, doxa.StudentT) and members.status == "ok"


@pytest.mark.parametrize("method", ["vip", "last-layer-vi", "laplace"])
def test_methods_whose_functions_are_a_closed_form_take_it_up(tmp_path: Path, method: str) -> None:
    x, heavy = numbers(True)
    options: dict[str, Any] = {"steps": 300, "progress": False}
    posterior = doxa.fit(doxa.nets.mlp(1, 1, (8,)), (x, heavy), method, **options)
    assert isinstance(posterior.base_likelihood, doxa.StudentT) and posterior.status == "ok"
    gaussian = doxa.fit(
        doxa.nets.mlp(1, 1, (8,)), (x, heavy), method, likelihood="gaussian", **options
    )
    scores = [float(p.predict(x).log_prob(heavy).mean()) for p in (posterior, gaussian)]
    assert scores[0] > scores[1] + 0.1
    posterior.save(tmp_path / "p")
    loaded = doxa.load(tmp_path / "p")
    assert torch.equal(loaded.predict(x).log_prob(heavy), posterior.predict(x).log_prob(heavy))


def test_functions_are_drawn_as_wide_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty at each of sixty rows: the mean of their variances is Laplace's own to 1/√1500."""
    seen: list[Tensor] = []

    def calibrate(_: Any, f: Tensor, *rest: Any, stopped: int) -> None:
        seen.append(f)

    monkeypatch.setattr(doxa.Gaussian, "calibrate_held_out", calibrate)
    x, y = numbers(False)
    posterior = fitted((x, y), doxa.Laplace(tune=None))
    splits = own_parts([torch.arange(N)], [0], [0])
    assert splits is not None and splits.held_out is not None
    p = posterior.predict(x[splits.held_out[0]])
    assert seen[0].shape == (50, 60, 1)
    own = p.epistemic.reshape(60)
    ratio = float((seen[0][..., 0].var(0) / own).mean())
    assert ratio == pytest.approx(1.0, abs=5 / 1500**0.5)
    error = own.sqrt() / 50**0.5
    assert ((seen[0][..., 0].mean(0) - p.mean.reshape(60)).abs() < 5 * error).all()


def uneven() -> Data:
    """y = x₀ plus normal errors of 0.3 exp(0.8 x₁)."""
    x = 3.0 * torch.rand(N, 2, generator=generator(5)) - 1.5
    noise = 0.3 * (0.8 * x[:, 1]).exp()
    return x, 10.0 + 4.0 * (x[:, 0] + noise * torch.randn(N, generator=generator(6)))


def two_inputs(method: Any = "deep-ensemble", **options: Any) -> Any:
    """Networks that have learned x₀, up to the standardisation of y."""
    net = torch.nn.Linear(2, 1)
    options = {"steps": 300, "progress": False, "lr": 0.02, "standardize": True} | options
    return doxa.fit(net, options.pop("data", None) or uneven(), method, **options)


def test_noise_that_varies_with_an_input_is_used_said_and_saved(tmp_path: Path) -> None:
    """The noise is that of the errors, 1.2 exp(0.8 x₁), to two fifths by 300 rows; intervals,
    moments and the score are those of one distribution, and survive saving."""
    posterior, x, y = two_inputs("map", validation=0.5), *uneven()
    calibrated = posterior.diagnostics["held_out_calibration"]
    assert calibrated["noise_columns"] == [1] and calibrated["noise_p_value"] <= 0.01
    assert "gaussian, whose noise depends on column 1 of x, by 300 held-out rows" in repr(posterior)
    at = torch.tensor([[0.0, -1.0], [0.0, 0.0], [0.0, 1.0]])
    p = posterior.predict(at)
    torch.testing.assert_close(
        p.aleatoric.sqrt().reshape(3), 1.2 * (0.8 * at[:, 1]).exp(), rtol=0.4, atol=0.0
    )
    low, high = p.interval(0.95)
    torch.testing.assert_close(
        ((high - low) / (2 * 1.96 * p.std)).reshape(3), torch.ones(3), rtol=1e-3, atol=0.0
    )
    torch.testing.assert_close(p.cdf(p.quantile(0.8)), torch.full_like(low, 0.8))
    streamed = posterior.predict(at, keep="moments")
    torch.testing.assert_close(streamed.std, p.std, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(streamed.mean, p.mean)
    drawn = p.sample(4000).double()
    torch.testing.assert_close(drawn.std(0).float(), p.std, rtol=0.06, atol=0.0)
    constant = two_inputs("map", validation=0.5, likelihood="gaussian")
    gain = posterior.predict(x).log_prob(y).mean() - constant.predict(x).log_prob(y).mean()
    assert gain > 0.15
    posterior.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run", torch.nn.Linear(2, 1))
    assert loaded.noise_scale == posterior.noise_scale and repr(loaded) == repr(posterior)
    assert torch.equal(loaded.predict(x).log_prob(y), posterior.predict(x).log_prob(y))


def test_a_closed_form_stays_one_under_noise_that_varies() -> None:
    """Laplace's Gaussians over functions add up with the noise of each row."""
    x, y = uneven()
    posterior = two_inputs(doxa.Laplace(tune=None), validation=0.3)
    assert posterior.noise_scale is not None
    assert posterior.diagnostics["held_out_calibration"]["noise_columns"] == [1]
    p = posterior.predict(x)
    assert not p.has_samples and (p.epistemic > 0).all()
    torch.testing.assert_close(p.variance, p.aleatoric + p.epistemic)
    z = (y - p.mean) / p.std
    normal = -0.5 * z.square() - p.std.log() - 0.5 * float(np.log(2 * np.pi))
    torch.testing.assert_close(p.log_prob(y), normal.to(y), rtol=1e-4, atol=1e-4)


def test_constant_noise_stays_constant() -> None:
    """Also where the likelihood is given, or nothing is held out. (This seed is no false alarm.)"""
    x, y = uneven()
    plain = 10.0 + 4.0 * (x[:, 0] + 0.3 * torch.randn(N, generator=generator(6)))
    assert two_inputs(data=(x, plain)).noise_scale is None
    assert two_inputs(likelihood="gaussian").noise_scale is None
    assert two_inputs(validation=None).noise_scale is None
    few = two_inputs("map", data=(x[:250], y[:250]), validation=0.1)
    assert few.noise_scale is None  # 25 held-out rows
    assert two_inputs("map", data=(x[:45], y[:45])).noise_scale is not None  # cross-fitted


@pytest.mark.slow
@pytest.mark.parametrize("method", ["deep-ensemble", "laplace", "mc-dropout"])
def test_counts_are_poisson_or_negative_binomial(tmp_path: Path, method: str) -> None:
    """Poisson counts, and counts with a gamma distributed factor of mean 1 and variance 1."""
    x = torch.rand(N, 1, generator=generator(7)) * 2
    factor = torch._standard_gamma(torch.ones(N), generator=generator(8))
    options: dict[str, Any] = {"steps": 300, "progress": False, "likelihood": "counts"}
    for more, name in ((torch.ones(N), "poisson"), (factor, "negative-binomial")):
        y = torch.poisson((0.5 + x[:, 0]).exp() * more, generator=generator(9))
        posterior = doxa.fit(doxa.nets.mlp(1, 1, (8,)), (x, y), method, **options)
        assert posterior.base_likelihood.name == name and posterior.status == "ok"
        assert posterior.fitted_likelihood == doxa.Counts()
        assert name.replace("-", " ") in repr(posterior)
        p = posterior.predict(x)
        low, high = p.interval(0.9)
        inside = (y >= low.reshape(N)) & (y <= high.reshape(N))
        assert 0.87 < inside.double().mean() < 0.99
        streamed = posterior.predict(x, keep="moments")
        torch.testing.assert_close(streamed.variance, p.variance, rtol=1e-4, atol=1e-4)
        posterior.save(tmp_path / name)
        loaded = doxa.load(tmp_path / name)
        assert torch.equal(loaded.predict(x).log_prob(y), p.log_prob(y))
    kept = doxa.fit(
        doxa.nets.mlp(1, 1, (8,)), (x, y), "map", **{**options, "likelihood": "poisson"}
    )
    assert kept.base_likelihood == doxa.Poisson()
