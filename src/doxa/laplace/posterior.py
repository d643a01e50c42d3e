"""The Laplace posterior: a Gaussian at the maximum, with linearised or sampled predictions.

    f(x; θ* + δ) ≈ f(x; θ*) + J(x) δ,    δ ~ N(0, Σ)    ⇒    f(x) ~ N(f(x; θ*), J Σ Jᵀ)

The Gauss–Newton curvature is that of the linearised network, so the linearised predictive is the
consistent one (Khan et al. 2019; Immer, Korzepa & Bauer 2021). With Gaussian noise it is a closed
form. Otherwise whole functions f + Jδ are drawn, from which class probabilities are computed
(`predictive/classes.py`), or class probabilities are approximated in closed form, by a link.

Links: class probabilities from Gaussian logits f ~ N(m, S), without draws.

probit: E σ(f) ≈ σ(m / √(1 + π v/8)) for one logit of variance v (MacKay 1992). With several
classes, probabilities depend only on differences between logits, so each logit is compared with the
mean of the others, d_c = f_c − Σ_{k≠c} f_k/(C − 1):

    softmax_c of (1 − 1/C) E d_c / √(1 + π Var d_c/8)

which is MacKay's form for two classes. It gives only averaged probabilities, without a split of the
uncertainty.

probit-marginal: the softmax of m_c / √(1 + π S_cc/8), as in Daxberger et al. (2021) and in
laplace-torch. S_cc includes the variance of the part that is common to all logits, on which no
probability depends. Under a wide prior this part is most of the variance.

bridge: the Dirichlet whose density over logits has its mode at m and the curvature 1/S_cc there
(Laplace bridge; MacKay 1998, Hobbhahn et al. 2022),

    α_c = (1 − 2/C + e^{m_c} Σ_k e^{−m_k} / C²) / S_cc

Only logits that sum to zero have such a density, so that f is first conditioned on its sum:

    m ← m − S1 (1ᵀm)/(1ᵀS1),    S ← S − S11ᵀS/(1ᵀS1)

One logit f is the pair ∓f/2, and a Beta with α = (1 + e^{±m})/v. Its mean is exactly σ(m): with two
classes, the bridge gives a distribution of probabilities, but its mean is the prediction of θ*
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import rows_of
from doxa.errors import MethodError, StoreError
from doxa.laplace.curvature import Jacobians, output_shapes, unflatten_outputs
from doxa.laplace.kronecker import Factored
from doxa.likelihoods import Heads, Likelihood
from doxa.linalg import Kronecker
from doxa.linalg.layout import Params
from doxa.posterior import FunctionDraws, GaussianPosterior, register_posterior
from doxa.predictive import Predictive, classes
from doxa.predictive.classes import Averaged, Dirichlets
from doxa.predictive.form import Form, HeadsForm, moments
from doxa.predictive.mixture import build

if TYPE_CHECKING:
    from doxa.laplace.laplace import Laplace


DRAWN_LINKS = ("log-odds", "samples")  # links that draw functions; for every likelihood

_TINY = 1e-12  # smallest variance
_MOST = 600.0  # largest argument of an exponential


def check_link(link: str, likelihood: Likelihood) -> None:
    """Raise where a closed-form link is used without classes: no head has classes, or some head
    has neither classes nor a closed form."""
    if link in DRAWN_LINKS:
        return
    heads = likelihood.likelihoods if isinstance(likelihood, Heads) else (likelihood,)
    open_ = [head.name for head in heads if not (head.classifies or head.integrates_normal)]
    if open_ or not any(head.classifies for head in heads):
        named = ", ".join(open_ or [head.name for head in heads])
        raise MethodError(
            f"link={link!r} gives class probabilities, but a {named} likelihood has none: "
            "use link='samples'"
        )


def against_others(rows: Tensor, classes: int) -> Tensor:
    """Each class minus the mean of the others, for [..., C·site, n], in place."""
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
    """α of 0 and 1, on a new last axis, from one logit and its variance."""
    m = f.double()
    odds = torch.stack([-m, m], -1).clamp_max(_MOST).exp()
    return (1.0 + odds) / variance.double().clamp_min(_TINY)[..., None]


def marked() -> dict[str, str]:
    """The saved marker that identifies the meaning of "probit" in this posterior."""
    return {"probit": "against-others"}


def link_as_saved(method: Laplace, extra: dict[str, Any]) -> Laplace:
    """The method with its saved link; in older artefacts, "probit" means "probit-marginal"."""
    old = method.link == "probit" and "probit" not in extra
    return replace(method, link="probit-marginal") if old else method


class _Logits(NamedTuple):
    """One head at some rows: f and its variances [K, B, *output], and the covariance over classes
    [K, B, *site, C, C] where the link needs it."""

    f: Tensor
    variance: Tensor
    covariance: Tensor | None


def predict_link(
    posterior: LaplacePosterior, jacobians: Jacobians, x: Any, theta: Params
) -> Predictive:
    """The closed form of each head; heads with Gaussian noise have the Gaussian one."""
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
    """The logits of every head at some rows."""
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
    """Applies `against_others` to outputs [..., O, n], for every head with several logits, in
    place."""

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
    """Whether the head has one logit per class, rather than a single logit."""
    return head.classifies and not head.binary


def _joined(pieces: list[_Logits]) -> _Logits:
    """Concatenate consecutive blocks of rows."""
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
    """α [K, N, C, ...] in a dtype of smaller range. Where α overflows, all α of the row are scaled
    down: the Dirichlet keeps its mean, and is still extremely narrow."""
    kind = torch.finfo(dtype)
    least = kind.max**0.75 / alpha.amax(2, keepdim=True)
    return (alpha * least.clamp_max(1.0)).clamp_min(kind.tiny).to(dtype)


Drawn = tuple[Any, Any]  # functions, and the means of the Gaussians from which they are drawn


@register_posterior
class LaplacePosterior(GaussianPosterior):
    """A `GaussianPosterior` with linearised predictions, unless predictive="sampled".

    at: θ*, where the network is linearised, [K, P], if it differs from the mean.
    """

    kind = "laplace"

    def __init__(self, *args: Any, at: Tensor | None = None, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.at = at

    def check_restored(self) -> None:
        super().check_restored()
        if not (isinstance(self.method.predictive, str) and isinstance(self.method.link, str)):
            raise StoreError("the method is not a Laplace approximation")
        if self.at is not None:
            self._check_tensor("at", self.at, tuple(self.mean.shape))
        state = self.covariance.state()
        for i, entry in enumerate(self.subset.entries):  # of a Kronecker block both factors, or one
            left = state.get(f"{i}.left")
            both = left is not None and f"{i}.right" in state
            if left is not None and both and left.shape[-1] != entry.shape[0]:
                raise StoreError(f"a factor of {list(left.shape)} for {entry.name}, {entry.shape}")

    @property
    def maximum(self) -> Tensor:
        """θ*, [K, P]."""
        return self.mean if self.at is None else self.at

    def point(self) -> Tensor:
        return self.maximum

    @property
    def moved(self) -> Tensor | None:
        """The mean minus θ*, over the uncertain weights, [K, p]; None where both are equal."""
        if self.at is None:
            return None
        return self.subset.flatten(self.layout.unflatten(self.mean - self.at))

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | ({} if self.at is None else {"at": self.at})

    @property
    def linearised(self) -> bool:
        return bool(self.method.predictive == "linearised")

    def extra(self) -> dict[str, Any]:
        return super().extra() | marked()

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GaussianPosterior:
        method = link_as_saved(common["method"], extra)
        own = {"method": method} | ({"at": tensors["at"]} if "at" in tensors else {})
        return super().restore(common | own, tensors, extra)

    def _predict_constant_noise(
        self, x: Any, n: int | None, seed: int | None, keep: str
    ) -> Predictive:
        """Predict; with Gaussian noise the linearised predictive is a closed form without
        samples."""
        if not self.linearised:
            return super()._predict_constant_noise(x, n, seed, keep)
        seed = self.sampling(n, seed, keep)
        x = self.check_inputs(x)
        jacobians = self.jacobians()
        if self.likelihood.integrates_normal:
            pieces = [self._marginal(jacobians, x, r) for r in jacobians.chunks(rows_of(x, "x"))]
            f, variance = (torch.cat(part, 1) for part in zip(*pieces, strict=True))
            output = self.network.output
            return Predictive(
                unflatten_outputs(f, output), self.likelihood, self._member_theta(),
                f_variance=unflatten_outputs(variance, output),
            )  # fmt: skip
        if self.method.link not in DRAWN_LINKS:
            return predict_link(self, jacobians, x, self._member_theta())
        counts = self._split(n)
        theta = self._theta_of(counts)
        if keep == "moments":
            parts = []
            for drawn in self._function_chunks(jacobians, x, counts, seed):
                parts.append(Predictive.of(moments(self._form(drawn, theta, counts))))
            return parts[0] if len(parts) == 1 else Predictive.concat(parts)
        drawn = self._functions(jacobians, x, counts, seed)
        return Predictive.of(self._form(drawn, theta, counts))

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Whole functions f + Jδ (or the network at drawn weights), [n, N, ...], in units of y."""
        seed = self.sampling(n, seed, "samples")
        if not self.linearised:
            return super()._draw_functions(x, n, seed)
        x = self.check_inputs(x)
        f, _ = self._functions(self.jacobians(), x, self._split(n), seed)
        location: Tensor = self.likelihood.location(f, 1)
        return location

    def jacobians(self) -> Jacobians:
        """The Jacobians of the network at the maximum, of the uncertain weights."""
        kind = Factored if isinstance(self.covariance, Kronecker) else Jacobians
        return kind(self.network, self.maximum, self.network.subset_names, self.buffers)

    def _marginal(self, jacobians: Jacobians, x: Any, rows: slice) -> tuple[Tensor, Tensor]:
        return jacobians.variance(tree_map(lambda t: t[rows], x), self.covariance)

    def _form(self, drawn: Drawn, theta: Params, counts: list[int]) -> Form:
        f, centres = drawn
        form = build(f, self.likelihood, theta, None, None, 0, 1)
        if self.method.link == "samples":
            return form
        return classes.averaged(form, self.likelihood, centres, counts)

    def _functions(self, jacobians: Jacobians, x: Any, counts: list[int], seed: int) -> Drawn:
        """Functions [S, N, ...], and the means of their Gaussians, [K, N, ...]."""
        self._check_memory(sum(counts), rows_of(x, "x"))
        pieces = self._function_chunks(jacobians, x, counts, seed)
        f, centres = tree_map(lambda *parts: torch.cat(parts, 1), *pieces)
        return f, centres

    def _function_chunks(
        self, jacobians: Jacobians, x: Any, counts: list[int], seed: int
    ) -> Iterator[Drawn]:
        """The same in blocks of rows: f + Jδ for every draw, and for the mean."""
        delta, moved = self._deltas(counts, seed), self.moved
        for rows in jacobians.chunks_along(rows_of(x, "x"), delta.shape[1]):
            f, away = jacobians.along(tree_map(lambda t, r=rows: t[r], x), delta)
            drawn = away + f.unsqueeze(1)  # [K, S, B, O]
            own = [drawn[k, :count] for k, count in enumerate(counts)]
            centre = f if moved is None else drawn[:, -1]
            yield tuple(unflatten_outputs(t, self.network.output) for t in (torch.cat(own), centre))

    def _deltas(self, counts: list[int], seed: int) -> Tensor:
        """Draws of θ − θ*, [K, S, p], the same as in `draw`; where their mean is not zero, it is
        appended."""
        keys = [f"{k}/{j}" for k in self.ids for j in range(max(counts))]
        away, moved = self.draw_deviations(self.covariance, keys, seed), self.moved
        if moved is None:
            return away
        return torch.cat([away, torch.zeros_like(away[:, :1])], 1) + moved.unsqueeze(1)

    def _member_theta(self) -> Params:
        return self._theta(FunctionDraws(self.layout.unflatten(self.mean), self.members))

    def _theta_of(self, counts: list[int]) -> Params:
        repeats = torch.tensor(counts, device=self.device)
        return {k: v.repeat_interleave(repeats, 0) for k, v in self._member_theta().items()}
