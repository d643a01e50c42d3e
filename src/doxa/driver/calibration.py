"""Calibration of a likelihood on held-out rows.

Held-out rows estimate parameters of the likelihood, such as the temperature of a categorical or the
shape of the noise. Training rows cannot be used, because networks predict them too well. If all
members hold out the same rows, the posterior is used as it is. If each member holds out its own
part, a row is held out from one member m only. The location of its prediction is then right for m,
and the width for all members together. So the calibration uses the mixture of all functions f_s,
shifted to the mean of member m,

    p(y_i) = 1/S Σ_s p(y_i | f_s(x_i) + f̄_m(x_i) − f̄(x_i))

and the likelihood is calibrated within this mixture, so that the spread between members is not
counted twice (`ensemble/map.py` has the same for a noise level, in closed form).
`Likelihood.calibrates_on_held_out` is True for a likelihood with such parameters, and
`Likelihood.calibrate_held_out` estimates them; without clear evidence from the rows, nothing
changes. The weights of the rows are scaled to add up to their effective number.

If the likelihood has a noise level and one number is predicted from a table of numbers, the rows
also show whether the noise depends on the prediction or on an input (`calibrate_noise_scale` in
`likelihoods/compose.py`, a test of size 0.01). The posterior then has a `noise_scale`, a factor on
the noise for each row.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from doxa import describe, store
from doxa.data.rows import per_effective_row
from doxa.driver.validation import PosteriorsBySplit, counted, in_units, moved_by
from doxa.likelihoods import Likelihood
from doxa.likelihoods.base import CalibratedLikelihood
from doxa.likelihoods.compose import CalibratedNoise, calibrate_noise_scale
from doxa.method import Method, Run
from doxa.posterior import HeldOutCalibration, Posterior
from doxa.posterior.weights import WeightPosterior, concatenate

log = logging.getLogger("doxa")

FEWEST = 10  # effective number of held-out rows; fewer are not used for calibration
FEWEST_FOR_NOISE = 30  # effective number of held-out rows that can show that the noise varies
_MOST_NUMBERS = 2**19  # function values that are used, at most
_FUNCTIONS = 50  # functions that are used, at most

CalibrationRows = tuple[  # f [S, N, ...], y, theta, weight [N]
    Tensor, Tensor, dict[str, Tensor], Tensor
]


def calibrate_on_held_out(
    posterior: Posterior,
    posteriors_by_split: PosteriorsBySplit,
    method: Method,
    run: Run,
    stopped: bool,
    alone: bool = False,
) -> tuple[float, float]:
    """Calibrate the likelihood of a posterior, and of its members alone, on the held-out rows.
    Returns what it has gained there, and the optimism of noise that varies with x, in nats per row;
    0 without calibration.

    `stopped`: whether training used early stopping on these rows. Only methods that overfit are
    calibrated; the others integrate over the parameters of the likelihood. `alone`: each member is
    calibrated alone, without the spread between members.
    """
    before = posterior.base_likelihood
    if not (
        method.overfits and before.calibrates_on_held_out and isinstance(posterior, WeightPosterior)
    ):
        return 0.0, 0.0
    at = _rows(None if alone else posterior, posteriors_by_split, run)
    if at is None or float(at[0][3].sum()) < FEWEST:
        return 0.0, 0.0
    rows, x, mean = at
    stops = 1 if run.pooled_rows else len(posteriors_by_split)  # steps that the rows have chosen
    found = before.calibrate_held_out(*rows, stopped=stops * stopped)
    noise = _calibrate_noise(before, found, rows, x, mean, stops * stopped, posterior.record.seed)
    if noise is not None:
        found = noise.likelihood
    elif found is None:
        return 0.0, 0.0
    for each in {id(p): p for p in (posterior, *(p for p, _ in posteriors_by_split))}.values():
        assert isinstance(each, WeightPosterior)
        if found is not None:
            _take_up(each, found)
        each.noise_scale = noise.scale if noise else None
    if found is not None:
        posterior.record.metadata["fitted_likelihood"] = store.encode(before)
    message = found.message if found else before.name
    calibration: HeldOutCalibration = {"rows": len(rows[1]), "likelihood": message}
    if noise is not None:
        calibration["noise_columns"] = list(noise.columns)
        calibration["noise_p_value"] = noise.p_value
    posterior.record.diagnostics["held_out_calibration"] = calibration
    chosen = describe.calibrated_likelihood(calibration)
    log.info("likelihood: %s, by %d held-out rows", chosen, len(rows[1]))
    return found.gain if found else 0.0, noise.optimism if noise else 0.0


def _calibrate_noise(
    likelihood: Likelihood, found: CalibratedLikelihood | None, rows: CalibrationRows, x: Any,
    mean: Tensor, stopped: int, seed: int,
) -> CalibratedNoise | None:  # fmt: skip
    """The factor on the noise for one number that is predicted from a table of numbers."""
    if not (
        likelihood.scales_targets and isinstance(x, Tensor) and x.is_floating_point()
        and x.ndim == 2 and tuple(rows[1].shape[1:]) == (1,)
        and float(rows[3].sum()) >= FEWEST_FOR_NOISE
    ):  # fmt: skip
        return None
    return calibrate_noise_scale(likelihood, *rows, x, found, stopped, seed, mean[:, 0])


def _take_up(posterior: WeightPosterior, found: CalibratedLikelihood) -> None:
    """Replace the likelihood of a posterior by the calibrated one."""
    model = posterior.network.with_likelihood(found.likelihood)
    posterior.base_likelihood, posterior.model = found.likelihood, model
    for name, more in found.moved.items():
        weights: Tensor = getattr(posterior, posterior.flat)
        index = posterior.layout.index([f"likelihood.{name}"]).to(weights.device)
        by = torch.full((*weights.shape[:-1], len(index)), more).to(weights)
        setattr(posterior, posterior.flat, weights.index_add(-1, index, by))


def adopt_likelihood(posterior: Posterior, other: Posterior) -> None:
    """Give a posterior the likelihood of another one, and the values of its learned parameters."""
    assert isinstance(posterior, WeightPosterior) and isinstance(other, WeightPosterior)
    posterior.noise_scale = other.noise_scale
    model = posterior.network.with_likelihood(other.base_likelihood)
    posterior.base_likelihood, posterior.model = other.base_likelihood, model
    names = [name for name in other.layout.names if name.startswith("likelihood.")]
    if names:
        weights: Tensor = getattr(posterior, posterior.flat)
        theirs = getattr(other, other.flat)[..., other.layout.index(names)]
        value = theirs.flatten(0, -2).mean(0).to(weights)
        index = posterior.layout.index(names).to(weights.device)
        value = value.expand(*weights.shape[:-1], len(names))
        setattr(posterior, posterior.flat, weights.index_copy(-1, index, value))


def _rows(
    posterior: Posterior | None, posteriors_by_split: PosteriorsBySplit, run: Run
) -> tuple[CalibrationRows, Any, Tensor] | None:
    """The held-out rows and the functions at them, the inputs in fitted units, and the predicted
    means [N, ...], at the level of all members. None if a prediction is not a mixture of
    functions."""
    data, most = run.rows, _MOST_NUMBERS // len(posteriors_by_split)
    assert data.validation is not None
    parts: list[CalibrationRows] = []
    groups: list[Tensor] = []
    inputs: list[Any] = []
    means: list[Tensor] = []
    for alone, split in posteriors_by_split:
        rows = counted(data, data.validation[split], most // _FUNCTIONS)
        found = moved_by(posterior or alone, alone, in_units(data, rows, split)[0])
        if found is None:
            return None
        form, shift = found
        some = torch.linspace(0, len(form.f) - 1, min(len(form.f), _FUNCTIONS)).round().long()
        f = form.f[some.to(form.f.device)]
        theta = {k: v[some.to(v.device)] for k, v in form.theta.items()}
        x, y = data.take(rows, torch.tensor(data.run_of(split)))
        inputs.append(x)
        means.append(form.f.mean(0) - shift.mean(0))  # as the posterior predicts them
        one = torch.ones(len(rows), dtype=torch.float64, device=f.device)
        weight, group = data.weight_of(rows), data.groups_of(rows)
        if group is not None:
            groups.append(group)
        parts.append((f, y, theta, one if weight is None else weight.to(one)))
    fs, ys, thetas, weights = zip(*parts, strict=True)
    weight = per_effective_row(torch.cat(weights), torch.cat(groups) if groups else None)
    weight = torch.ones_like(torch.cat(weights)) if weight is None else weight
    of_rows = torch.cat(fs, 1), torch.cat(ys), thetas[0], weight
    return of_rows, concatenate(inputs, 0), torch.cat(means)
