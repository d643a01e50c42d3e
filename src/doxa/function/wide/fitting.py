"""Shared by NNGP and NTK: the architecture, its scales by evidence, and classes as numbers.

Hyper-parameters are log σ_w and log σ_b, the same in all layers, and the noise. They maximise the
evidence log N(y; 0, K + σ²I), with Θ in place of K for NTK, times N(·, 1) priors on these
logarithms: such kernels can fit any noise, and with the evidence alone the fitted noise may be 0.
Classes are regression targets: one-hot rows minus 1/C, or ±1 for two classes with one output (Lee
et al. 2018). The resulting functions, divided by a temperature, are logits: see `posterior.py`.

`ProcessPrior` is the Gaussian-process prior over functions of a run: a kernel, the initial values
of its scales, and its evidence. `Analytic` is the kernel of an architecture at infinite width. Its
scales are log σ_w and log σ_b.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from doxa.data import Batch
from doxa.errors import DataError, MethodError
from doxa.exact.targets import event_of, given_noise
from doxa.function.evidence import Problem, Solved, quasi_newton
from doxa.function.gp import announce, exact_bytes
from doxa.function.process import shared_level
from doxa.function.wide import layers
from doxa.function.wide.architecture import Architecture, WideFunction
from doxa.function.wide.posterior import WidePosterior, as_numbers, outputs_of, spread_of
from doxa.function.wide.reading import read
from doxa.likelihoods import Likelihood
from doxa.method import Method, Run, Stage, State
from doxa.method.method import Workload, flag, one_of, plain, positive, whole
from doxa.posterior import Posterior, Status

_SKETCH = 500  # rows that are fitted first if there are many
_NOISE, _LEAST = 0.3, 1e-3  # where learned noise starts, and ends: shares of y's deviation
_FAR = math.log(1e3)  # how far σ_w and σ_b go from their start


@dataclass(frozen=True)
class InfinitelyWide(Method):
    """The settings of NNGP and NTK."""

    sums_over_rows: ClassVar[bool] = False
    kind: ClassVar[str]
    posterior: ClassVar[type[WidePosterior]] = WidePosterior
    matrices: ClassVar[int] = 1  # [N, N] that a posterior holds for each member
    default_steps: ClassVar[int] = 0
    uses_rate: ClassVar[bool] = False
    needs_network: ClassVar[bool] = False
    shares: ClassVar[str] = "none"
    renamed: ClassVar[Mapping[str, str]] = {"fit_hyper": "learn_kernel"}

    depth: int = whole(2, least=1)
    activation: str = one_of(*layers.NAMED)
    net: nn.Module | Architecture | None = plain(
        None, (nn.Module, Architecture), "a network, or an Architecture"
    )
    weight_std: float = positive(1.5, per_run=True)
    bias_std: float = positive(0.3, per_run=True)
    noise: float | None = positive(None, per_run=True)
    learn_kernel: bool = flag(True)
    refine: int = whole(60, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()
        if isinstance(self.net, nn.Module):
            object.__setattr__(self, "net", read(self.net))

    def check(self) -> None:
        """Check that the fields are compatible with each other."""

    def architecture(self, network: nn.Module | None) -> Architecture:
        """The architecture of the network passed to `fit`, or of `net`, or else a fully connected
        one."""
        if network is not None and self.net is not None:
            raise MethodError(
                f"{self.name} was given two networks, by fit and as net=: pass one of them"
            )
        if network is not None:
            return read(network)
        if isinstance(self.net, Architecture):
            return self.net
        return Architecture.fully_connected(self.depth, self.activation)

    def planned_bytes(self, work: Workload) -> int:
        return exact_bytes(work.rows, self.matrices * work.members)

    def init(self, run: Run) -> State:
        self._noise(run)
        prior = self._prior(run)
        announce(max(map(len, run.rows.rows)), self.matrices * run.size, self.name, run.device)
        rows = [prior.start()]
        if self._learned(run):
            spread = spread_of(run).to(rows[0])
            rows.append((_NOISE * spread).log()[:, None].expand(-1, self._learned(run)))
        theta = torch.cat(rows, 1)
        bounds = {"low": theta - _FAR, "high": theta + _FAR}
        bounds["low"][:, rows[0].shape[1] :] += _FAR + math.log(_LEAST / _NOISE)
        if self.learn_kernel:  # other members start elsewhere: the evidence may have several maxima
            first = torch.tensor([m == 0 for m in run.members], device=run.device)
            away = run.noise("start").normal((theta.shape[1],)).double()
            theta = torch.where(first[:, None], theta, theta + 0.3 * away)
        return {"theta": theta, **bounds}

    def _seen(self, run: Run, m: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, targets as numbers and weights of one member."""
        split, weight = run.split_of[m], run.rows.weight
        x, y = run.rows.of_split(split)
        if weight is not None:
            weight = weight[run.rows.rows[split].to(weight.device)].double()
        return self._prior(run).rows(x).to(run.dtype), as_numbers(run, y), weight

    def _noise(self, run: Run) -> tuple[Likelihood, Tensor | None]:
        """The likelihood, and log σ [M, L] if it is given; for classes, in units of ±1."""
        if not run.likelihood.classifies:
            likelihood, given = given_noise(run, self)
            return likelihood, None if given is None else shared_level(given)
        if self.noise is None and "noise" not in run.hyper:
            return run.likelihood, None
        return run.likelihood, run.field(self, "noise").double().log().unsqueeze(1)

    def _learned(self, run: Run) -> int:
        """The number of learned noise levels."""
        likelihood, given = self._noise(run)
        if given is not None:
            return 0
        return math.prod(event_of(run)) if likelihood.per_output else 1

    def process_prior(self, run: Run) -> ProcessPrior:
        """The kernel that is fitted."""
        return Analytic(self, run)

    def _prior(self, run: Run) -> ProcessPrior:
        return run.once("process_prior", lambda: self.process_prior(run))

    def reads_inputs(self, run: Run) -> bool:
        return True

    def stages(self, run: Run) -> Iterable[Stage]:
        if not self.learn_kernel:
            return
        rows = max(map(len, run.rows.rows))

        def problem_of(run: Run, batch: Batch) -> Problem:
            return self._prior(run).problem(batch, self._noise(run)[1])

        if self.refine and rows >= 2 * _SKETCH:
            sketch = quasi_newton(problem_of, self.refine, "sketch", _SKETCH)
            yield replace(sketch, product=float(_SKETCH) ** 3)
        if self.refine and rows <= 4 * _SKETCH:
            yield replace(quasi_newton(problem_of, self.refine, "refine"), product=float(rows) ** 3)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        likelihood, given = self._noise(run)
        x, y, weight = self._seen(run, 0)
        event = outputs_of(run)
        prior, theta = self._prior(run), state["theta"]
        scales = theta[:, : theta.shape[1] - self._learned(run)]
        log_noise = theta[:, scales.shape[1] :] if given is None else given
        own = (
            event
            if (given is not None and not likelihood.classifies)
            else event[: log_noise.shape[1] > 1]
        )
        posterior = prior.posterior(
            **run.common(self) | {"likelihood": likelihood}, kernel=prior.function,
            hyper=prior.hyper(scales.double()),
            log_noise=log_noise.expand(-1, math.prod(own)).reshape(run.size, *own),
            x=x, y=y, weight=weight, event=event, **self.settled(run), **prior.settled(scales),
        )  # fmt: skip
        posterior.record.diagnostics["kernel"] = posterior.kernel.named(posterior.hyper)
        if "ascent.grad" in state:
            posterior.record.status = self._status(run, state)
        return posterior

    def _status(self, run: Run, state: State) -> Status:
        theta = state["theta"]
        at_end = (theta <= state["low"]) | (theta >= state["high"])
        slope = state["ascent.grad"].masked_fill(at_end, 0.0).abs().amax(1) / run.n
        if float(slope.max()) > 1e-3:
            reason = (
                f"the evidence still rises (slope {float(slope.max()):.2g} per row): raise refine"
            )
            return Status("not-converged", reason)
        learned = self._learned(run)
        if learned and bool(at_end[:, -learned:].any()):
            reason = (
                "the learned noise fell to a thousandth of the targets' deviation: they have none, "
                "or rows repeat each other; give noise="
            )
            return Status("degenerate", reason)
        return Status()

    def settled(self, run: Run) -> dict[str, Tensor]:
        """Further arguments of the posterior."""
        return {}


class Scales(Problem):
    """The evidence with a prior on θ: log σ_w, log σ_b and log σ in fitted units, around 1.5, 0.3
    and 1."""

    def value(self, theta: Tensor, solved: Solved) -> Tensor:
        return super().value(theta, solved) - 0.5 * self._away(theta).square().sum(-1)

    def gradient(self, theta: Tensor, solved: Solved) -> Tensor:
        return super().gradient(theta, solved) - self._away(theta)

    def _away(self, theta: Tensor) -> Tensor:
        centre = torch.zeros_like(theta)
        centre[..., 0], centre[..., 1] = math.log(1.5), math.log(0.3)
        return theta - centre


class ProcessPrior(ABC):
    """The Gaussian-process prior over functions of a run; `function` is k(hyper, a, b)."""

    function: Any

    def __init__(self, method: InfinitelyWide, run: Run) -> None:
        self.method, self.run = method, run

    @property
    def posterior(self) -> type[WidePosterior]:
        return self.method.posterior

    @abstractmethod
    def start(self) -> Tensor:
        """Initial logarithms of the scales, [M, H]; an error if the rows have the wrong shape."""

    @abstractmethod
    def problem(self, batch: Batch, log_noise: Tensor | None) -> Problem:
        """The evidence of all rows, times a prior on θ."""

    @abstractmethod
    def rows(self, x: Any, lead: int = 1) -> Tensor:
        """Inputs as vectors [..., N, D], with `lead` axes up to the rows."""

    def hyper(self, scales: Tensor) -> Tensor:
        """The argument of `function` for fitted scales [M, H]."""
        return scales

    def settled(self, scales: Tensor) -> dict[str, Any]:
        """Further arguments of the posterior."""
        return {}

    def _seen(self, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
        """Targets as numbers, weights, and their sum."""
        y = as_numbers(self.run, batch.y, 1 if batch.shared else 2)
        weight = None if batch.weight is None else batch.weight.double()
        return y, weight, self.run.n.double()


class Analytic(ProcessPrior):
    """The prior of an architecture at infinite width."""

    def __init__(self, method: InfinitelyWide, run: Run) -> None:
        super().__init__(method, run)
        if not isinstance(run.rows.x, Tensor):
            raise DataError(f"{method.name} needs x as one array")
        network = None if run.problem.model is None else run.net.net
        shape = tuple(run.rows.x.shape[1:])
        self.function = WideFunction(method.architecture(network), shape, method.kind)

    def start(self) -> Tensor:
        one = self.rows(self.run.rows.x[:1].double())
        self.function(one.new_zeros(2), one, one)
        names = ("weight_std", "bias_std")
        return torch.stack([self.run.field(self.method, n).double().log() for n in names], 1)

    def problem(self, batch: Batch, log_noise: Tensor | None) -> Problem:
        x = self.rows(batch.x, 1 if batch.shared else 2).double()
        return Scales(self.function, x, *self._seen(batch), log_noise)

    def rows(self, x: Tensor, lead: int = 1) -> Tensor:
        return x.unsqueeze(-1) if x.ndim == lead else x.flatten(lead)
