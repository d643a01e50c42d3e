"""The 18 posteriors of posteriordb that have reference draws, as log densities of our own.

A `Reference` holds the log density over natural parameters (without constants), its constraints,
a start that does not know the answer, and the way between its parameters and the reference's
columns. Recursions are summed by doubling, and sums of squares of linear models go through a QR
decomposition of the rows, so that a density is a handful of tensor operations.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Params = dict[str, Tensor]


@dataclass
class Reference:
    """One posterior.

    shown: the reference's columns {name: values} of parameters with any leading axes; by default
    the parameters themselves. hidden: the reverse, parameters of the reference's columns.
    """

    name: str
    log_density: Callable[[Params], Tensor]
    init: dict[str, Any]
    constraints: dict[str, Any]
    shown: Callable[[Params], Params] = field(default=lambda p: p)
    hidden: Callable[[Params], Params] = field(default=lambda p: p)
    jitter: float = 1.0

    @property
    def draws(self) -> Params:
        """The reference's own draws {name: [10, 1000, ...]}, in double precision."""
        rows = _load(self.name)
        return grouped([str(n) for n in rows["param_names"]], torch.tensor(rows["draws"]).double())


def folder() -> Path | None:
    """Where the reference draws lie, or None where they are not at hand."""
    found = Path(os.environ.get("DOXA_DATA", ""), "posteriordb")
    return found if "DOXA_DATA" in os.environ and found.is_dir() else None


def _load(name: str) -> dict[str, np.ndarray]:
    where = folder()
    assert where is not None
    with np.load(where / f"{name}.npz", allow_pickle=False) as rows:
        return dict(rows)


def _data(name: str) -> dict[str, Any]:
    """Arrays as tensors in double precision, numbers as floats."""
    rows = {k[5:]: v for k, v in _load(name).items() if k.startswith("data_")}
    return {k: torch.tensor(v).double() if v.shape else float(v) for k, v in rows.items()}


def grouped(names: list[str], columns: Tensor) -> Params:
    """Columns [..., p] "beta[1]", "beta[2]", "sigma" as {"beta": [..., 2], "sigma": [...]}."""
    groups: dict[str, list[Tensor]] = {}
    for i, name in enumerate(names):
        groups.setdefault(name.partition("[")[0], []).append(columns[..., i])
    single = {name for name in names if "[" not in name}
    return {k: v[0] if k in single else torch.stack(v, -1) for k, v in groups.items()}


def normal(x: Tensor, loc: Any, scale: Any) -> Tensor:
    """Σ log N(x; loc, scale), without constants that no parameter changes."""
    z = (x - loc) / scale
    log_scale = scale.log() if isinstance(scale, Tensor) else torch.zeros((), dtype=x.dtype)
    return (-0.5 * z.square() - log_scale).sum()


def half_cauchy(x: Tensor, scale: float) -> Tensor:
    return -torch.log1p((x / scale).square())


def student(x: Tensor, df: float, loc: float, scale: float) -> Tensor:
    return -0.5 * (df + 1) * torch.log1p(((x - loc) / scale).square() / df)


class Rows:
    """y ~ N(X β, σ) through ‖y − Xβ‖² = ‖Qᵀy − Rβ‖² + rest."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        q, self.r = torch.linalg.qr(x)
        self.target = q.mT @ y
        self.rest = float((y - q @ self.target).square().sum())
        self.count = len(y)

    def __call__(self, beta: Tensor, sigma: Tensor) -> Tensor:
        square = (self.target - (self.r * beta).sum(-1)).square().sum() + self.rest
        return -0.5 * square / sigma.square() - self.count * sigma.log()


def columns(*parts: Any) -> Tensor:
    """[N, k] with a leading column of ones."""
    return torch.stack([torch.ones_like(parts[0]), *parts], 1)


def linear(
    name: str, x: Tensor, y: Tensor, prior: Callable[[Params], Tensor] | None = None
) -> Reference:
    """A linear regression with parameters beta and sigma."""
    rows = Rows(x, y)

    def log_density(p: Params) -> Tensor:
        value = rows(p["beta"], p["sigma"])
        return value if prior is None else value + prior(p)

    init = {"beta": [0.0] * x.shape[1], "sigma": 1.0}
    return Reference(name, log_density, init, {"sigma": "positive"})


def earnings() -> Reference:
    d = _data("earnings-logearn_height")
    return linear("earnings-logearn_height", columns(d["height"]), d["earn"].log())


def kidscore_momiq() -> Reference:
    d = _data("kidiq-kidscore_momiq")
    prior = lambda p: half_cauchy(p["sigma"], 2.5)  # noqa: E731
    return linear("kidiq-kidscore_momiq", columns(d["mom_iq"]), d["kid_score"], prior)


def kidscore_interaction() -> Reference:
    d = _data("kidiq-kidscore_interaction")
    prior = lambda p: half_cauchy(p["sigma"], 2.5)  # noqa: E731
    x = columns(d["mom_hs"], d["mom_iq"], d["mom_hs"] * d["mom_iq"])
    return linear("kidiq-kidscore_interaction", x, d["kid_score"], prior)


def logmesquite() -> Reference:
    d = _data("mesquite-logmesquite")
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    x = columns(*(d[n].log() for n in names), d["group"])
    return linear("mesquite-logmesquite", x, d["weight"].log())


def nes() -> Reference:
    d = _data("nes1980-nes")
    ages = [(d["age_discrete"] == k).double() for k in (2, 3, 4)]
    rest = (d[n] for n in ("educ1", "gender", "income"))
    return linear(
        "nes1980-nes", columns(d["real_ideo"], d["race_adj"], *ages, *rest), d["partyid7"]
    )


def blr(name: str) -> Reference:
    d = _data(name)
    prior = lambda p: normal(p["beta"], 0.0, 10.0) + normal(p["sigma"], 0.0, 10.0)  # noqa: E731
    return linear(name, d["X"], d["y"], prior)


def auto_regression() -> Reference:
    d = _data("arK-arK")
    y = d["y"]
    lags = [y[5 - k : len(y) - k] for k in range(1, 6)]
    rows = Rows(columns(*lags), y[5:])

    def log_density(p: Params) -> Tensor:
        beta = torch.cat([p["alpha"].unsqueeze(-1), p["beta"]], -1)
        return rows(beta, p["sigma"]) + normal(beta, 0.0, 10.0) + half_cauchy(p["sigma"], 2.5)

    init = {"alpha": 0.0, "beta": [0.0] * 5, "sigma": 1.0}
    return Reference("arK-arK", log_density, init, {"sigma": "positive"})


def kilpisjarvi() -> Reference:
    d = _data("kilpisjarvi_mod-kilpisjarvi")
    rows = Rows(columns(d["x"]), d["y"])

    def log_density(p: Params) -> Tensor:
        beta = torch.stack([p["alpha"], p["beta"]], -1)
        value = rows(beta, p["sigma"]) + normal(p["alpha"], d["pmualpha"], d["psalpha"])
        return value + normal(p["beta"], d["pmubeta"], d["psbeta"])

    init = {"alpha": 0.0, "beta": 0.0, "sigma": 1.0}
    return Reference("kilpisjarvi_mod-kilpisjarvi", log_density, init, {"sigma": "positive"})


def diamonds() -> Reference:
    d = _data("diamonds-diamonds")
    x = d["X"][:, 1:]
    rows = Rows(columns(*(x - x.mean(0)).unbind(1)), d["Y"])

    def log_density(p: Params) -> Tensor:
        beta = torch.cat([p["Intercept"].unsqueeze(-1), p["b"]], -1)
        value = rows(beta, p["sigma"]) + normal(p["b"], 0.0, 1.0)
        value = value + student(p["Intercept"], 3.0, 8.0, 10.0)
        return value + student(p["sigma"], 3.0, 0.0, 10.0)

    init = {"b": [0.0] * 24, "Intercept": 8.0, "sigma": 1.0}
    return Reference("diamonds-diamonds", log_density, init, {"sigma": "positive"})


def eight_schools() -> Reference:
    """Non-centred: θ_j = μ + τ η_j."""
    name = "eight_schools-eight_schools_noncentered"
    d = _data(name)

    def log_density(p: Params) -> Tensor:
        theta = p["mu"] + p["tau"] * p["eta"]
        value = normal(d["y"], theta, d["sigma"]) + normal(p["eta"], 0.0, 1.0)
        return value + normal(p["mu"], 0.0, 5.0) + half_cauchy(p["tau"], 5.0)

    def shown(p: Params) -> Params:
        mu, tau = p["mu"].unsqueeze(-1), p["tau"].unsqueeze(-1)
        return {"theta": mu + tau * p["eta"], "mu": p["mu"], "tau": p["tau"]}

    def hidden(p: Params) -> Params:
        eta = (p["theta"] - p["mu"].unsqueeze(-1)) / p["tau"].unsqueeze(-1)
        return {"eta": eta, "mu": p["mu"], "tau": p["tau"]}

    init = {"eta": [0.0] * 8, "mu": 0.0, "tau": 1.0}
    return Reference(name, log_density, init, {"tau": "positive"}, shown, hidden)


def _recursion(share: Tensor, given: Tensor) -> Tensor:
    """x_t = given_t + share · x_{t−1} = Σ_j share^j given_{t−j}, its terms doubled at each turn."""
    shift = 1
    while shift < len(given):
        given = given + share * torch.nn.functional.pad(given[:-shift], (shift, 0))
        share, shift = share.square(), 2 * shift
    return given


def arma() -> Reference:
    y = _data("arma-arma11")["y"]

    def log_density(p: Params) -> Tensor:
        before = torch.cat([p["mu"].unsqueeze(0), y[:-1]])
        error = _recursion(-p["theta"], y - p["mu"] - p["phi"] * before)
        value = normal(error, 0.0, p["sigma"]) + normal(p["mu"], 0.0, 10.0)
        value = value + normal(p["phi"], 0.0, 2.0) + normal(p["theta"], 0.0, 2.0)
        return value + half_cauchy(p["sigma"], 2.5)

    init = {"mu": 0.0, "phi": 0.0, "theta": 0.0, "sigma": 1.0}
    return Reference("arma-arma11", log_density, init, {"sigma": "positive"}, jitter=0.5)


def garch() -> Reference:
    """alpha1, beta1 > 0 with alpha1 + beta1 < 1: the first two entries of a simplex."""
    d = _data("garch-garch11")
    y, first = d["y"], torch.tensor([d["sigma1"] ** 2]).double()

    def log_density(p: Params) -> Tensor:
        alpha1, beta1, _ = p["shares"].unbind(-1)
        given = p["alpha0"] + alpha1 * (y[:-1] - p["mu"]).square()
        variance = _recursion(beta1, torch.cat([first, given]))
        return normal(y, p["mu"], variance.sqrt())

    def shown(p: Params) -> Params:
        shares = {"alpha1": p["shares"][..., 0], "beta1": p["shares"][..., 1]}
        return {"mu": p["mu"], "alpha0": p["alpha0"], **shares}

    def hidden(p: Params) -> Params:
        rest = 1 - p["alpha1"] - p["beta1"]
        shares = torch.stack([p["alpha1"], p["beta1"], rest], -1)
        return {"mu": p["mu"], "alpha0": p["alpha0"], "shares": shares}

    init = {"mu": 0.0, "alpha0": 1.0, "shares": [1 / 3] * 3}
    constraints = {"alpha0": "positive", "shares": "simplex"}
    return Reference("garch-garch11", log_density, init, constraints, shown, hidden)


def _kernel(x: Tensor, rho: Tensor, alpha: Tensor) -> Tensor:
    """α² exp(−(x − x')²/(2ρ²)), with any leading axes of ρ and α."""
    square = (x[:, None] - x[None, :]).square()
    rho, alpha = rho[..., None, None], alpha[..., None, None]
    return alpha.square() * torch.exp(-0.5 * square / rho.square())


def _gp_prior(p: Params) -> Tensor:
    """ρ ~ Gamma(25, rate 4), α ~ half-N(0, 2)."""
    return 24 * p["rho"].log() - 4 * p["rho"] + normal(p["alpha"], 0.0, 2.0)


def gp_regression() -> Reference:
    """σ is added to the diagonal as a variance."""
    d = _data("gp_pois_regr-gp_regr")
    eye = torch.eye(11, dtype=torch.float64)

    def log_density(p: Params) -> Tensor:
        factor = torch.linalg.cholesky(_kernel(d["x"], p["rho"], p["alpha"]) + p["sigma"] * eye)
        z = torch.linalg.solve_triangular(factor, d["y"].unsqueeze(-1), upper=False)
        value = -0.5 * z.square().sum() - factor.diagonal(dim1=-2, dim2=-1).log().sum()
        return value + _gp_prior(p) + normal(p["sigma"], 0.0, 1.0)

    init = {"rho": 5.0, "alpha": 1.0, "sigma": 1.0}
    constraints = {"rho": "positive", "alpha": "positive", "sigma": "positive"}
    return Reference("gp_pois_regr-gp_regr", log_density, init, constraints)


def gp_counts() -> Reference:
    """f = L z with z standard normal: f itself is almost degenerate."""
    d = _data("gp_pois_regr-gp_pois_regr")
    tiny = 1e-10 * torch.eye(11, dtype=torch.float64)

    def factor(p: Params) -> Tensor:
        return torch.linalg.cholesky(_kernel(d["x"], p["rho"], p["alpha"]) + tiny)

    def log_density(p: Params) -> Tensor:
        f = (factor(p) * p["z"]).sum(-1)
        return (d["k"] * f - f.exp()).sum() + normal(p["z"], 0.0, 1.0) + _gp_prior(p)

    def shown(p: Params) -> Params:
        f = (factor(p) @ p["z"].unsqueeze(-1)).squeeze(-1)
        return {"rho": p["rho"], "alpha": p["alpha"], "f": f}

    def hidden(p: Params) -> Params:
        z = torch.linalg.solve_triangular(factor(p), p["f"].unsqueeze(-1), upper=False)
        return {"rho": p["rho"], "alpha": p["alpha"], "z": z.squeeze(-1)}

    init = {"rho": 5.0, "alpha": 1.0, "z": [0.0] * 11}
    constraints = {"rho": "positive", "alpha": "positive"}
    name = "gp_pois_regr-gp_pois_regr"
    return Reference(name, log_density, init, constraints, shown, hidden)


def hidden_markov() -> Reference:
    """The forward algorithm as a product of 2 × 2 matrices, multiplied in pairs."""
    y = _data("hmm_example-hmm_example")["y"]

    def log_density(p: Params) -> Tensor:
        emit = -0.5 * (y.unsqueeze(-1) - p["mu"]).square()  # [N, 2]
        move = torch.stack([p["theta1"], p["theta2"]]).log()  # [from, to]
        links = move + emit[1:].unsqueeze(1)  # [N − 1, from, to]
        while len(links) > 1:
            odd = links[-1:] if len(links) % 2 else links[:0]
            left, right = links[: len(links) // 2 * 2].unflatten(0, (-1, 2)).unbind(1)
            pairs = torch.logsumexp(left.unsqueeze(-1) + right.unsqueeze(1), 2)
            links = torch.cat([pairs, odd])
        value = torch.logsumexp((emit[0].unsqueeze(-1) + links[0]).flatten(), 0)
        return value + normal(p["mu"], torch.tensor([3.0, 10.0]).double(), 1.0)

    init = {"theta1": [0.5, 0.5], "theta2": [0.5, 0.5], "mu": [3.0, 10.0]}
    constraints = {"theta1": "simplex", "theta2": "simplex", "mu": "positive-ordered"}
    return Reference("hmm_example-hmm_example", log_density, init, constraints, jitter=0.5)


def gaussian_mixture() -> Reference:
    y = _data("low_dim_gauss_mix-low_dim_gauss_mix")["y"].unsqueeze(-1)

    def log_density(p: Params) -> Tensor:
        z = (y - p["mu"]) / p["sigma"]
        weight = torch.stack([p["theta"], 1 - p["theta"]]).log()
        value = torch.logsumexp(weight - p["sigma"].log() - 0.5 * z.square(), -1).sum()
        prior = normal(p["mu"], 0.0, 2.0) + normal(p["sigma"], 0.0, 2.0)
        return value + prior + 4 * p["theta"].log() + 4 * torch.log1p(-p["theta"])

    init = {"mu": [-1.0, 1.0], "sigma": [1.0, 1.0], "theta": 0.5}
    constraints = {"mu": "ordered", "sigma": "positive", "theta": "unit"}
    return Reference("low_dim_gauss_mix-low_dim_gauss_mix", log_density, init, constraints)


def lotka_volterra(steps: int = 4) -> Reference:
    """u' = (θ1 − θ2 v) u, v' = (−θ3 + θ4 u) v in logarithms, by Runge–Kutta, `steps` a year.

    There is a second mode, a cycle of half the length, some forty nats lower, from which no chain
    returns. Chains start from what the series shows: its means, (θ3/θ4, θ1/θ2) at rest, and a peak
    about every ten years, √(θ1 θ3) = 2π/10.
    """
    d = _data("hudson_lynx_hare-lotka_volterra")
    seen = torch.cat([d["y_init"].unsqueeze(0), d["y"]]).log()  # [21, 2]
    h = 1.0 / steps

    def log_density(p: Params) -> Tensor:
        theta = p["theta"]
        rate = torch.stack([theta[0], -theta[2]])
        other = torch.stack([-theta[1], theta[3]])

        def slope(z: Tensor) -> Tensor:
            return torch.addcmul(rate, other, z.flip(0).exp())

        z = p["z_init"].log()
        path = [z]
        for _ in range(20):
            for _ in range(steps):
                k1 = slope(z)
                k2 = slope(torch.add(z, k1, alpha=h / 2))
                k3 = slope(torch.add(z, k2, alpha=h / 2))
                k4 = slope(torch.add(z, k3, alpha=h))
                z = z + (h / 6) * (k1 + 2 * (k2 + k3) + k4)
            path.append(z)
        value = normal(seen, torch.stack(path), p["sigma"].expand(21, 2))
        value = value + normal(theta[::2], 1.0, 0.5) + normal(theta[1::2], 0.05, 0.05)
        for name, loc in (("sigma", -1.0), ("z_init", math.log(10.0))):
            logs = p[name].log()
            value = value + normal(logs, loc, 1.0) - logs.sum()
        return value

    rest, rate = seen.exp().mean(0), 2 * math.pi / 10
    theta = [rate, rate / float(rest[1]), rate, rate / float(rest[0])]
    init = {"theta": theta, "z_init": d["y_init"].tolist(), "sigma": [0.4, 0.4]}
    constraints = dict.fromkeys(init, "positive")
    name = "hudson_lynx_hare-lotka_volterra"
    return Reference(name, log_density, init, constraints, jitter=0.2)


MODELS: dict[str, Callable[[], Reference]] = {
    "eight_schools-eight_schools_noncentered": eight_schools,
    "arK-arK": auto_regression,
    "arma-arma11": arma,
    "garch-garch11": garch,
    "sblri-blr": lambda: blr("sblri-blr"),
    "sblrc-blr": lambda: blr("sblrc-blr"),
    "kidiq-kidscore_momiq": kidscore_momiq,
    "kidiq-kidscore_interaction": kidscore_interaction,
    "earnings-logearn_height": earnings,
    "mesquite-logmesquite": logmesquite,
    "nes1980-nes": nes,
    "kilpisjarvi_mod-kilpisjarvi": kilpisjarvi,
    "diamonds-diamonds": diamonds,
    "gp_pois_regr-gp_regr": gp_regression,
    "gp_pois_regr-gp_pois_regr": gp_counts,
    "hmm_example-hmm_example": hidden_markov,
    "low_dim_gauss_mix-low_dim_gauss_mix": gaussian_mixture,
    "hudson_lynx_hare-lotka_volterra": lotka_volterra,
}
