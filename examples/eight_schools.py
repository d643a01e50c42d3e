"""Sampling from a log density: the eight schools, by NUTS, HMC and a random walk.

    python examples/eight_schools.py

Coaching was tried in eight schools (Rubin, 1981); each has an estimated effect and its standard
error. The true effects of the schools come from N(mu, tau²), with mu and tau unknown; tau is
positive, and `doxa.sample` includes the Jacobian. The density is written for one chain, in
constrained values. The random walk needs no gradient, and fifty times as many transitions.
"""

from __future__ import annotations

import torch
from torch import Tensor

import doxa

EFFECT = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
ERROR = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)
SAMPLERS = {
    "NUTS": doxa.NUTS(draws=1000, burn_in=500, target_accept=0.9),
    "HMC": doxa.HMC(draws=1000, burn_in=500, leapfrog=12, target_accept=0.9),
    "Metropolis": doxa.Metropolis(draws=1000, burn_in=5000, thin=50),
}


def log_density(p: dict[str, Tensor]) -> Tensor:
    """N(effect | school, error²), school = mu + tau · eta, eta ~ N(0, 1), mu ~ N(0, 5²),
    tau ~ half-Cauchy(5); without constants."""
    school = p["mu"] + p["tau"] * p["eta"]
    fit = -0.5 * ((EFFECT - school) / ERROR).square().sum()
    prior = -0.5 * p["eta"].square().sum() - 0.5 * (p["mu"] / 5).square()
    return fit + prior - torch.log1p((p["tau"] / 5).square())


def main() -> None:
    start = {"mu": 0.0, "tau": 1.0, "eta": torch.zeros(8)}
    for name, method in SAMPLERS.items():
        draws = doxa.sample(log_density, start, method, 4, constraints={"tau": "positive"})
        school = draws["mu"] + draws["tau"] * draws["eta"][..., 0]
        found = draws.diagnostics
        worst = min(found["ess_bulk"].values())
        print(
            f"{name:10}  mu {draws['mu'].mean():5.2f} ± {draws['mu'].std():.2f}   "
            f"tau {draws['tau'].mean():5.2f} ± {draws['tau'].std():.2f}   "
            f"first school {school.mean():5.2f} ± {school.std():.2f}   "
            f"R-hat {max(found['rhat'].values()):.4f}, {worst:.0f} effective draws of "
            f"{draws.members * draws.count}: {draws.status}"
        )
        if draws.status.reason:
            print(f"            {draws.status.reason}")
    print(draws.summary())


if __name__ == "__main__":
    main()
