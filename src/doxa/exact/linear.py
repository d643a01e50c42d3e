"""Bayesian linear regression on features: everything in closed form.

    y = Φw + ε,  w ~ N(0, s²I),  ε ~ N(0, σ²I)
    Σ⁻¹ = ΦᵀΦ/σ² + I/s²,    μ = ΣΦᵀy/σ²
    y* ~ N(φ*ᵀμ, σ² + φ*ᵀΣφ*),    p(y) = N(y; 0, σ²I + s²ΦΦᵀ)

Bishop (2006), ch. 3; MacKay (1992). The data are read twice. The first pass sums ΦᵀΦ and Φᵀy, which
give the least-squares solution. The second pass sums the residuals of y, so that a small noise
keeps its digits. The rest is linear algebra with F × F matrices. All runs are computed at once, in
float64 for data of any type.

Without a network, the features are the inputs or a basis of them. With a network, they are the
inputs of its last layer. The weights of the layers before it are drawn from the seed; with
init="given" they are those of the given network. If the noise or the scale of the prior is not
given, it is found by maximising the evidence. The posterior is exact if its assumptions hold: a
function that is linear in w, and Gaussian noise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.errors import MethodError
from doxa.exact import evidence
from doxa.exact.evidence import Spectrum, Statistics
from doxa.exact.features import MOST_MONOMIALS, Basis, network_features, random_features
from doxa.exact.linear_posterior import LinearPosterior
from doxa.exact.targets import check_gaussian, event_of, given_noise
from doxa.linalg.layout import Params
from doxa.method import Clock, Info, Method, Run, Stage, State
from doxa.method.method import Workload, flag, one_of, positive, require, whole
from doxa.method.row_sums import added
from doxa.posterior import Posterior, Status

_SUMS = ("cross", "square")
_FEWEST = 12  # with fewer rows, the noise by evidence is too uncertain for the status "ok"
_MATRICES = 5  # number of matrices [F, F] at the peak of a fit, as measured

log = logging.getLogger("doxa")


@store.register("linear")
@dataclass(frozen=True)
class BayesianLinear(Method):
    """Exact Bayesian linear regression.

    Parameters
    ----------
    features : str or Callable[[object], Tensor] or None
        "polynomial", "rbf", "fourier", or a function from x [N, ...] to [N, F]. None: the inputs,
        or the last hidden layer of a network.
    degree : int
        The degree of the polynomial. A grid over it compares models of different degree.
    count : int
        The number of centres or frequencies.
    lengthscale : float
        The lengthscale of the radial basis functions or frequencies, in units of fitted x.
    intercept : bool
        Add a feature that is always 1, under the same prior.
    prior_std : float or None
        The prior standard deviation of the weights. None: found by evidence with tune="evidence",
        else 1.
    noise : float or None
        The noise standard deviation in units of y. None: that of the likelihood if it is fixed,
        else fitted.
    tune : str or None
        How `prior_std` and `noise` are found: "evidence" (type-II maximum likelihood) or "ml"
        (σ² = RSS/n). None: nothing is fitted, and `noise` must be given.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(-1, 1, 20).double()[:, None]
    >>> posterior = doxa.fit(None, (x, 2 * x + 1), doxa.BayesianLinear(noise=0.1, prior_std=1.0))
    >>> posterior.predict(x[:1]).mean.round(decimals=1).tolist()
    [[-1.0]]
    """

    name: ClassVar[str] = "linear"
    streams: ClassVar[Literal["batches", "passes"] | None] = "passes"
    shares: ClassVar[str] = "rows"
    renamed: ClassVar[Mapping[str, str]] = {"fit_by": "tune"}
    default_batch: ClassVar[int] = 4096
    needs_network: ClassVar[bool] = False
    uses_rate: ClassVar[bool] = False
    regression_only: ClassVar[bool] = True
    smaller: ClassVar[str] = "use fewer features, or fewer runs at a time"

    features: str | Callable[[Any], Tensor] | None = one_of(
        None, "polynomial", "rbf", "fourier", or_a=Callable, called="a function"
    )
    degree: int = whole(3, least=0, per_run=True)
    count: int = whole(50, least=1)
    lengthscale: float = positive(1.0, per_run=True)
    intercept: bool = flag(True)
    prior_std: float | None = positive(None, per_run=True)
    noise: float | None = positive(None, per_run=True)
    tune: str | None = one_of("evidence", "ml", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.degree == 0 and self.features == "polynomial" and not self.intercept:
            raise MethodError("a polynomial of degree 0 without intercept has no features")

    def planned_bytes(self, work: Workload) -> int:
        """The peak memory of a fit. Features from a function are counted in `init`, after its first
        call."""
        size = work.features or work.columns
        if work.features == 0 and self.features == "polynomial":
            size = min(math.comb(work.columns + self.degree, self.degree), MOST_MONOMIALS)
        elif work.features == 0 and isinstance(self.features, str):
            size = self.count
        kept = work.members * work.weights * work.itemsize
        return kept + self._matrices(work.members, size + self.intercept)

    def _matrices(self, members: int, size: int) -> int:
        """The bytes of ΦᵀΦ, of its eigenvectors and of the workspace, for `size` features."""
        return _MATRICES * 8 * members * size**2

    @property
    def row_work(self) -> int | None:
        """The square of the number of features, where they are random."""
        return self.count**2 if self.features in ("rbf", "fourier") else None

    def init(self, run: Run) -> State:
        check_gaussian(run, self.name)
        if run.problem.model is not None and self.features is not None:
            raise MethodError("features and a network were both given: give one of them")
        if run.problem.model is not None:
            _say_network(run)
        fixed = {"features", "count", "intercept", "tune"} & set(run.hyper)
        if fixed or ("degree" in run.hyper and self.features != "polynomial"):
            raise MethodError(
                f"a grid over {sorted(fixed) or 'degree'} would make runs of different shapes; a "
                "polynomial's degree, lengthscale, prior_std and noise can be stacked"
            )
        state = self._drawn(run)
        size = self._size(run, state)
        require(
            self._matrices(run.size, size), run.device,
            f"{self.name} with {size:,} features of {run.size} member(s)", self.smaller,
        )  # fmt: skip
        outputs = run.rows.y[0].numel()
        zeros = lambda *shape: torch.zeros(  # noqa: E731
            run.size, *shape, device=run.device, dtype=torch.float64
        )
        return state | {
            "gram": zeros(size, size), "cross": zeros(size, outputs), "square": zeros(outputs),
            "origin": zeros(size, outputs), "log_noise": zeros(outputs), "log_std": zeros(),
        }  # fmt: skip

    def _drawn(self, run: Run) -> State:
        """The tensors that the features need besides x: centres, frequencies, or weights."""
        lengthscale = run.field(self, "lengthscale")
        tensors = random_features(self._basis(run), run, self.count, lengthscale)
        state = {f"features.{name}": value for name, value in tensors.items()}
        return state if run.problem.model is None else state | {"theta": run.start()}

    def _size(self, run: Run, state: State) -> int:
        """The number of features."""
        x, _ = run.rows.take(run.rows.rows[0][:1], torch.tensor(0))
        return self._phi(run, state, self._basis(run), x, 0).shape[-1]

    def reads_inputs(self, run: Run) -> bool:
        return True

    def stages(self, run: Run) -> Iterable[Stage]:
        size = self._size(run, self._drawn(run))
        made = partial(Stage, steps=0, capturable=False)
        product = run.size * size**2 * max(size, run.settings.batch_size)
        yield made("statistics", self._add, source="pass", enter=self._start, product=product)
        yield made("residuals", self._add_rest, source="pass", enter=self._centre, product=product)
        yield made(
            "evidence", self._add_rest, source="all", enter=self._settle,
            product=run.size * size**3,
        )  # fmt: skip

    def _basis(self, run: Run) -> Basis:
        kind = self.features if isinstance(self.features, str) else "inputs"
        if run.problem.model is not None or callable(self.features):
            kind = "function"
        degree = int(run.hyper["degree"].max()) if "degree" in run.hyper else self.degree
        return Basis(kind, degree, self.intercept)

    def _phi(self, run: Run, state: State, basis: Basis, x: Any, lead: int) -> Tensor:
        if run.problem.model is not None:
            return network_features(basis, run.net, state["theta"], x, lead)
        function = self.features if callable(self.features) else None
        return basis(x, feature_tensors(state), function, lead)

    def _start(self, run: Run, state: State) -> State:
        """Set the sums about 0 to their values before any row."""
        return state | {k: torch.zeros_like(state[k]) for k in ("gram", *_SUMS, "origin")}

    def _centre(self, run: Run, state: State) -> State:
        """Compute the least-squares solution w₀, and set the sums about Φw₀ to their values before
        any row."""
        data = Spectrum.of(self._statistics(run, state), run.dtype)
        origin = {"origin": data.vectors @ data.best}
        return state | origin | {k: torch.zeros_like(state[k]) for k in _SUMS}

    def _add(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """Add ΦᵀΦ, Φᵀy and yᵀy of the rows of a batch. Features that are the same for all members
        are computed once."""

        def step(state: State, where: slice, rows: Batch) -> State:
            phi, weighted = self._features(run, state, rows)
            state = {**state, "gram": state["gram"] + weighted.mT @ phi}
            return self._with_rest(state, rows, phi, weighted)

        return added(run, batch, state, ("gram", *_SUMS), step), {}

    def _add_rest(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """Add Φᵀe and eᵀe of the rows of a batch, with e = y − Φw₀."""

        def step(state: State, where: slice, rows: Batch) -> State:
            return self._with_rest(state, rows, *self._features(run, state, rows))

        return added(run, batch, state, _SUMS, step), {}

    def _features(self, run: Run, state: State, batch: Batch) -> tuple[Tensor, Tensor]:
        """φ, and φ times the weights of the rows. Both are [B, F], or [M, B, F] if members
        differ."""
        phi = self._phi(run, state, self._basis(run), batch.x, 0 if batch.shared else 1)
        return phi, phi if batch.weight is None else phi * batch.weight.double()[..., None]

    def _with_rest(self, state: State, batch: Batch, phi: Tensor, weighted: Tensor) -> State:
        y = batch.y.double()
        y = y.reshape(*y.shape[: 1 if batch.shared else 2], -1)  # [(M,) B, O]
        e = y - phi @ state["origin"]
        squares = e.square() if batch.weight is None else e.square() * batch.weight[..., None]
        return {
            **state,
            "cross": state["cross"] + weighted.mT @ e,
            "square": state["square"] + squares.sum(-2),
        }

    def _settle(self, run: Run, state: State) -> State:
        """Find the noise and the scale of the prior, for all members at once."""
        likelihood, log_noise = given_noise(run, self)
        per_output = likelihood.per_output
        log_std = None
        if self.prior_std is not None or "prior_std" in run.hyper:
            log_std = run.field(self, "prior_std").double().log()
        if self.tune != "evidence" and log_std is None:
            log_std = torch.zeros_like(state["log_std"])
        if self.tune is None and log_noise is None:
            raise MethodError("tune=None fits nothing: give noise (and prior_std)")
        if log_noise is None or log_std is None:
            data = Spectrum.of(self._statistics(run, state), run.dtype)
            if self.tune == "ml" and log_noise is None:
                log_noise = evidence.by_likelihood(data, per_output)
            log_noise, log_std = evidence.by_evidence(data, log_noise, log_std, per_output)
        return {**state, "log_noise": log_noise.expand_as(state["log_noise"]), "log_std": log_std}

    def _statistics(self, run: Run, state: State) -> Statistics:
        """The sums of all runs. For a run of lower degree, the columns of the monomials that it
        lacks are set to zero, and have no effect."""
        gram, cross = state["gram"], state["cross"]
        if "degree" in run.hyper:
            keep = torch.stack([self._columns(run, state, m) for m in range(run.size)]).double()
            gram, cross = gram * keep[:, None] * keep[..., None], cross * keep[..., None]
        return Statistics(gram, cross, state["square"], run.n.double(), state["origin"])

    def _columns(self, run: Run, state: State, member: int) -> Tensor:
        """Which features the run of a member has, [F]."""
        size = state["gram"].shape[-1]
        keep = torch.ones(size, dtype=torch.bool, device=run.device)
        if "degree" in run.hyper:
            own = int(run.hyper["degree"][member])
            keep[_degree_size(run, own) : size - int(self.intercept)] = False
        return keep

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        keep = self._columns(run, state, 0)
        likelihood, _ = given_noise(run, self)
        event = event_of(run)
        learned = likelihood.noise is None
        own = () if learned and not likelihood.per_output else event
        log_noise = state["log_noise"] if own == event else state["log_noise"][:, 0]
        degree = int(run.hyper["degree"][0]) if "degree" in run.hyper else self.degree
        basis = replace(self._basis(run), degree=degree)
        posterior = LinearPosterior(
            **run.common(self) | {"likelihood": likelihood},
            basis=basis, features=feature_tensors(state),
            statistics=Statistics(
                state["gram"][:, keep][..., keep], state["cross"][:, keep], state["square"],
                run.n.double(), state["origin"][:, keep],
            ),
            log_noise=log_noise.reshape(run.size, *own).to(run.dtype),
            log_std=state["log_std"], event=event, theta=state.get("theta"),
            weighted=run.tempered,
        )  # fmt: skip
        if learned and bool(posterior.undecided.any()):
            reason = (
                "the features fit the targets exactly, so that the data cannot tell the noise from "
                "none: its variances mean nothing; give noise=, or more rows"
            )
            posterior.record.status = Status("degenerate", reason)
        elif learned and (rows := self._fewest(run)) < _FEWEST:
            reason = (
                f"the noise of {rows:.3g} rows is one estimate by their evidence, and intervals "
                f"count it as known: give noise=, use at least {_FEWEST} rows, or gp"
            )
            posterior.record.status = Status("not-evaluated", reason)
        return posterior

    def _fewest(self, run: Run) -> float:
        """The smallest effective number of rows of a member."""
        return min(run.rows.effective_rows(run.rows.rows[split]) for split in run.split_of)


def feature_tensors(state: State) -> Params:
    prefix = "features."
    return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}


def _say_network(run: Run) -> None:
    """Log that only the last layer of a given network is fitted."""
    before = [n for n in run.net.subset_names if not n.startswith(f"{run.net.head}.")]
    if before and run.settings.fresh:
        log.warning(
            "linear fits the network's last layer only; the layers before it are not trained and "
            "their weights are drawn from the seed: init='given' keeps the network's own"
        )
    elif before:
        log.info("linear fits the network's last layer; the layers before it stay as given")


def _degree_size(run: Run, degree: int) -> int:
    """The number of monomials of degree 1 to `degree` of the run's inputs."""
    from doxa.exact.features import monomials

    x = run.rows.take(run.rows.rows[0][:1])[0]
    return len(monomials(x[0].numel(), degree))
