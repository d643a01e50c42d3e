"""The prior's scale: who chooses it, by what, and what is said where the predictive suffers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rings import loss, loss_of_the_weights, post_hoc, rings, trained
from straight import lines, normal
from torch import Tensor, nn

import doxa
from doxa.driver.setup import share
from doxa.errors import MethodError
from doxa.laplace.forms import Scales
from doxa.likelihoods import Categorical


def test_a_prior_that_nobody_chose_has_the_scale_of_the_evidence() -> None:
    x, y = lines()
    exact = doxa.fit(None, (x, y), doxa.BayesianLinear(noise=0.3))
    likelihood = doxa.Gaussian(noise=0.3)
    net = nn.Linear(2, 1).double()
    ours = doxa.fit(net, (x, y), doxa.Laplace(newton_steps=8), likelihood=likelihood, steps=50)
    assert ours.diagnostics["prior_from"] == ["evidence"]
    assert ours.log_evidence == pytest.approx(exact.log_evidence, rel=1e-9)
    assert ours.priors[0].std == pytest.approx(float(exact.prior_std), rel=1e-6)


def test_a_chosen_prior_is_kept() -> None:
    net, data = nn.Linear(2, 1).double(), lines()
    method = doxa.Laplace()
    given = doxa.fit(net, data, method, prior=doxa.Normal(1.0), steps=20)
    asked = doxa.fit(net, data, doxa.Laplace(tune=None), steps=20)
    grid = doxa.fit(
        net, data, method, steps=20, runs=doxa.Runs(grid={"prior": [doxa.Normal(1.0)]})
    )[0]
    for posterior in (given, asked, grid):
        assert posterior.diagnostics["prior_from"] == ["given"]
        assert posterior.priors is None
        assert torch.equal(posterior.covariance.dense(), given.covariance.dense())
    free = doxa.fit(net, data, method, steps=20)
    assert free.log_evidence > given.log_evidence


def test_the_prior_that_was_used_is_kept_with_the_posterior(tmp_path: Path) -> None:
    x, y = rings(300, seed=0)
    model = doxa.Model(trained(), "categorical", subset="last_layer")
    posterior = doxa.fit(model, (x, y), doxa.Laplace(train=False), init="given")
    posterior.save(tmp_path / "run")
    (prior,) = doxa.load(tmp_path / "run").priors
    scale = posterior.diagnostics["prior_scale"][0]
    assert scale != pytest.approx(1.0, rel=0.05)
    wide = {name: p.std for name, p in prior.items()}
    last = dict.fromkeys(posterior.network.subset_names, pytest.approx(scale))
    assert wide == dict.fromkeys(wide, 1.0) | last
    # the covariance is that of the same weights under that prior, given
    same = doxa.Model(trained(), "categorical", prior, subset="last_layer")
    again = doxa.fit(same, (x, y), doxa.Laplace(train=False), init="given")
    assert again.diagnostics["prior_from"] == ["given"]
    assert torch.allclose(again.covariance.dense(), posterior.covariance.dense(), rtol=1e-8)
    assert again.log_evidence == pytest.approx(posterior.log_evidence, rel=1e-10)


@pytest.mark.slow
def test_validation_takes_the_nearest_scale_that_predicts_as_well_as_the_best() -> None:
    """The same by fits under given priors, from the evidence's scale outwards: the first whose
    held-out scores are not below the best by more than a standard error. Under none may the rows
    ask for a temperature besides."""
    x, y = held = rings(200, seed=1)
    plain: dict[str, Any] = {"validation": held, "likelihood": Categorical(temperature=1.0)}
    method = doxa.Laplace("diagonal", train=False, mean_correction=False)
    evidence = post_hoc(method).diagnostics["prior_scale"][0]
    priors = [doxa.Normal(evidence * 10 ** (-k / 4)) for k in (0, -1, 1, -2, *range(2, 9))]
    tried = [post_hoc(method, prior=prior, **plain) for prior in priors]
    scores = [one.predict(x).log_prob(y) for one in tried]
    best = scores[max(range(11), key=lambda k: tried[k].validation)]
    short = lambda each: float((best - each).mean() / (best - each).std() * math.sqrt(200))  # noqa: E731
    first = next(k for k, each in enumerate(scores) if each is best or short(each) <= 1)
    assert first > 0
    chosen = post_hoc(dataclasses.replace(method, tune="validation"), **plain)
    assert chosen.diagnostics["prior_scale"][0] == pytest.approx(priors[first].std, rel=1e-9)
    corrected = tried[first].validation - 1 / 200  # the same rows have chosen the scale
    assert chosen.validation == pytest.approx(corrected, rel=1e-9)
    assert chosen.log_evidence == pytest.approx(tried[first].log_evidence, rel=1e-9)


@pytest.mark.parametrize("predictive", ["linearised", "sampled"])
def test_held_out_rows_correct_the_evidence(predictive: str) -> None:
    """Weights put into the network, or their linearisation: about the mode, on new rows the default
    is near the weights alone, to a standard error of the 200 rows it was chosen by (a hundredth of
    a nat); the evidence by itself is not."""
    method = doxa.Laplace("diagonal", predictive, train=False, mean_correction=False)
    posterior = post_hoc(method, validation=rings(200, seed=1))
    assert loss(post_hoc(method)) > loss_of_the_weights() + 0.03
    assert posterior.diagnostics["prior_from"] == ["validation"]
    assert posterior.status == "ok"
    assert loss(posterior) < loss_of_the_weights() + 0.02


@pytest.mark.parametrize("held_out", [True, False])
def test_a_predictive_far_below_its_maximum_says_so(held_out: bool) -> None:
    """Under so wide a prior, draws through the network know nothing of the rings any more."""
    method = doxa.Laplace("full", "sampled", train=False)
    held = rings(200, seed=1) if held_out else None
    posterior = post_hoc(method, prior=doxa.Normal(30.0), validation=held)
    assert loss(posterior) > loss_of_the_weights() + 0.5
    assert posterior.status == "worse-than-map"
    rows = "200 held-out rows" if held_out else "300 rows it was fitted to"
    assert rows in posterior.status.reason
    assert "predictive='linearised'" in posterior.status.reason
    assert "tune='evidence'" in posterior.status.reason


def test_the_loss_on_rows_that_were_fitted_is_nearly_that_on_new_ones() -> None:
    """By evidence, about the mode, classes are predicted with three times the loss of the weights
    alone, and rows that were fitted tell: what fitting hides is of second order in the leverage,
    here 0.1."""
    posterior = post_hoc(doxa.Laplace("full", train=False, mean_correction=False))
    lost = loss(posterior) - loss_of_the_weights()
    assert lost > 2 * loss_of_the_weights()
    assert posterior.diagnostics["below_maximum"]["nats"] == pytest.approx(lost, abs=0.04)
    assert posterior.status == "worse-than-map"


def test_an_honest_posterior_is_not_suspected() -> None:
    """The exact one of a linear model with nearly as many weights as rows, and few rows."""
    x = normal(30, 20)
    y = x @ normal(20, 1, seed=1) + 0.5 * normal(30, 1, seed=2)
    model = doxa.Model(nn.Linear(20, 1).double(), doxa.Gaussian(noise=0.5), doxa.Normal(1.0))
    posterior = doxa.fit(model, (x, y), doxa.Laplace(newton_steps=3), steps=200)
    assert posterior.diagnostics["below_maximum"]["nats"] > 0.1  # of rows it was fitted to
    assert posterior.status == "ok"


def test_what_is_missing_is_said() -> None:
    with pytest.raises(MethodError, match="init='given'"):
        post_hoc(doxa.Laplace(train=False), init="fresh")
    with pytest.raises(MethodError, match="needs held-out rows"):
        post_hoc(doxa.Laplace(train=False, tune="validation"))


def test_outputs_that_share_their_noise() -> None:
    """σ² = RSS/(n O − γ): by evidence on a linear model with three outputs."""
    x, y = lines(outputs=3)
    exact = doxa.fit(None, (x, y), doxa.BayesianLinear(prior_std=1.0))
    method = doxa.Laplace(newton_steps=15, tune=None)
    ours = doxa.fit(nn.Linear(2, 3).double(), (x, y), method, steps=20)
    assert float(ours.mean[0, -1].exp()) == pytest.approx(float(exact.noise), rel=1e-8)
    assert ours.log_evidence == pytest.approx(exact.log_evidence, rel=1e-9)


def test_the_evidence_of_members_is_the_mean_of_theirs() -> None:
    """Modes are alternatives: p(D) = Σ_k p(D | k) / K."""
    fit = lambda members: doxa.fit(  # noqa: E731
        doxa.nets.mlp(2, 1, (3,)).double(), lines(), doxa.Laplace(), steps=30, members=members,
        validation=None,
    )  # fmt: skip
    alone = torch.tensor([fit([k]).log_evidence for k in range(3)], dtype=torch.float64)
    assert alone.std() > 0.1
    expected = float(torch.logsumexp(alone, 0)) - math.log(3)
    assert fit(3).log_evidence == pytest.approx(expected, rel=1e-9)


def test_each_member_is_judged_by_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of three members: nobody's rows are those it was fitted to, or another run's."""
    from doxa.laplace import status

    seen: list[tuple[list[int], Tensor, Tensor]] = []
    judged = status.evaluation_rows

    def noted(run: Any) -> Any:
        rows = judged(run)
        if rows is not None and rows.held_out:
            seen.append((list(run.split_of), run.rows.rows[run.split_of[0]], rows.x[:, 0]))
        return rows

    monkeypatch.setattr(status, "evaluation_rows", noted)
    x = torch.arange(120, dtype=torch.float64)[:, None] / 60 - 1
    runs = doxa.Runs(rows=[torch.arange(60), torch.arange(60, 120)])
    doxa.fit(nn.Linear(1, 1).double(), (x, x), "laplace", steps=20, members=3, runs=runs)
    own = [each for each in seen if len(each[0]) == 1]
    assert sorted({each[0][0] for each in own}) == list(range(6))
    for (split,), fitted, values in own:
        rows = ((values + 1) * 60).round().long()
        assert not set(rows.tolist()) & set(fitted.tolist())
        assert bool(((rows >= 60) == (split >= 3)).all())


def _weighted(y: Tensor, weight: Tensor, **settings: Any) -> Any:
    """With a share of the rows held out, from weights that do not depend on the fit."""
    x = normal(len(y), 2)
    net = nn.Linear(2, 1).double()
    options: Any = {"likelihood": doxa.Gaussian(noise=0.3), "sample_weight": weight}
    options |= {"validation": 0.5, "steps": 200, "lr": 0.03, "progress": False}
    return doxa.fit(net, (x, y), doxa.Laplace("full", **settings), **options)


def test_what_is_lost_is_the_weighted_mean_of_held_out_rows() -> None:
    """log N(y; f, s²) − log N(y; f, s² + v), by the closed form of a linear network."""
    y = normal(120, 2)[:, 0] + 0.3 * normal(120, seed=2)
    weight = (0.2 + normal(120, seed=3).abs()) * 0.05
    posterior = _weighted(y, weight, tune="evidence")
    (held,) = share([torch.arange(120)], 0.5, [0]).held_out or ()
    x = normal(120, 2)[held]
    f = x @ posterior.mean[0, :2] + posterior.mean[0, 2]
    p = posterior.predict(x)
    alone = torch.distributions.Normal(f, 0.3).log_prob(y[held])
    own = weight[held] / weight[held].sum()
    expected = float((own * (alone - p.log_prob(y[held]))).sum())
    assert posterior.diagnostics["below_maximum"]["nats"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tune", ["evidence", "validation"])
def test_rows_of_next_to_no_weight_decide_nothing(tune: str) -> None:
    """Where they say y = 1000, as where they say 0."""
    y = normal(120, 2)[:, 0] + 0.3 * normal(120, seed=2)
    weight = torch.where(torch.arange(120) % 3 == 0, 1e-12, 1.0).double()
    found = []
    for far in (0.0, 1000.0):
        posterior = _weighted(torch.where(weight < 1, far, y), weight, tune=tune)
        lost = posterior.diagnostics["below_maximum"]["nats"]
        found.append((lost, *posterior.diagnostics["prior_scale"], posterior.validation))
        assert posterior.status == "ok"
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)


def test_factors_of_layers_add_up_over_chosen_weights() -> None:
    """Five weights in tensors of 2 and 3, of which each member has three: by hand."""
    scales = Scales((2, 3), torch.tensor([[0, 2, 4], [1, 0, 3]]))
    values = torch.tensor([[1.0, 10.0, 100.0], [1.0, 10.0, 100.0]])
    assert scales.sums(values).tolist() == [[1.0, 110.0], [11.0, 100.0]]
    tau = torch.tensor([[7.0, 8.0], [5.0, 6.0]])
    assert scales.each(tau).tolist() == [[7.0, 8.0, 8.0], [5.0, 5.0, 6.0]]
