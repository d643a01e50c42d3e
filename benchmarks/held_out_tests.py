"""Size and power of the tests that choose the noise on held-out rows.

    python -m benchmarks.held_out_tests [--repeats 600] [--fits 60]

Three tables. First, noise that varies with x: the share of simulated tables of n held-out rows with
four inputs in which the test finds a dependence, for errors e·exp(slope·x₁), and three
distributions of e. Second, counts: the share in which the negative binomial is chosen, for a gamma
distributed factor of variance 1/r. Third, whole fits: the share of deep ensembles on 300 rows that
get a noise level for each row, and the mean gain in nats per new row against
`likelihood="gaussian"`. A slope of 0 and r = ∞ are the sizes of the tests; their level is 0.01.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import Tensor

import doxa
from doxa.likelihoods import NoiseScale
from doxa.likelihoods.compose import noise_p_value

LEVEL = 0.01
ERRORS = ("normal", "student-t (3)", "skewed")


def errors(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "normal":
        return rng.standard_normal(n)
    return rng.standard_t(3, n) if kind.startswith("student") else rng.lognormal(size=n) - 1.65


def noise_found(kind: str, n: int, slope: float, repeats: int) -> float:
    count = 0
    for seed in range(repeats):
        rng = np.random.default_rng([seed, n])
        x = torch.tensor(rng.standard_normal((n, 4)))
        e = torch.tensor(errors(kind, n, rng)) * (slope * x[:, 1]).exp()
        start = NoiseScale.of(x[:, 0], x)
        assert start is not None
        one = torch.ones(n).double()
        count += noise_p_value(e, start.positions(x[:, 0], x), one, seed) <= LEVEL
    return count / repeats


def overdispersion_found(n: int, r: float, repeats: int) -> float:
    count = 0
    for seed in range(repeats):
        rng = np.random.default_rng([seed, n])
        f = rng.uniform(-1.0, 2.0, n)
        rate = np.exp(f) * (1.0 if math.isinf(r) else rng.gamma(r, 1.0 / r, n))
        y = torch.tensor(rng.poisson(rate)).double()[:, None]
        found = doxa.Counts().calibrate_held_out(
            torch.tensor(f).reshape(1, n, 1), y, {}, torch.ones(n)
        )
        count += found.likelihood.name == "negative-binomial"
    return count / repeats


def fitted(kind: str, slope: float, seed: int) -> tuple[bool, float]:
    """Whether the fit has a noise level for each row, and its gain on new rows."""
    rng = np.random.default_rng([seed, 7])

    def rows(n: int) -> tuple[Tensor, Tensor]:
        x = rng.uniform(-2.0, 2.0, (n, 3))
        mean = np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1]
        y = mean + 0.3 * np.exp(slope * x[:, 2]) * errors(kind, n, rng)
        return torch.tensor(x).float(), torch.tensor(y).float()

    data, (x, y) = rows(300), rows(2000)
    scores, found = [], False
    for likelihood in (None, "gaussian"):
        posterior = doxa.fit(
            doxa.nets.mlp(3, 1, (32,)), data, "deep-ensemble", likelihood=likelihood,
            standardize=True, progress=False, seed=seed,
        )  # fmt: skip
        scores.append(float(posterior.predict(x).log_prob(y).mean()))
        if likelihood is None:
            found = posterior.noise_scale is not None
    return found, scores[0] - scores[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=600)
    parser.add_argument("--fits", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    slopes = (0.0, 0.1, 0.2, 0.4)
    print("| errors | rows | " + " | ".join(f"slope {s:g}" for s in slopes) + " |", flush=True)
    for kind in ERRORS:
        for n in (50, 150, 500):
            shares = [
                noise_found(kind, n, s, asked.repeats // (1 if s == 0 else 5)) for s in slopes
            ]
            print(f"| {kind} | {n} | " + " | ".join(f"{s:.3f}" for s in shares) + " |", flush=True)
    sizes = (math.inf, 10.0, 3.0, 1.0)
    print("\n| rows | " + " | ".join(f"r = {r:g}" for r in sizes) + " |", flush=True)
    for n in (30, 100, 500):
        shares = [
            overdispersion_found(n, r, asked.repeats // (1 if math.isinf(r) else 5)) for r in sizes
        ]
        print(f"| {n} | " + " | ".join(f"{s:.3f}" for s in shares) + " |", flush=True)
    print("\n| errors | slope | noise varies | gain, nats per row |", flush=True)
    for kind in ERRORS[:2]:
        for slope in (0.0, 0.3, 0.6):
            count = asked.fits if slope == 0.0 else asked.fits // 5
            each = [fitted(kind, slope, seed) for seed in range(count)]
            share = sum(found for found, _ in each) / max(1, count)
            gain = float(np.mean([gain for _, gain in each]))
            print(f"| {kind} | {slope:g} | {share:.3f} | {gain:+.3f} |", flush=True)


if __name__ == "__main__":
    main()
