"""What the stored artefacts of `tests/store/artefacts` are: kinds, methods, and how they answer.

Shared by the script that made them and the test that reads them. Importing it registers the one
network builder that doxa does not have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import doxa

FOLDER = Path(__file__).resolve().parents[1] / "store" / "artefacts"


class Case(NamedTuple):
    """The posterior's kind and method, and the name of its likelihood."""

    kind: str
    method: Any
    likelihood: str = "gaussian"


CASES = {
    "map-members": Case("sample", doxa.MAP()),
    "map-batch-norm": Case("sample", doxa.MAP(), "categorical"),
    "sgld": Case("sample", doxa.SGLD(draws=4, burn_in=3, thin=2, step_size=1e-3), "student-t"),
    "nuts": Case("sample", doxa.NUTS(draws=4, burn_in=6, max_depth=3), "bernoulli"),
    "mean-field": Case(
        "gaussian", doxa.MeanField(initial_std=0.1, elbo_samples=2), "heteroscedastic"
    ),
    "mean-field-subset": Case("gaussian", doxa.MeanField()),
    "dropout-layers": Case("implicit", doxa.MCDropout(), "poisson"),
    "dropout-inserted": Case("implicit", doxa.MCDropout(p=0.3, insert="all"), "categorical"),
    "laplace": Case("laplace", doxa.Laplace("full", tune=None, newton_steps=0)),
    "laplace-diagonal": Case(
        "laplace", doxa.Laplace("diagonal", "sampled", tune=None, newton_steps=0), "categorical"
    ),
    "linear": Case("linear", doxa.BayesianLinear(features="polynomial", degree=2)),
    "gp": Case("process", doxa.GP(kernel="rbf", ard=False, refine=2)),
    "mixture": Case("mixture", doxa.MAP()),
    "recalibrated": Case("transformed", doxa.MAP(), "categorical"),
    "conformal": Case("transformed", doxa.MAP()),
}
DRAWS = doxa.NUTS(draws=5, burn_in=20)


@doxa.nets.register_net("test-batch-norm")
def batch_norm_net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs)
    )  # fmt: skip


def answers(posterior: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What is asked of a posterior, in numbers."""
    p = posterior.predict(x)
    found = {"mean": p.mean, "variance": p.variance, "log_prob": p.log_prob(y)}
    found["functions"] = posterior.functions(x, 3, seed=1)
    if p.likelihood.classifies:
        found |= {"probs": p.probs, "mutual_information": p.mutual_information}
    elif p.likelihood.is_normal:
        found |= dict(zip(("low", "high"), p.interval(), strict=True))
    if posterior.model is not None and posterior.kind != "implicit":  # which draws masks
        drawn = posterior.draw(3, seed=1)
        found |= {f"draw.{name}": value for name, value in drawn.items()}
        each = [{name: value[i] for name, value in drawn.items()} for i in range(3)]
        found["log_prior"] = torch.stack([posterior.model.log_prior(params) for params in each])
    if posterior.kind in ("linear", "process"):
        after = posterior.condition(x, y)
        found["conditioned"] = after.predict(x).mean
        found["evidence"] = torch.tensor(after.log_evidence, dtype=torch.float64)
    return found | {f"stat.{name}": value for name, value in posterior.record.stats.items()}


def facts(posterior: Any) -> dict[str, Any]:
    """What a posterior says of itself."""
    names = ("members", "status", "log_evidence", "elbo", "validation")
    found = {name: getattr(posterior, name) for name in names}
    return found | {"status": str(posterior.status), "reason": posterior.status.reason}


def answers_of_draws(draws: doxa.Draws) -> dict[str, Tensor]:
    return {**draws, "theta": draws.theta, **{f"stat.{k}": v for k, v in draws.stats.items()}}


def log_density(p: dict[str, Tensor]) -> Tensor:
    """A location and a positive scale, for `doxa.sample`."""
    z = (torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64) - p["loc"].sum()) / p["scale"]
    return -0.5 * z.square().sum() - 3 * p["scale"].log() - p["scale"] - p["loc"].square().sum()
