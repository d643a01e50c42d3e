"""What mini-batches do to the stationary variance: the table of docs/stochastic_gradients.md, with
C > 0. The formulas stand here as they stand there; the chains are doxa's.

Batches of shuffled epochs are not independent: those of an epoch sum to the whole data. In place of
C they bring rC, r the share of the chain's variance that lies within epochs,

    r = 1 − Var[mean of θ over an epoch of E steps] / Var[θ] = 1 − (1/E) Σ_{|k|<E} (1 − |k|/E) ρ_k,

ρ_k being the autocorrelation of θ. For Langevin dynamics, ρ_k = (1 − ηλ)^k, the sum has a closed
form. (C itself is larger by n/(n − 1), because rows are drawn without replacement.)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gaussian_chains import Target, Z, target

import doxa

PAGE = Path(__file__).parents[2] / "docs" / "stochastic_gradients.md"
BATCH, EPOCH = 4, 16  # rows of a batch, batches of an epoch


def goal() -> tuple[Target, float, float]:
    """12 weights with the same rows in orders of their own, which makes them almost independent
    chains; the curvature λ of each, and the variance C of its ∇Û over independent batches."""
    one = target(n=BATCH * EPOCH, noise=(0.7,))
    g = torch.Generator().manual_seed(0)
    y = torch.cat([one.y[torch.randperm(one.n, generator=g)] for _ in range(12)], 1)
    return (
        Target(y, one.noise * 12), one.precision[0, 0], one.gradient_noise(BATCH, True)[0, 0],
    )  # fmt: skip


def share_of_langevin(decay: Any) -> Any:
    """r of a chain that forgets a share `decay` = ηλ at each step."""
    x = decay * EPOCH
    left = 1 - (1 - decay) ** EPOCH
    return 1 - (2 - decay) / x + 2 * (1 - decay) * left / x**2


def share(decay: float, friction: float, epoch: int = EPOCH) -> float:
    """r of v ← (1 − α)v − ηλθ, θ ← θ + v, from its autocorrelation: powers of a matrix."""
    step = np.array([[1 - decay, 1 - friction], [-decay, 1 - friction]])
    cov = np.linalg.solve(np.eye(4) - np.kron(step, step), np.ones(4)).reshape(2, 2)
    rho = [(np.linalg.matrix_power(step, k) @ cov)[0, 0] / cov[0, 0] for k in range(epoch)]
    weights = [(1 if k == 0 else 2) * (1 - k / epoch) for k in range(epoch)]
    return 1 - float(np.dot(weights, rho)) / epoch


def check(method: Any, ratio: float, temperature: float = 1.0, power: float = 0.02) -> None:
    """Mean 0 and variance `ratio` · T/λ within 4.5 standard errors, from 40 chains that share
    nothing: by chance one in 10⁴ fails (t with 39 degrees of freedom, twice)."""
    many, curvature, _ = goal()
    away = many.fit(method, members=40, batch_size=BATCH).samples.numpy() - many.mean
    first, second = away.mean((1, 2)), np.square(away).mean((1, 2)) * curvature / temperature
    error = second.std() / 40**0.5
    assert abs(first.mean()) < Z * first.std() / 40**0.5
    assert abs(second.mean() - ratio) < Z * error
    assert error < power * ratio


# Draws are 17 steps apart, one more than an epoch has, so that they fall on all of its steps alike.


def test_the_share_of_a_chain_without_momentum_is_langevins() -> None:
    """And its limits: all of C for a chain that forgets within a batch, x/3 for a slow one."""
    for decay in (0.01, 0.1, 0.5):
        assert share(decay, 1.0) == pytest.approx(share_of_langevin(decay), rel=1e-9)
    assert share_of_langevin(1.0) == pytest.approx(1 - 1 / EPOCH)
    x = 1e-3 * EPOCH
    assert share_of_langevin(1e-3) == pytest.approx(x / 3, rel=0.02)
    smooth = 1 - 2 / x + 2 * (1 - np.exp(-x)) / x**2  # as the page has it, for small ηλ
    assert share_of_langevin(1e-3) == pytest.approx(smooth, rel=0.02)


def test_the_example_of_the_page() -> None:
    """Its second table, at n/B = 40, C = nλ/B: ηC = 40 ηλ."""
    lines = re.findall(r"\| .* \| (0\.\d+) \| (\d\.\d+) \| (\d\.\d+) \|", PAGE.read_text())
    for line, friction in zip(lines, (1.0, 1.0, 0.2, 0.2), strict=True):
        decay, shuffled, independent = map(float, line)
        for part, said in ((share(decay, friction, 40), shuffled), (1.0, independent)):
            ratio = (1 + part * 20 * decay / friction) / (1 - decay / (4 - 2 * friction))
            assert ratio == pytest.approx(said, abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sgld(temperature: float) -> None:
    """At ηλ = 0.1 the batches add 35 % or 70 %; independent ones would have added 90 % or 180 %."""
    many, curvature, noise = goal()
    eta = 0.1 / curvature
    method = doxa.SGLD(32, 96, 17, step_size=eta, decay=0.0, temperature=temperature)
    seen = share_of_langevin(0.1) * noise * many.n / (many.n - 1)
    ratio = (1 + eta * seen / (2 * temperature)) / (1 - 0.1 / 2)
    assert 1.3 < ratio * (1 - 0.1 / 2) < 1.8
    check(method, ratio, temperature)


@pytest.mark.slow
@pytest.mark.parametrize(("friction", "decay"), [(0.2, 0.02), (0.5, 0.1)])
def test_sghmc(friction: float, decay: float) -> None:
    many, curvature, noise = goal()
    eta = decay / curvature
    method = doxa.SGHMC(32, 192, 17, step_size=eta, friction=friction)
    seen = share(decay, friction) * noise * many.n / (many.n - 1)
    ratio = (1 + eta * seen / (2 * friction)) / (1 - decay / (4 - 2 * friction))
    assert ratio > 1.15
    check(method, ratio)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_sghmc_with_an_estimate_of_the_noise(part: float, temperature: float) -> None:
    """β̂ = ηC/2T takes back what the batches bring, to 2 %; half of that, half of it. Batches of
    shuffled epochs would leave 61 % of the variance."""
    _, curvature, noise = goal()
    friction, decay = 0.2, 0.01
    eta = decay / curvature
    estimate = part * eta * noise / (2 * temperature)
    assert estimate < friction
    method = doxa.SGHMC(
        32,
        192,
        17,
        step_size=eta,
        friction=friction,
        gradient_noise=estimate,
        temperature=temperature,
    )
    left = eta * noise / (2 * temperature) - estimate
    ratio = (1 + left / friction) / (1 - decay / (4 - 2 * friction))
    check(method, ratio, temperature, power=0.03)


@pytest.mark.slow
def test_psgld_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLD's with ηG for η, G as each chain froze it."""
    many, curvature, noise = goal()
    frozen: dict[str, Any] = {}
    finish = doxa.PSGLD.finish

    def looking(self: Any, run: Any, state: Any, kept: Any) -> Any:
        frozen["scale"] = self._preconditioner(state).numpy()
        return finish(self, run, state, kept)

    monkeypatch.setattr(doxa.PSGLD, "finish", looking)
    eta = 0.1 / curvature
    method = doxa.PSGLD(32, 96, 17, eta, beta2=0.9, eps=0.2)
    samples = many.fit(method, members=40, batch_size=BATCH).samples.numpy()
    scale = frozen["scale"]  # [M, P]
    assert scale.max() > 1.5 * scale.min()  # chains differ
    seen = share_of_langevin(eta * scale * curvature) * noise * many.n / (many.n - 1)
    ratio = (1 + eta * scale * seen / 2) / (1 - eta * scale * curvature / 2)
    assert ratio.mean() > 1.1
    second = np.square(samples - many.mean).mean(1) * curvature
    off = (second - ratio).mean(1)  # of each chain
    assert abs(off.mean()) < Z * off.std() / 40**0.5
    assert off.std() / 40**0.5 < 0.02
