"""`Certificate`: what was evaluated about a fit, by which rows, and what was assumed.

A certificate belongs to a saved posterior. `doxa.evaluate.Watch` compares new rows with it, so it
has intervals besides the estimates. They hold for the predictions that were evaluated:

**Coverage** of intervals (of sets, if a classifier is conformal). With k of n rows inside, the 95 %
interval is that of Clopper and Pearson (1934): the probabilities p with P(K ≥ k | p) ≥ 0.025 and
P(K ≤ k | p) ≥ 0.025. A row with several targets counts the share of its targets that are inside.
This share has a smaller variance than a row that is inside or not, so the interval is conservative.
Weighted rows count by their effective number, and the rows of a group as one.

**Low scores.** q is the ⌈0.05 n⌉-th smallest score of the rows. F(q), the probability of a lower
score, has a Beta distribution, whose quantiles are the ends of the interval of Clopper and Pearson
with one row fewer below q than there are up to q.

The JSON has a SHA-256 of its canonical form. A certificate that was changed does not load.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from doxa.data.fitted_rows import input_columns, rounded
from doxa.data.rows import effective_rows, standard_error, weighted_mean
from doxa.errors import CorruptedArtefact, DoxaError

FORMAT = 1
LOW = 0.05  # the quantile of the scores
_MOST = 20_000  # rows in a sum over a binomial; of more, the interval is that of so many rows
_TAIL = 0.025


class Estimate(NamedTuple):
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Certificate:
    """The record of the evaluation of a fit.

    Attributes
    ----------
    evaluated_by : str
        The rows that evaluated: "none", "held-out rows", "held-out parts of each member",
        "cross-fitted parts", or the name of test rows.
    rows : int
        Their number.
    effective_rows : float
        The same, less where weights differ.
    level : float
        The level of the intervals whose coverage was counted.
    coverage : Estimate or None
        The share of targets inside. None for class probabilities, which have no intervals.
    log_prob : Estimate or None
        The mean log density, in nats per row and units of y.
    gain : Estimate or None
        The same, less that of a constant prediction.
    low_score : float or None
        The 5 % quantile of the log densities of the rows.
    low_share : Estimate or None
        The share of rows below it.
    yardsticks : dict or None
        Scores of simpler models on the same rows, if the fit has them.
    assumed : str
        How rows belong together: "exchangeable", "grouped" or "ordered".
    trained_rows : int or None
        The number of rows of the fit.
    data : str
        A fingerprint of the rows of the fit; "" if they are not known.
    reference : str
        A fingerprint of the values of the inputs that new rows are compared with; "" if there are
        none.
    method, version, date : str
        The method, the version of doxa, and the date of the evaluation.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(-1, 1, 60)[:, None]
    >>> posterior = doxa.fit(None, (x, 2 * x[:, 0]), "linear")
    >>> posterior.certificate.evaluated_by
    'none'
    """

    evaluated_by: str = "none"
    rows: int = 0
    effective_rows: float = 0.0
    level: float = 0.9
    coverage: Estimate | None = None
    log_prob: Estimate | None = None
    gain: Estimate | None = None
    low_score: float | None = None
    low_share: Estimate | None = None
    yardsticks: dict[str, Any] | None = None
    assumed: str = "exchangeable"
    trained_rows: int | None = None
    data: str = ""
    reference: str = ""
    method: str = ""
    version: str = ""
    date: str = ""

    @classmethod
    def of(
        cls, by: str, scores: Mapping[str, Tensor], weight: Tensor | None = None,
        level: float = 0.9, assumed: str = "exchangeable", groups: Tensor | None = None,
    ) -> Self:  # fmt: skip
        """The certificate of rows with these scores, [N] each: `log_prob`, and `gain` and
        `coverage` where they exist. The rows of one of `groups`, [N], count as one row."""
        plain = {name: each.detach().cpu().double() for name, each in scores.items()}
        weight = None if weight is None else weight.detach().cpu().double()
        rows = len(plain["log_prob"])
        n = float(rows) if weight is None else effective_rows(weight)
        means = {name: plain[name] for name in ("log_prob", "gain") if name in plain}
        of_means = weight
        if groups is not None:  # one number for each group
            _, number, sizes = groups.cpu().unique(return_inverse=True, return_counts=True)
            weight, of_means, n = 1.0 / sizes.double()[number], None, float(len(sizes))
            means = {name: torch.bincount(number, v * weight) for name, v in means.items()}
            assumed = "grouped" if assumed == "exchangeable" else assumed
        estimates = {name: _mean(values, of_means) for name, values in means.items()}
        low, share = _low(plain["log_prob"], weight, n)
        return cls(
            by, rows, n, level,
            _share(plain["coverage"], weight, n) if "coverage" in plain else None,
            estimates["log_prob"], estimates.get("gain"), low, share, assumed=assumed,
            date=today(),
        )  # fmt: skip

    def corrected(self, optimism: float) -> Self:
        """With mean scores that are lower by `optimism`, in nats per row."""
        shifted = [
            None if estimate is None else Estimate(*(end - optimism for end in estimate))
            for estimate in (self.log_prob, self.gain)
        ]
        return replace(self, log_prob=shifted[0], gain=shifted[1])

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the SHA-256 of their canonical JSON."""
        plain: dict[str, Any] = _plain({"format": FORMAT} | asdict(self))
        return plain | {"sha256": _digest(plain)}

    @classmethod
    def from_json(cls, saved: Any) -> Self:
        """Read a saved certificate; CorruptedArtefact if it was changed after it was written."""
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise CorruptedArtefact(
                f"the certificate of the run has no format that this doxa reads ({FORMAT}): "
                "update doxa, or use another copy of the run"
            )
        plain = {name: value for name, value in saved.items() if name != "sha256"}
        if _digest(plain) != saved.get("sha256"):
            raise CorruptedArtefact(
                "the certificate of the run does not match its checksum: it was changed after it "
                "was written; use another copy of the run"
            )
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in plain.items() if name in known}
        for name in ("coverage", "log_prob", "gain", "low_share"):
            if given.get(name) is not None:
                given[name] = Estimate(*map(float, given[name]))
        return cls(**given)


def _plain(value: Any) -> Any:
    """Values of JSON; None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _canonical(plain: Mapping[str, Any]) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(plain).encode()).hexdigest()


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def doxa_version() -> str:
    """The installed version; "" if doxa is not installed."""
    try:
        return version("doxa")
    except PackageNotFoundError:
        return ""


def fingerprint(values: Tensor | None) -> str:
    """The SHA-256 of a tensor's shape and bytes; "" for None."""
    if values is None:
        return ""
    values = values.detach().cpu().contiguous()
    digest = hashlib.sha256(repr((tuple(values.shape), str(values.dtype))).encode())
    digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def input_scores(posterior: Any, x: Any, p: Any = None) -> Tensor | None:
    """The numbers of each row, [N, K], by which new inputs are compared with earlier ones: the
    columns of x. With a prediction `p`, for a reference of rows that the fit has not used, also the
    mean square of the standardised columns and the epistemic uncertainty: both are smaller at the
    rows of the fit. None if there are no such numbers."""
    columns = input_columns(x)
    parts = [] if columns is None else [columns]
    if p is not None:
        scales = posterior.scales
        if columns is not None and isinstance(scales.x_loc, Tensor):
            away = (x.detach().cpu().double() - scales.x_loc.cpu()) / scales.x_scale.cpu()
            parts.append(rounded(away.square().mean(1, keepdim=True)))
        spread = _epistemic(p)
        if spread is not None:
            parts.append(rounded(spread.reshape(len(spread), -1).mean(1, keepdim=True)))
    return torch.cat(parts, 1) if parts else None


def _epistemic(p: Any) -> Tensor | None:
    """Variance, or mutual information of classes; None if there is none, or several heads."""
    if len(p.heads) > 1:
        return None
    try:
        spread: Tensor = p.mutual_information if p.likelihood.classifies else p.epistemic
    except DoxaError:
        return None
    return spread.detach().nan_to_num()


def _mean(values: Tensor, weight: Tensor | None) -> Estimate | None:
    """The mean and its interval: 1.96 standard errors. None if it is not finite."""
    values = values.detach().cpu().double()
    mean = float(weighted_mean(values, weight))
    error = 1.959964 * standard_error(values, weight) if len(values) > 1 else math.inf
    if not (math.isfinite(mean) and math.isfinite(error)):
        return None
    return Estimate(mean, mean - error, mean + error)


def _share(inside: Tensor, weight: Tensor | None, n: float) -> Estimate:
    share = float(weighted_mean(inside.detach().cpu().double(), weight))
    share = min(1.0, max(0.0, share))  # a corrected share may be outside
    return Estimate(share, *clopper_pearson(share * n, n))


def _low(values: Tensor, weight: Tensor | None, n: float) -> tuple[float | None, Estimate | None]:
    """The `LOW` quantile of the scores, and the share of rows below it."""
    if not len(values) or not bool(torch.isfinite(values).all()):
        return None, None
    order = values.sort()
    each = torch.ones_like(values) if weight is None else weight[order.indices]
    until = each.cumsum(0) / each.sum()
    place = int(torch.searchsorted(until, torch.tensor(LOW - 1e-12, dtype=until.dtype)))
    score = float(order.values[place])
    share = float((each * (order.values < score)).sum() / each.sum())
    low, high = clopper_pearson(share * n, n)
    return score, Estimate(share, low, high)


def clopper_pearson(successes: float, trials: float) -> tuple[float, float]:
    """The 95 % interval of a probability; numbers that are not whole are rounded outwards."""
    n = max(1, math.floor(trials + 1e-9))
    shrink = min(1.0, _MOST / n)
    n = round(n * shrink)
    few = min(n, max(0, math.floor(successes * shrink + 1e-9)))
    many = min(n, max(0, math.ceil(successes * shrink - 1e-9)))
    k = torch.arange(n + 1, dtype=torch.float64)
    whole = torch.tensor(float(n), dtype=torch.float64)
    choose = torch.lgamma(whole + 1) - torch.lgamma(k + 1) - torch.lgamma(whole - k + 1)

    def tail(p: float, part: slice) -> float:
        """The probability of counts in this part."""
        log_mass = choose[part] + k[part] * math.log(p) + (n - k[part]) * math.log1p(-p)
        return float(log_mass.logsumexp(0).exp())

    low = 0.0 if few == 0 else _root(lambda p: tail(p, slice(few, None)))
    high = 1.0 if many == n else 1.0 - _root(lambda p: tail(1.0 - p, slice(None, many + 1)))
    return low, high


def _root(rising: Any) -> float:
    """p with rising(p) = `_TAIL`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rising(middle) < _TAIL else (low, middle)
    return low
