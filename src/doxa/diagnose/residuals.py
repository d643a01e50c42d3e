"""Checks of the likelihood: the kind of targets, and the size, tails and location of the noise.

All checks use z = (y − E[y]) / std[y]. The size of the noise is evaluated on held-out rows if there
are any. Its shape is evaluated on training and test rows together, each set scaled by its own
standard deviation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from doxa.diagnose.advice import (
    MORE_ROWS,
    any_of,
    ensemble,
    learned_noise,
    longer,
    noise_by_input,
    other_likelihood,
)  # fmt: skip
from doxa.diagnose.data import ALPHA, REPLICAS, DiagnosticData, Head, Scored, family, two_sided
from doxa.diagnose.finding import Finding, bad, by_chance, good, number, skipped, slight, warning
from doxa.errors import Unavailable
from doxa.noise import generator

_LEAST_ROWS = 30
_TOO_LARGE, _TOO_SMALL = 2.0, 0.5  # mean z²: variances off by a factor of two
_HEAVY = 4.0  # degrees of freedom
_MIXED = 9.55  # −2 log likelihood ratio at ½χ²₀ + ½χ²₁, level 0.001
_UNEVEN = 3.0  # ratio of variances, top third to bottom third
_DEGREES = (2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 20.0, 50.0)


def targets(case: DiagnosticData, head: Head) -> Finding:
    """Classes or small counts under a continuous likelihood."""
    scored = head.train
    if scored.likelihood.discrete:
        return good(
            f"targets are of the kind that a {family(scored.likelihood).name} likelihood expects"
        )
    values = scored.y.double().unique()
    if len(values) < 2:
        return bad("all targets are equal", "check how y was read")
    gaps = values.diff()
    step = float(gaps.min())
    whole = bool(((gaps / step - (gaps / step).round()).abs() < 1e-3).all())
    if len(values) == 2:
        message = "targets take two values: they are classes, not measurements"
        if values.tolist() != [0.0, 1.0]:
            return bad(message, "encode them as 0 and 1, and use likelihood='bernoulli'", 2.0)
        return bad(
            message, other_likelihood(case, "bernoulli", "a likelihood for two classes"), 2.0
        )
    noise = math.sqrt(float((scored.y.double() - scored.mean).square().mean()))
    if whole and len(values) <= 30 and step > 0.4 * noise:
        advice = any_of("likelihood='categorical', if they are classes")
        if float(values.min()) >= 0 and bool((values == values.round()).all()):
            counts = other_likelihood(
                case, "poisson", "a likelihood for counts, if they are counts"
            )
            advice = any_of(counts, advice)
        return warning(
            f"targets take {len(values)} evenly spaced values, {step / noise:.2g} standard "
            "deviations of the residuals apart: a continuous likelihood puts mass between them",
            advice,
            step / noise,
        )
    return good("targets are continuous, or nearly so", step / max(noise, 1e-300))


def dispersion(case: DiagnosticData, head: Head) -> Finding:
    """The size of the errors, compared with the predictive variance."""
    scored = head.unseen
    if scored.classifies:
        return skipped("classes have no dispersion; see calibration")
    if len(scored) < _LEAST_ROWS:
        return skipped(f"{len(scored)} rows are too few to evaluate the size of errors")
    if not bool(torch.isfinite(scored.variance).all()):
        return skipped("the predictive variance is not finite")
    observed = scored.z.square().mean()
    spread = (scored.replicas - scored.mean) / scored.variance.sqrt()
    p = two_sided(observed, spread.square().mean(1))
    ratio, where = float(observed), "test" if head.test is not None else "training"
    message = f"squared errors at the {where} rows are {number(ratio)} times the predicted variance"
    floor = _TOO_SMALL if head.test is not None else 0.1  # residuals at training rows are smaller
    counts = family(scored.likelihood).counts
    if ratio < 1 and head.test is None and ratio > floor:
        return good(message, ratio)
    if p > ALPHA:
        return by_chance(message, p, ratio)
    small = floor < ratio < _TOO_LARGE
    grade, little = (slight, "a little ") if small else (bad, "")
    if counts:
        way = "over" if ratio > 1 else "under"
        advice = any_of("inputs that explain the rest", ensemble(case))
        if ratio > 1 and family(scored.likelihood).name == "poisson":
            other = "held-out rows choose between Poisson and negative binomial noise"
            advice = any_of(other_likelihood(case, "counts", other), advice)
        return grade(f"the counts are {little}{way}dispersed: {message}", advice, ratio)
    side = "small" if ratio > 1 else "large"
    return grade(
        f"the predicted noise is {little}too {side}: {message} (p = {p:.1g})",
        any_of(learned_noise(case), MORE_ROWS),
        ratio,
    )


def tails(case: DiagnosticData, head: Head) -> Finding:
    """Tails of the residuals that are heavier than those of the likelihood.

    A likelihood-ratio test of a Student-t against a Gaussian for z: twice the log likelihood ratio
    at the best degrees of freedom. Its null distribution is ½χ²₀ + ½χ²₁, since the Gaussian lies
    on the boundary of the parameter space (Self & Liang, 1987)."""
    z = _normal_scores(head)
    if z is None:
        return skipped("counts and classes have no tails to compare")
    if len(z) < _LEAST_ROWS:
        return skipped(f"{len(z)} rows are too few to evaluate tails")
    degrees, ratio = _best_degrees(z)
    if ratio > _MIXED and degrees <= _HEAVY:
        return warning(
            f"residuals have heavier tails than the likelihood: they look like a Student-t with "
            f"{degrees:.2g} degrees of freedom (largest: {float(z.abs().max()):.1f} standard "
            "deviations)",
            any_of(
                other_likelihood(case, "student-t", "a likelihood with heavy tails"),
                "look at the outliers",
            ),
            degrees,
        )
    if ratio > _MIXED:
        return slight(
            "residuals have somewhat heavier tails than the likelihood: they look like a "
            f"Student-t with {degrees:.2g} degrees of freedom",
            other_likelihood(case, "student-t", "a likelihood with heavy tails"),
            degrees,
        )
    return good("residuals have the tails that the likelihood expects", degrees)


def _normal_scores(head: Head) -> Tensor | None:
    """Residuals that are standard normal, up to a scale, if the likelihood is correct: [N]."""
    if head.train.likelihood.discrete:
        return None
    parts = []
    for scored in (head.train, head.test):
        if scored is None or len(scored) < 10:
            continue
        z = _scores(scored)
        parts.append((z - z.mean()) / z.std().clamp_min(1e-12))
    return torch.cat(parts) if parts else torch.zeros(0)


def _scores(scored: Scored) -> Tensor:
    if family(scored.likelihood).heavy_tailed:
        u = scored.one(scored.p.cdf(scored.targets)).clamp(1e-9, 1 - 1e-9)
        return torch.special.ndtri(u)
    return scored.z


def _best_degrees(z: Tensor) -> tuple[float, float]:
    """The degrees of freedom of the best Student-t on a grid, and −2 log of the likelihood ratio
    of the Gaussian to it. Scales by expectation–maximisation (Lange, Little & Taylor, 1989)."""
    df = torch.tensor(_DEGREES, dtype=torch.float64).unsqueeze(1)  # [V, 1]
    square = z.double().square().unsqueeze(0)
    scale = square.mean().expand(len(df), 1)
    for _ in range(50):
        weight = (df + 1) / (df + square / scale)
        scale = (weight * square).mean(1, keepdim=True)
    each = -0.5 * scale.log() - 0.5 * (df + 1) * torch.log1p(square / (df * scale))
    norm = torch.lgamma(0.5 * (df + 1)) - torch.lgamma(0.5 * df) - 0.5 * (df * math.pi).log()
    total = (norm + each).sum(1)
    gaussian = -0.5 * len(z) * (math.log(2 * math.pi) + float(square.mean().log()) + 1.0)
    best = int(total.argmax())
    return _DEGREES[best], 2 * (float(total[best]) - gaussian)


def evenness(case: DiagnosticData, head: Head) -> Finding:
    """Noise that depends on the input, beyond what the likelihood predicts.

    |z| is regressed on the prediction, the inputs and their squares (Glejser, 1969). The share of
    variance that the regression explains is compared with that of shuffled residuals, an exact
    permutation test. The ratio of variances comes from a regression on one half of the rows,
    evaluated on the other half."""
    if head.train.likelihood.discrete:
        return skipped("the likelihoods of counts and classes have no noise level")
    pairs = [(head.train, case.few)]
    if head.test is not None and case.test is not None and len(head.test) >= 10:
        pairs.append((head.test, case.test.thinned(len(head.test), case.seed)))
    features, sizes = [], []
    for scored, sample in pairs:
        z = _scores(scored).abs()
        sizes.append(z / z.mean())
        features.append(_features(scored, sample.columns[scored.rows]))
    size, basis = torch.cat(sizes), torch.cat(features)
    if len(size) < max(_LEAST_ROWS, 3 * basis.shape[1]):
        return skipped(f"{len(size)} rows are too few to show where the noise is larger")
    p = _permutation(size, basis, case.seed)
    ratio = _unevenness(size, basis, case.seed)
    message = f"the largest expected noise variance is {number(ratio)} times the smallest"
    if p > ALPHA:
        return by_chance(message, p, ratio)
    advice = any_of(noise_by_input(case), "a transform of y")
    if family(head.train.likelihood).predicts_noise:
        advice = any_of(longer(case), "more hidden units")
    if ratio < _UNEVEN:
        return slight(
            f"the noise depends a little on the input: {message} (p = {p:.1g})", advice, ratio
        )
    return warning(f"the noise depends on the input: {message} (p = {p:.1g})", advice, ratio)


def _features(scored: Scored, columns: Tensor) -> Tensor:
    """The prediction, the inputs and their squares, standardised; more than 20 inputs are not
    used."""
    table = scored.mean.unsqueeze(1)
    if columns.shape[1] <= 20:
        table = torch.cat([table, columns], 1)
    table = (table - table.mean(0)) / table.std(0).clamp_min(1e-12)
    return torch.cat([table, table.square()], 1)


def _explained(values: Tensor, basis: Tensor) -> Tensor:
    """The share of the variance of values [N, R] in the span of the basis."""
    centred = basis - basis.mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    u = u[:, s > 1e-8 * s.max()]
    away = values - values.mean(0)
    return (u.mT @ away).square().sum(0) / away.square().sum(0)


def _permutation(size: Tensor, basis: Tensor, seed: int) -> float:
    source = generator(seed, "doctor", "permute")
    order = torch.rand(len(size), REPLICAS, generator=source).argsort(0)
    shares = _explained(torch.cat([size.unsqueeze(1), size[order]], 1), basis)
    return (1 + int((shares[1:] >= shares[0]).sum())) / (1 + REPLICAS)


def _unevenness(size: Tensor, basis: Tensor, seed: int) -> float:
    """Ratio of mean squares between the thirds where |z| is expected largest and smallest."""
    order = torch.randperm(len(size), generator=generator(seed, "doctor", "halves"))
    design = torch.cat([torch.ones_like(basis[:, :1]), basis], 1)
    ridge = 1e-3 * len(size) * torch.eye(design.shape[1], dtype=design.dtype)
    expected = torch.empty_like(size)
    for part, rest in ((order[::2], order[1::2]), (order[1::2], order[::2])):
        known = design[rest]
        weights = torch.linalg.solve(known.mT @ known + ridge, known.mT @ size[rest])
        expected[part] = design[part] @ weights
    if not bool(torch.isfinite(expected).all()):
        raise Unavailable("the inputs are too collinear to show where the noise is larger")
    ranked = size[expected.argsort()].square()
    third = len(ranked) // 3
    return float(ranked[-third:].mean() / ranked[:third].mean().clamp_min(1e-12))
