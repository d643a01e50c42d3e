"""What rows left out say of the likelihood itself: how sure to be of a class, the shape of noise.

A fit's own rows cannot say: on them every network is right too often. A posterior by itself is
asked by the rows that it held out. Where each member holds out a part of its own, a row is seen by
all members but one, m: its prediction is right in the middle, and that of the others in its width.
So the rows are given to the mixture of all functions f_s, moved to where member m has its mean,

    p(y_i) = 1/S Σ_s p(y_i | f_s(x_i) + f̄_m(x_i) − f̄(x_i))

and the likelihood that they ask for is that of this mixture: the spread between members is not
counted a second time (`ensemble/mixed_noise.py` has the same for a level of noise, in closed form).
A likelihood says whether it asks (`Likelihood.asks_left_out`) and what the answer is
(`Likelihood.left_out`); rows that ask for nothing clearly change nothing. Their weights add up to
their effective number.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from doxa import store
from doxa.data.weights import effective_rows, per_effective_row
from doxa.driver.judgement import Judged, counted, in_units, moved
from doxa.likelihoods.base import LeftOut
from doxa.method import Method, Run
from doxa.posterior import Posterior
from doxa.posterior.weights import WeightPosterior

log = logging.getLogger("doxa")

FEWEST = 10  # rows left out, by their effective number: fewer are not asked
_NUMBERS = 2**19  # in all functions that are looked at
_FUNCTIONS = 50  # of them

Asked = tuple[Tensor, Tensor, dict[str, Tensor], Tensor]  # f [S, N, ...], y, theta, weight [N]


def ask_left_out(
    posterior: Posterior, judged: Judged, method: Method, run: Run, stopped: bool
) -> None:
    """Give a posterior, and those that are judged in its place, the likelihood that the rows left
    out ask for; `stopped` says whether training ended where they are predicted best. Methods that
    do not overfit integrate over what could be asked."""
    before = posterior.base_likelihood
    if not (method.overfits and before.asks_left_out and isinstance(posterior, WeightPosterior)):
        return
    rows = _rows(posterior, judged, run)
    if rows is None or effective_rows(rows[3]) < FEWEST:
        return
    found = before.left_out(*rows, stopped=len(judged) * stopped)
    if found is None:
        return
    for each in {id(p): p for p in (posterior, *(p for p, _ in judged))}.values():
        assert isinstance(each, WeightPosterior)
        _take_up(each, found)
    posterior.record.metadata["fitted_likelihood"] = store.encode(before)
    posterior.record.diagnostics["left_out"] = {"rows": len(rows[1]), "likelihood": found.said}
    log.info("likelihood: %s, by %d rows left out", found.said, len(rows[1]))


def _take_up(posterior: WeightPosterior, found: LeftOut) -> None:
    """Its outputs mean from now on what was found."""
    model = posterior.network.meaning(found.likelihood)
    posterior.base_likelihood, posterior.model = found.likelihood, model
    for name, more in found.moved.items():
        weights: Tensor = getattr(posterior, posterior.flat)
        index = posterior.layout.index([f"likelihood.{name}"]).to(weights.device)
        by = torch.full((*weights.shape[:-1], len(index)), more).to(weights)
        setattr(posterior, posterior.flat, weights.index_add(-1, index, by))


def _rows(posterior: Posterior, judged: Judged, run: Run) -> Asked | None:
    """What the rows left out are asked with; None where functions are not kept."""
    data, most = run.rows, _NUMBERS // len(judged)
    assert data.validation is not None
    parts: list[Asked] = []
    for alone, split in judged:
        rows = counted(data, data.validation[split], most // _FUNCTIONS)
        form = moved(posterior, alone, in_units(data, rows, split)[0])
        if form is None:
            return None
        some = torch.linspace(0, len(form.f) - 1, min(len(form.f), _FUNCTIONS)).round().long()
        f = form.f[some.to(form.f.device)]
        theta = {k: v[some.to(v.device)] for k, v in form.theta.items()}
        y = data.take(rows, torch.tensor(data.run_of(split)))[1]
        one = torch.ones(len(rows), dtype=torch.float64, device=f.device)
        weight = data.weight_of(rows)
        parts.append((f, y, theta, one if weight is None else weight.to(one)))
    fs, ys, thetas, weights = zip(*parts, strict=True)
    weight = per_effective_row(torch.cat(weights))
    weight = torch.ones_like(torch.cat(weights)) if weight is None else weight
    return torch.cat(fs, 1), torch.cat(ys), thetas[0], weight
