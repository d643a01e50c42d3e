"""Class probabilities from Gaussian logits f ~ N(m, S), without drawing any.

probit: E σ(f) ≈ σ(m / √(1 + π v/8)) for one logit of variance v (MacKay 1992). Of several classes,
probabilities depend on differences between logits alone, so that each stands against the mean of
the others, d_c = f_c − Σ_{k≠c} f_k/(C − 1):

    softmax_c of (1 − 1/C) E d_c / √(1 + π Var d_c/8)

which is MacKay's form where there are two. The averaged probabilities are all that it gives.

probit-marginal: the softmax of m_c / √(1 + π S_cc/8), as in Daxberger et al. (2021) and in
laplace-torch. S_cc counts the variance of what is common to all logits, which no probability
depends on: under a wide prior it is most of it.

bridge: the Dirichlet whose density over logits has its mode at m and the curvature 1/S_cc there
(Laplace bridge; MacKay 1998, Hobbhahn et al. 2022),

    α_c = (1 − 2/C + e^{m_c} Σ_k e^{−m_k} / C²) / S_cc

Only logits that sum to zero have such a density, so that f is first conditioned on its sum:

    m ← m − S1 (1ᵀm)/(1ᵀS1),    S ← S − S11ᵀS/(1ᵀS1)

One logit f is the pair ∓f/2, and a Beta with α = (1 + e^{±m})/v. Its mean is σ(m) exactly: with two
classes the bridge spreads the probabilities and leaves them where the weights alone have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import rows_of
from doxa.errors import MethodError
from doxa.laplace.curvature import Jacobians, output_shapes, unflatten_outputs
from doxa.likelihoods import Bernoulli, Heads, Likelihood
from doxa.linalg.layout import Params
from doxa.predictive import Predictive
from doxa.predictive.beliefs import Averaged, Dirichlets
from doxa.predictive.form import Form
from doxa.predictive.mixture import build
from doxa.predictive.summary import HeadsForm

if TYPE_CHECKING:
    from doxa.laplace.laplace import Laplace
    from doxa.laplace.posterior import LaplacePosterior

DRAWN = ("odds", "samples")  # links that draw functions, and are for every likelihood

_TINY = 1e-12  # no variance is below it
_MOST = 600.0  # of a logarithm whose exponential is taken


def check(link: str, likelihood: Likelihood) -> None:
    """A closed link needs classes: an error where no head, or some head without a closed form, has
    none."""
    if link in DRAWN:
        return
    heads = likelihood.likelihoods if isinstance(likelihood, Heads) else (likelihood,)
    open_ = [head.name for head in heads if not (head.classifies or head.integrates_normal)]
    if open_ or not any(head.classifies for head in heads):
        named = ", ".join(open_ or [head.name for head in heads])
        raise MethodError(
            f"link={link!r} gives class probabilities, which a {named} likelihood has none of: "
            "use link='samples'"
        )


def against_others(rows: Tensor, classes: int) -> Tensor:
    """Each class less the mean of the others, in place of [..., C·site, n]."""
    each = rows.unflatten(-2, (classes, -1))
    each -= each.mean(-3, keepdim=True)
    each *= classes / max(1, classes - 1)
    return rows


def probit(f: Tensor, variance: Tensor) -> Tensor:
    """Logits of the averaged probabilities, in the shape of f; one variance for each logit."""
    return f / (1.0 + (math.pi / 8.0) * variance.clamp_min(0.0)).sqrt()


def bridge(f: Tensor, covariance: Tensor) -> Tensor:
    """α [..., C] from logits [..., C] and their covariance [..., C, C]."""
    m, s = f.double(), covariance.double()
    rows = s.sum(-1)  # S1
    total = rows.sum(-1, keepdim=True).clamp_min(_TINY)  # 1ᵀS1
    m = m - rows * m.sum(-1, keepdim=True) / total
    variance = s.diagonal(dim1=-2, dim2=-1) - rows.square() / total
    classes = f.shape[-1]
    odds = (m + torch.logsumexp(-m, -1, keepdim=True)).clamp_max(_MOST).exp()
    return (1.0 - 2.0 / classes + odds / classes**2) / variance.clamp_min(_TINY)


def binary_bridge(f: Tensor, variance: Tensor) -> Tensor:
    """α of no and yes, on a new last axis, from one logit and its variance."""
    m = f.double()
    odds = torch.stack([-m, m], -1).clamp_max(_MOST).exp()
    return (1.0 + odds) / variance.double().clamp_min(_TINY)[..., None]


def marked() -> dict[str, str]:
    """What a posterior saves beside its method, to say what "probit" means in it."""
    return {"probit": "against-others"}


def as_saved(method: Laplace, extra: dict[str, Any]) -> Laplace:
    """The method with the link that it was saved with: "probit" was "probit-marginal" before."""
    old = method.link == "probit" and "probit" not in extra
    return replace(method, link="probit-marginal") if old else method


class _Logits(NamedTuple):
    """One head at some rows: f and its variances [K, B, *output], and the covariance over classes
    [K, B, *site, C, C] where it is asked for."""

    f: Tensor
    variance: Tensor
    covariance: Tensor | None


def predict(posterior: LaplacePosterior, jacobians: Jacobians, x: Any, theta: Params) -> Predictive:
    """The closed form of each head; those with Gaussian noise have theirs."""
    likelihood = posterior.likelihood
    heads = likelihood.likelihoods if isinstance(likelihood, Heads) else (likelihood,)
    pieces = []
    for rows in jacobians.chunks(rows_of(x, "x")):
        pieces.append(_logits(posterior, heads, jacobians, tree_map(lambda t, r=rows: t[r], x)))
    forms = []
    for i, head in enumerate(heads):
        own = likelihood.theta_of(i, theta) if isinstance(likelihood, Heads) else theta
        whole = _joined([piece[i] for piece in pieces])
        forms.append(_form(head, whole, own, posterior.method.link))
    several = isinstance(likelihood, Heads)
    return Predictive.of(HeadsForm(likelihood, forms) if several else forms[0])


def _logits(
    posterior: LaplacePosterior, heads: tuple[Likelihood, ...], jacobians: Jacobians, x: Any
) -> list[_Logits]:
    """Of every head at some rows."""
    output, bridges = posterior.network.output, posterior.method.link == "bridge"
    split = lambda flat: _as_heads(unflatten_outputs(flat, output), len(heads))  # noqa: E731
    contrast = _Contrast(heads, output) if posterior.method.link == "probit" else None
    if bridges:
        f, spread = jacobians.spread(x, posterior.covariance)
    else:
        f, spread = jacobians.variance(x, posterior.covariance, contrast)
    moved = posterior.moved
    if moved is not None:
        f = f + jacobians.along(x, moved.unsqueeze(1))[1][:, 0]
    variances = split(spread.diagonal(dim1=-2, dim2=-1) if bridges else spread)
    found, start = [], 0
    for head, value, variance in zip(heads, split(f), variances, strict=True):
        size, covariance = value[0, 0].numel(), None
        if bridges and _several(head):
            own = slice(start, start + size)
            sites = (value.shape[2], size // value.shape[2])
            block = spread[..., own, own].unflatten(-1, sites).unflatten(-3, sites)
            at_site = block.diagonal(dim1=3, dim2=5).movedim(-1, 2)  # [K, B, sites, C, C]
            covariance = at_site.unflatten(2, value.shape[3:] or (1,))
            covariance = covariance if value.ndim > 3 else covariance.squeeze(2)
        found.append(_Logits(value, variance, covariance))
        start += size
    return found


@dataclass(frozen=True)
class _Contrast:
    """Outputs [..., O, n] with `against_others` of every head that has several logits; in place."""

    heads: tuple[Likelihood, ...]
    output: Any

    def __call__(self, rows: Tensor) -> Tensor:
        start = 0
        for head, shape in zip(self.heads, output_shapes(self.output), strict=True):
            size = math.prod(shape)
            if _several(head):
                against_others(rows[..., start : start + size, :], shape[0])
            start += size
        return rows


def _several(head: Likelihood) -> bool:
    """A logit for each class, and not one alone."""
    return head.classifies and not isinstance(head, Bernoulli)


def _joined(pieces: list[_Logits]) -> _Logits:
    """Consecutive rows as one."""
    f = torch.cat([piece.f for piece in pieces], 1)
    variance = torch.cat([piece.variance for piece in pieces], 1)
    covariances = [piece.covariance for piece in pieces if piece.covariance is not None]
    return _Logits(f, variance, torch.cat(covariances, 1) if covariances else None)


def _as_heads(outputs: Any, count: int) -> tuple[Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, tuple) else (outputs,) * count


def _form(likelihood: Likelihood, logits: _Logits, theta: Params, link: str) -> Form:
    f, variance, covariance = logits
    if covariance is not None:
        covariance = likelihood.location_variance(covariance, 1)
    if not likelihood.classifies:
        return build(f, likelihood, theta, variance, None, 0, 1)
    f, variance = likelihood.location(f, 1), likelihood.location_variance(variance, 1)
    likelihood = likelihood.plain()
    if link == "probit" and _several(likelihood):
        f = f - f.mean(2, keepdim=True)
    if link in ("probit", "probit-marginal"):
        return Averaged(likelihood, probit(f, variance))
    if covariance is None:
        alpha = binary_bridge(f, variance)
    else:  # classes go last, and back
        alpha = bridge(f.movedim(2, -1), covariance)
    return Dirichlets(likelihood, _held(alpha.movedim(-1, 2), f.dtype))


def _held(alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """α [K, N, C, ...] in a precision that may not reach so far: a belief as narrow as that is no
    wider, and has the same mean, where all its α are smaller."""
    kind = torch.finfo(dtype)
    least = kind.max**0.75 / alpha.amax(2, keepdim=True)
    return (alpha * least.clamp_max(1.0)).clamp_min(kind.tiny).to(dtype)
