"""A grid as one call: what is chosen, and by what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import doxa
from doxa.errors import MethodError


def line() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=g, dtype=torch.float64)
    noise = 0.5 * torch.randn(30, 1, generator=g, dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + noise


def test_the_prior_of_largest_evidence_is_chosen(tmp_path: Path) -> None:
    """Of a linear network the evidence is N(y; 0, s²XXᵀ + σ²I): every score, and the choice."""
    x, y = line()
    widths, noises = [0.05, 0.7, 20.0], [0.2, 0.5]
    grid = {
        "prior": [doxa.Normal(s) for s in widths],
        "likelihood": [doxa.Gaussian(noise=sigma) for sigma in noises],
    }
    posterior = doxa.tune(
        nn.Linear(2, 1, bias=False).double(), (x, y),
        doxa.Laplace("full", tune=None, newton_steps=2), grid, by="evidence", steps=50,
        likelihood=doxa.Gaussian(noise=0.5),
    )  # fmt: skip
    exact = []
    for s in widths:
        for sigma in noises:
            covariance = s**2 * x @ x.T + sigma**2 * torch.eye(30, dtype=x.dtype)
            exact.append(float(MultivariateNormal(torch.zeros_like(y[:, 0]), covariance)
                               .log_prob(y[:, 0])))  # fmt: skip
    tuned = posterior.metadata["tuned"]
    assert [row["evidence"] for row in tuned["table"]] == pytest.approx(exact, rel=1e-6)
    assert [row["chosen"] for row in tuned["table"]] == [value == max(exact) for value in exact]
    assert posterior.log_evidence == pytest.approx(max(exact), rel=1e-6)
    assert posterior.likelihood.noise == 0.5 and "0.7" in tuned["chosen"]["prior"]
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=nn.Linear(2, 1, bias=False).double())
    assert again.metadata["tuned"] == tuned


@pytest.mark.slow
def test_dropout_by_validation_and_by_its_objective() -> None:
    """The best by each score of the runs of one fit, whose fields are those of the grid; fitted
    again to all rows where asked."""
    x, y = line()
    net = doxa.nets.mlp(2, 1, (8,))
    grid = {"p": [0.01, 0.3]}
    for by, rows in (("validation", 24), ("objective", 30)):
        posterior = doxa.tune(net, (x, y), "mc-dropout", grid, by=by, steps=20)
        tuned = posterior.metadata["tuned"]
        best = max(tuned["table"], key=lambda row: row[by])
        assert tuned["chosen"] == {"p": best["p"]} and best["chosen"]
        assert getattr(posterior, by) == best[by]
        assert float(next(iter(posterior.values.values()))) == pytest.approx(best["p"])
        assert posterior.diagnostics["rows"] == rows
    again = doxa.tune(net, (x, y), "mc-dropout", grid, steps=20, refit=True)
    assert again.diagnostics["rows"] == 30 and again.validation is None


def test_a_run_that_diverged_is_not_chosen() -> None:
    for rates in ([1e9, 1e-2], [1e-2, 1e9]):
        posterior = doxa.tune(doxa.nets.mlp(2, 1, (8,)), line(), "map", {"lr": rates}, steps=30)
        assert posterior.metadata["tuned"]["chosen"] == {"lr": 1e-2}


def test_what_cannot_be_chosen_is_refused() -> None:
    net, data = doxa.nets.mlp(2, 1, (8,)), line()
    with pytest.raises(MethodError, match="grid is empty"):
        doxa.tune(net, data, "map", {})
    with pytest.raises(MethodError, match="makes the runs"):
        doxa.tune(net, data, "map", {"lr": [0.1]}, runs=doxa.Runs(seeds=[0, 1]))
    priors = {"prior": [doxa.Normal(1.0), doxa.Normal(2.0)]}
    with pytest.raises(MethodError, match="select by validation"):
        doxa.tune(net, data, "mc-dropout", priors, by="objective", steps=2)
