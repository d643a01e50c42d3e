"""Each check on a fault of its own, planted by hand, and on the same thing without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from short import short
from torch import Tensor, nn

import doxa
from doxa.diagnose import calibration, convergence, doctor, residuals
from doxa.diagnose.data import DiagnosticData
from doxa.diagnose.spread import prior_variance
from doxa.posterior import SamplePosterior, Status

stats = pytest.importorskip("scipy.stats")


def line(n: int = 200, seed: int = 0, noise: float = 0.5, inputs: int = 3) -> tuple[Tensor, Tensor]:
    """A plane of slope one with Gaussian noise: what `linear` is exact for."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=g, dtype=torch.float64)
    return x, x.sum(1) + noise * torch.randn(n, generator=g, dtype=torch.float64)


def linear(data: Any, **options: Any) -> Any:
    return doxa.fit(None, data, "linear", progress=False, **{"standardize": True, **options})


def verdicts(posterior: Any, data: Any, test: Any = None) -> dict[str, str]:
    return {finding.check: finding.status for finding in doctor(posterior, data, test)}


def test_an_exact_posterior_passes_everything() -> None:
    data, test = line(), line(seed=1)
    diagnosis = doctor(linear(data), data, test)
    assert diagnosis.ok, str(diagnosis)
    assert {f.check for f in diagnosis if f.status == "not checked"} == {
        "training", "chains", "weights", "energy", "members"
    }  # fmt: skip


@pytest.mark.slow
def test_false_alarms_of_exact_posteriors() -> None:
    """150 exact fits: at 9 tests of level 0.001 and with floors, 1.4 alarms are expected at most;
    more than 6 have a probability below 0.001 even then."""
    alarms = []
    for seed in range(150):
        data, test = line(120, 2 * seed), line(200, 2 * seed + 1)
        alarms += [(seed, f.check, f.words) for f in doctor(linear(data), data, test).alarms]
    assert len(alarms) <= 6, alarms


def test_a_known_noise_that_is_wrong() -> None:
    """Announced variance over the true one is 1/16 and 16: z² shows the inverse, within 40 %."""
    data, test = line(), line(seed=1)
    for noise, ratio in ((0.125, 16.0), (2.0, 1 / 16)):
        diagnosis = doctor(linear(data, likelihood=doxa.Gaussian(noise)), data, test)
        assert diagnosis["noise level"].status == "bad"
        assert diagnosis["noise level"].value == pytest.approx(ratio, rel=0.4)
        assert diagnosis["coverage"].status in ("warning", "bad")
        assert diagnosis["calibration"].status in ("warning", "bad")


def test_coverage_is_the_share_inside() -> None:
    data, test = line(), line(300, seed=1)
    posterior = linear(data)
    low, high = posterior.predict(test[0]).interval(0.8)
    y = test[1].to(low)
    share = float(((y >= low) & (y <= high)).double().mean())
    found = doctor(posterior, data, test, level=0.8)["coverage"]
    assert found.value == pytest.approx(share)
    assert found.status == "good"


def test_training_rows_alone_cannot_show_that_intervals_are_too_wide() -> None:
    data = line()
    wide = linear(data, likelihood=doxa.Gaussian(2.0))
    alone = doctor(wide, data)
    assert alone["coverage"].status == "good"
    assert alone["calibration"].status == "not checked"
    narrow = linear(data, likelihood=doxa.Gaussian(0.1))
    assert doctor(narrow, data)["coverage"].status == "bad"


def test_degrees_of_freedom_are_found() -> None:
    """The best of the grid for 4,000 draws of a Student-t, and the likelihood ratio by scipy."""
    for df in (3.0, 5.0):
        z = torch.tensor(stats.t.rvs(df, size=4000, random_state=1))
        found, ratio = residuals._best_degrees(z)
        assert found in (df - 1, df, df + 1)
        scale = stats.t.fit(z.numpy(), fdf=found, floc=0)[2]
        best = stats.t.logpdf(z.numpy(), found, 0, scale).sum()
        gauss = stats.norm.logpdf(z.numpy(), 0, float(z.square().mean().sqrt())).sum()
        assert ratio == pytest.approx(2 * (best - gauss), rel=1e-3)
    normal = torch.tensor(stats.norm.rvs(size=4000, random_state=2))
    assert residuals._best_degrees(normal)[1] < 9.55


def test_tails_and_noise_that_depends_on_the_input() -> None:
    data, test = line(), line(seed=1)
    g = torch.Generator().manual_seed(5)
    spread = (0.8 * data[0][:, 0]).exp()
    uneven = data[0], data[0].sum(1) + 0.5 * spread * torch.randn(200, generator=g).double()
    found = doctor(linear(uneven), uneven)["noise by input"]
    assert found.status == "warning"
    assert found.value is not None and found.value > 4
    heavy = data[0], data[0].sum(1) + torch.tensor(stats.t.rvs(2, size=200, random_state=3))
    assert doctor(linear(heavy), heavy)["noise tails"].status == "warning"
    straight = doctor(linear(data), data, test)
    assert straight["noise by input"].status == straight["noise tails"].status == "good"


def test_targets_that_are_classes_or_counts() -> None:
    x, y = line()
    assert verdicts(linear((x, (y > 0).double())), (x, (y > 0).double()))["targets"] == "bad"
    counts = y.exp().clamp_max(6).round()
    assert verdicts(linear((x, counts)), (x, counts))["targets"] == "warning"
    fine = (100 * y).round()  # whole numbers, but the noise spans fifty of them
    assert verdicts(linear((x, fine)), (x, fine))["targets"] == "good"


@pytest.mark.slow
def test_counts_that_vary_more_than_a_poisson() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=g)
    rate = (1 + 0.3 * x[:, 0]).exp()
    net = doxa.nets.mlp(2, 1, hidden=())
    for extra, verdict in ((torch.ones(300), "good"), (torch.rand(300, generator=g) * 4, "bad")):
        y = torch.poisson(rate * extra, generator=g)
        data, test = (x[:200], y[:200]), (x[200:], y[200:])
        posterior = doxa.fit(net, data, "map", likelihood="poisson", steps=300, progress=False)
        assert doctor(posterior, data, test)["noise level"].status == verdict


def ensemble(**options: Any) -> tuple[Any, Any]:
    data = line(80)
    net = doxa.nets.mlp(3, 1, hidden=(8,))
    chosen = {"steps": 300, "standardize": True, "progress": False, **options}
    return doxa.fit(net, data, "deep-ensemble", **chosen), data


@pytest.mark.slow
def test_members_that_are_copies_or_never_trained() -> None:
    posterior, data = ensemble()
    assert verdicts(posterior, data)["members"] == "good"
    lost = SamplePosterior.restore(
        {"model": posterior.model, "method": posterior.method,
         "likelihood": posterior.base_likelihood, "scales": posterior.scales},
        {k: v.clone() for k, v in posterior.tensors().items()}, {},
    )  # fmt: skip
    lost.samples[3] = -3 * lost.samples[3]
    assert verdicts(lost, data)["members"] == "bad"
    posterior.samples[:] = posterior.samples[:1].clone()
    assert verdicts(posterior, data)["members"] == "bad"
    given, data = ensemble(init="given")
    assert verdicts(given, data)["members"] == "bad"


@pytest.mark.slow
def test_a_point_is_not_blamed_for_being_one() -> None:
    data = line(80)
    net = doxa.nets.mlp(3, 1, hidden=())
    point = doxa.fit(net, data, "map", steps=200, standardize=True, progress=False)
    diagnosis = doctor(point, data)
    for check in ("members", "width", "far inputs"):
        assert diagnosis[check].status == "not checked"
        assert "laplace" in diagnosis[check].advice


@pytest.mark.slow
def test_width_against_the_prior_and_against_what_rows_leave_open() -> None:
    """A temperature multiplies the covariance: at 1e-6 it is far below σ²/n, and with noise ten
    times the signal and a narrow prior the data teach nothing."""
    data = line(80)
    net = doxa.nets.mlp(3, 1, hidden=())
    options = {"steps": 300, "standardize": True, "progress": False, "prior": doxa.Normal(1.0)}
    assert verdicts(doxa.fit(net, data, "laplace", **options), data)["width"] == "good"
    cold = doxa.fit(net, data, doxa.Laplace(temperature=1e-6), **options)
    assert verdicts(cold, data)["width"] == "bad"
    deaf = doxa.fit(net, data, "laplace", likelihood=doxa.Gaussian(50.0), **options)
    assert verdicts(deaf, data)["width"] == "warning"


def test_the_width_of_the_prior_is_known_in_closed_form() -> None:
    """A stationary process is back at its prior far away; a linear network with standard normal
    weights has the variance 1 + ‖x‖². By 400 draws of functions: a variance has a standard error of
    √(2/400) = 7 % at most, five of them 35 %."""
    pytest.importorskip("gpytorch")
    x, y = line(60)
    data = x, 7 * y
    posterior = doxa.fit(None, data, "gp", standardize=True, progress=False)
    far = float(posterior.predict(x + 1e4).epistemic.mean())
    case = DiagnosticData(posterior, data, None, 0.9, 0)
    assert float(prior_variance(case, case.heads[0])) == pytest.approx(far, rel=0.35)
    net = doxa.nets.mlp(3, 1, hidden=())
    model = doxa.Model(net, prior=doxa.Normal(1.0))
    posterior = doxa.fit(model, data, "laplace", steps=20, standardize=True, progress=False)
    case = DiagnosticData(posterior, data, None, 0.9, 0)
    want = float((7 * y).var(correction=0)) * (1 + 3)  # standardised columns: E‖x‖² = 3
    assert float(prior_variance(case, case.heads[0])) == pytest.approx(want, rel=0.35)


class Bump(nn.Module):
    """w exp(−‖x‖²): whatever w is, nothing is left of it far away."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.w)

    def forward(self, x: Tensor) -> Tensor:
        return self.w * (-x.square().sum(1, keepdim=True)).exp()


@pytest.mark.slow
def test_far_inputs_of_a_stationary_process_and_of_one_that_forgets() -> None:
    pytest.importorskip("gpytorch")
    data = line(60)
    posterior = doxa.fit(None, data, "gp", standardize=True, progress=False)
    found = doctor(posterior, data)["far inputs"]
    assert found.status == "good"
    assert found.value is not None and found.value > 5
    bumps = doxa.fit(Bump(), data, "deep-ensemble", steps=50, progress=False)
    bumps.samples[:, :, 0] = torch.tensor([[0.5], [1.0], [1.5], [2.0], [2.5]])
    found = doctor(bumps, data)["far inputs"]
    assert found.status == "warning"
    assert found.value is not None and found.value < 0.5


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        ([3.0 - 0.02 * t for t in range(100)], "warning"),
        ([1.0 + 2.0 * 0.9**t for t in range(100)], "good"),
        ([1.0 + 2.0 * 0.9**t for t in range(80)] + [4.0] * 20, "bad"),
        ([1.0] + [1e6 / (1 + t) for t in range(99)], "bad"),
        ([2.0] * 50 + [float("inf")], "bad"),
        ([2.0] * 5, "not checked"),
    ],
)
def test_training_curves(curve: list[float], verdict: str) -> None:
    g = torch.Generator().manual_seed(0)
    noise = (0.01 * torch.randn(len(curve), generator=g)).tolist()
    data = line(60)
    posterior = linear(data)
    values = list(zip(curve, noise, strict=True))
    posterior.record.history["loss"] = [[i, [v + e]] for i, (v, e) in enumerate(values)]
    assert verdicts(posterior, data)["training"] == verdict


@pytest.mark.parametrize(("best", "verdict"), [(10, "good"), (39, "warning")])
def test_a_loss_may_fall_while_the_rows_held_out_no_longer_gain(best: int, verdict: str) -> None:
    data = line(60)
    posterior = linear(data)
    posterior.record.history["loss"] = [[i, [4.0 - 0.1 * i]] for i in range(40)]
    scores = [[i, [-abs(i - best) / 10]] for i in range(40)]
    posterior.record.history["validation"] = scores
    assert verdicts(posterior, data)["training"] == verdict


def test_the_status_is_passed_on() -> None:
    data = line(60)
    posterior = linear(data)
    for name, verdict in (("diverged", "bad"), ("stopped", "warning"), ("not-converged", "bad")):
        posterior.record.status = Status(name, "for a reason that is told")
        found = doctor(posterior, data)["status"]
        assert found.status == verdict
        assert "for a reason that is told" in found.words


def chained() -> tuple[SamplePosterior, Any]:
    """Four chains of independent draws around the least-squares plane."""
    data = line(80)
    net = doxa.nets.mlp(3, 1, hidden=())
    posterior = doxa.fit(
        net, data, doxa.HMC(draws=4, burn_in=0, leapfrog=1), progress=False, dtype=torch.float64
    )
    g = torch.Generator().manual_seed(3)
    centre = torch.cat([torch.ones(3), torch.tensor([0.0, -0.7])]).double()
    draws = centre + 0.05 * torch.randn(4, 100, 5, generator=g, dtype=torch.float64)
    posterior.samples = draws
    posterior.record.diagnostics.pop("accept")
    posterior.record.status = Status("ok")
    return posterior, data


def test_chains_that_meet_stick_or_disagree() -> None:
    posterior, data = chained()
    assert verdicts(posterior, data)["chains"] == "good"
    whole = posterior.samples.clone()
    posterior.samples[1] = whole[1, :1]
    found = doctor(posterior, data)["chains"]
    assert found.status == "bad"
    assert "1 of 4 chains hardly move" in found.words
    posterior.samples = whole.clone()
    posterior.samples[2, :, 0] += 0.5
    assert "disagree" in doctor(posterior, data)["chains"].words
    posterior.samples = whole.repeat_interleave(50, 1)[:, :200]  # each draw fifty times
    assert verdicts(posterior, data)["chains"] == "bad"


@pytest.mark.slow
def test_leaks_between_train_and_test() -> None:
    x, y = line(150)
    x = 3 + 2 * x
    train, test = (x[:100], y[:100]), (x[100:], y[100:])
    assert verdicts(linear(train), train, test)["scaling"] == "good"

    def scaled(by: Tensor, rows: Tensor) -> Tensor:
        return (rows - by.mean(0)) / by.std(0, correction=0)

    together = (scaled(x, train[0]), train[1]), (scaled(x, test[0]), test[1])
    proper = (scaled(train[0], train[0]), train[1]), (scaled(train[0], test[0]), test[1])
    apart = (proper[0][0], train[1]), (scaled(test[0], test[0]), test[1])
    raw = proper[0], test
    assert verdicts(linear(proper[0]), *proper)["scaling"] == "good"
    for pair, word in ((together, "with the test rows"), (apart, "by themselves"), (raw, "units")):
        posterior = linear(pair[0], standardize=False)
        found = doctor(posterior, *pair)["scaling"]
        assert found.status == "bad"
        assert word in found.words
    in_single = tuple((a.float(), b) for a, b in together)
    assert verdicts(linear(in_single[0]), *in_single)["scaling"] == "bad"
    other = doctor(linear(train), together[0])["scaling"]
    assert "not the rows of the fit" in other.words


def test_rows_that_occur_in_both_sets() -> None:
    x, y = line(150)
    train = x[:100], y[:100]
    mixed = torch.cat([x[100:], x[:10]]), torch.cat([y[100:], y[:10]])
    found = doctor(linear(train), train, mixed)["duplicates"]
    assert found.status == "bad"
    assert found.value == pytest.approx(10 / 60)
    coarse = (2 * x).round()  # a grid: rows repeat by nature
    pair = (coarse[:100], y[:100]), (coarse[100:], y[100:])
    assert verdicts(linear(pair[0]), *pair)["duplicates"] == "good"


def test_too_little_data() -> None:
    for n, inputs, verdict in ((10, 1, "bad"), (30, 10, "warning"), (200, 10, "good")):
        data = line(n, inputs=inputs)
        assert verdicts(linear(data), data)["sample size"] == verdict
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, generator=g) @ torch.ones(1, 30) + 0.01 * torch.randn(
        60, 30, generator=g
    )
    data = x.double(), x[:, 0].double()  # thirty columns that are one
    assert verdicts(linear(data), data)["sample size"] == "good"


@pytest.mark.slow
def test_what_a_network_cannot_digest() -> None:
    x, y = line(80)
    net = doxa.nets.mlp(3, 1, hidden=())
    for rows, target in ((1000 * x, y), (x, 1000 + y)):
        point = doxa.fit(net, (rows, target), "map", steps=20, progress=False)
        assert verdicts(point, (rows, target))["scaling"] == "warning"
        point = doxa.fit(net, (rows, target), "map", steps=20, progress=False, standardize=True)
        assert verdicts(point, (rows, target))["scaling"] == "good"


@pytest.mark.slow
def test_overfitting_and_nothing_learned() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(130, 8, generator=g), torch.randn(130, generator=g)
    data, test = (x[:30], y[:30]), (x[30:], y[30:])
    net = doxa.nets.mlp(8, 1, hidden=(30,))
    posterior = doxa.fit(
        net, data, "map", prior=doxa.Normal(10.0), steps=800, standardize=True, validation=None,
        progress=False,
    )  # fmt: skip
    diagnosis = doctor(posterior, data, test)
    assert diagnosis["overfitting"].status == "bad"
    assert diagnosis["skill"].status == "bad"
    assert diagnosis["skill"].value is not None and diagnosis["skill"].value < 0


@pytest.mark.slow
def test_overconfident_classes() -> None:
    """Labels at random, probabilities near one: the calibration error is about one half."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(160, 4, generator=g), torch.randint(0, 2, (160,), generator=g)
    data, test = (x[:60], y[:60]), (x[60:], y[60:])
    net = doxa.nets.mlp(4, 2, hidden=(40,))
    options = {"likelihood": "categorical", "prior": doxa.Normal(10.0), "progress": False}
    posterior = doxa.fit(net, data, "map", steps=600, validation=None, **options)
    found = doctor(posterior, data, test)["calibration"]
    assert found.status == "bad"
    assert found.value == pytest.approx(0.45, abs=0.15)
    assert "overconfident" in found.words


@pytest.mark.slow
def test_a_coverage_that_is_off_by_little_says_so() -> None:
    """Noise 1.25 times as large as believed: 81 % instead of 90 (give or take 1.7 in the 500 rows
    that are looked at), no chance, and better than the 75.5 % of a variance wrong twofold."""
    x, y = line(2000)
    posterior = linear((x, y))
    wide = line(2000, seed=1, noise=0.5 * 1.25)
    found = doctor(posterior, (x, y), wide)["coverage"]
    assert found.status == "slight"
    assert found.value == pytest.approx(0.812, abs=0.05)
    assert "a little too narrow" in found.words
    assert doctor(posterior, (x, y), line(2000, seed=2))["coverage"].status == "good"


def test_noise_that_depends_a_little_on_the_input_is_not_good() -> None:
    """A variance of about exp(±0.3)² in the outer thirds: twice as large, beyond any chance."""
    g = torch.Generator().manual_seed(5)
    x = line(500)[0]
    uneven = x, x.sum(1) + 0.5 * (0.25 * x[:, 0]).exp() * torch.randn(500, generator=g).double()
    found = doctor(linear(uneven), uneven)
    assert found["noise by input"].status == "slight"
    assert found["noise by input"].value == pytest.approx(2.0, abs=0.9)
    assert found.ok
    assert "noise by input" in found.summary


def test_few_rows_cannot_tell_whether_anything_was_learned() -> None:
    """One of six rows is far off: 100 nats worse than a constant on average, and no proof of it."""
    data, (x, y) = line(60), line(6, seed=1)
    y[0] += 20
    found = doctor(linear(data), data, (x, y))["skill"]
    assert found.status == "not checked"
    assert found.value is not None and found.value < -5
    assert "6 test rows are too few to show" in found.words
    assert "more rows" in found.advice
    assert doctor(linear(data), data, line(1, seed=2))["skill"].status == "not checked"
    assert doctor(linear(data), data, line(60, seed=2))["skill"].status == "good"


@pytest.mark.parametrize("name", ["svgd", "bootstrap", "snapshot", "deep-ensemble"])
def test_particles_and_members_are_not_judged_as_chains(name: str) -> None:
    data = line(60)
    net = doxa.nets.mlp(3, 1, hidden=(4,))
    posterior = doxa.fit(net, data, short(name), steps=20, standardize=True, progress=False)
    posterior.record.status = Status("not-converged", "it was said")
    case = DiagnosticData(posterior, data, None, 0.9, 0)
    assert not case.is_chain
    for check in (convergence.chains, convergence.weights, convergence.energy):
        found = check(case)
        assert found.status == "not checked"
        assert "no MCMC chains" in found.words
    found = convergence.status(case)
    assert found.status == "bad"
    assert "chains" not in found.words + found.advice


def test_the_calibration_error_is_that_of_evaluate() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 2, generator=g), torch.randint(0, 3, (200,), generator=g)
    posterior = doxa.fit(doxa.nets.mlp(2, 3, (8,)), (x, y), "map", steps=50, progress=False,
                         likelihood="categorical")  # fmt: skip
    found = doctor(posterior, (x, y), (x[:100] + 0.1, y[:100]))["calibration"]
    p = posterior.predict(x[:100] + 0.1)
    assert found.value == pytest.approx(doxa.evaluate.ece(p, y[:100]), abs=1e-6)


def test_what_coverage_is_tolerated() -> None:
    """Variances wrong by a factor of two: 75.5 % and 98 % of a 90 % interval, by scipy."""
    z = stats.norm.ppf(0.95)
    want = [2 * stats.norm.cdf(z * f) - 1 for f in (0.5**0.5, 2**0.5)]
    assert calibration._tolerated(0.9, 2.0) == pytest.approx(want, rel=1e-9)
    grid = torch.linspace(-4, 4, 20001, dtype=torch.float64)
    gap = torch.special.ndtr(grid * 2**0.5) - torch.special.ndtr(grid)
    assert float(gap.max()) == pytest.approx(calibration._WARPED, abs=5e-4)
