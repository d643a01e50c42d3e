"""Who is fitted, to what, and with which settings: M = runs × members rows of one stack.

Everything about a row (its seed, its member, its run, its share of the data, its hyper-parameters,
its prior) is here; what is computed with it is in `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from doxa.data import Data, NoData
from doxa.engine import Engine
from doxa.errors import MethodError
from doxa.likelihoods import Likelihood
from doxa.linalg.layout import Layout, Params
from doxa.model import Model
from doxa.model.problem import Problem
from doxa.noise import Noise
from doxa.optim import Adam, Optimizer
from doxa.priors import BoundPrior

if TYPE_CHECKING:
    from doxa.method.method import Method

T = TypeVar("T")
Number = float | Tensor  # a float where all members share it, else [M, 1]


@dataclass(frozen=True)
class FitSettings:
    """What `fit` was asked about the optimisation."""

    steps: int = 1
    rate: float = 1e-2
    batch_size: int = 1
    epoch_steps: int = 1
    optimizer: Optimizer = field(default_factory=Adam)
    fresh: bool = True  # weights start anew for each member, else as the network was given
    begin: Tensor | None = None  # where each member's weights start instead, [M, P]


@dataclass(frozen=True, eq=False)
class Members:
    """The rows of a fit, one for each run and member. It never changes."""

    problem: Problem
    likelihood: Likelihood
    data: Data | NoData
    engine: Engine
    members: Sequence[int]  # member id of each row
    run_of: Sequence[int]  # run of each row
    split_of: Sequence[int]  # which of the data's splits each row is fitted to
    seeds: Sequence[int]  # seed of each row
    n: Tensor  # [M], the sum of weights
    prior: BoundPrior
    initial: Tensor  # [M, P]
    hyper: Mapping[str, Tensor] = field(default_factory=dict)  # {field: [M]}, where runs differ
    constants: Params = field(default_factory=dict)  # fixed likelihood parameters, [M, ...]
    settings: FitSettings = field(default_factory=FitSettings)
    inputs: Any = None  # the shape of one row of x
    output: Any = ()  # the shape of f at a row
    likelihoods: Sequence[Likelihood] = ()  # of each run, where they differ
    particle_of: Sequence[str] = ()  # which particle of its member each row is
    size: int = field(init=False)  # M
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)
    layout: Layout = field(init=False)  # how weights lie in a flat row
    starts: list[tuple[int, object]] = field(init=False)  # (seed, who): initial values' arguments
    keys: list[str] = field(init=False)  # the same as a name: noise and data order depend on it
    per_example: Tensor = field(init=False)  # −1/n, [M]: from an objective to the loss
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        particles = self.particle_of or [""] * len(self.members)
        who = [f"{m}{particle}" for m, particle in zip(self.members, particles, strict=True)]
        starts = list(zip(self.seeds, who, strict=True))
        vars(self).update(
            size=len(self.members), device=self.n.device, dtype=self.n.dtype,
            layout=self.problem.layout, starts=starts,
            keys=[f"{seed}/{one}" for seed, one in starts], per_example=-1.0 / self.n,
        )  # fmt: skip
        if self.problem.model is not None:
            vars(self)["net"] = self.problem.model
        if isinstance(self.data, Data):
            vars(self)["rows"] = self.data

    @cached_property
    def net(self) -> Model:
        """The network; an error where there is none."""
        return self.problem.net

    @property
    def steps(self) -> int:
        """How long `fit` was asked to optimise."""
        return self.settings.steps

    @cached_property
    def rows(self) -> Data:
        """The data set; an error where there is none."""
        raise MethodError("this method needs data, and a bare log density has none")

    @property
    def tempered(self) -> bool:
        """Whether the likelihood is weighted, by rows or by classes: it is then no density, and
        there is neither an evidence nor a bound on it."""
        return self.data.weight is not None or self.likelihood.tempered

    @cached_property
    def _same_n(self) -> float | None:
        return float(self.n[0]) if bool((self.n == self.n[0]).all()) else None

    def descent(self, grad: Tensor) -> Tensor:
        """−grad/n: the gradient of the loss, [M, ...]."""
        if self._same_n is not None:  # a number is read faster than a column
            return grad * (-1.0 / self._same_n)
        return grad * self.per_example.reshape(-1, *(1,) * (grad.ndim - 1))

    def over_n(self, value: float, name: str = "lr") -> Number:
        """A rate of the mean loss as a step on the full-data potential: value/n, or what a grid
        over `name` says in its place."""
        if name in self.hyper:
            return (self.hyper[name] / self.n).unsqueeze(1)
        if self._same_n is not None:
            return value / self._same_n
        return (value / self.n).unsqueeze(1)

    def rates(self, shape: Tensor) -> Tensor:
        """The rate of `fit` at each step, times a shape [steps]: [steps], or [steps, M, 1] where a
        grid varies it."""
        if "lr" in self.hyper:
            return shape[:, None, None] * self.hyper["lr"].to(shape.dtype)[None, :, None]
        return shape * self.settings.rate

    def field(self, method: Method, name: str) -> Tensor:
        """A hyper-parameter as [M]: the grid's values where there is a grid."""
        if name in self.hyper:
            return self.hyper[name]
        value = float(getattr(method, name))
        return torch.full((self.size,), value, device=self.device, dtype=self.dtype)

    def setting(self, method: Method, name: str) -> Number:
        """A hyper-parameter as a number, or [M, 1] where a grid varies it."""
        return self.hyper[name].unsqueeze(1) if name in self.hyper else float(getattr(method, name))

    def noise(self, purpose: str) -> Noise:
        return Noise(0, purpose, self.keys, self.device, self.dtype)

    @cached_property
    def free(self) -> Tensor | None:
        """1 for every weight that is uncertain, 0 for the others, [P]; None where all are. Learned
        noise of the likelihood counts as uncertain."""
        if not self.problem.partial:
            return None
        fixed = set(self.layout.names) - set(self.net.subset_names)
        fixed = {name for name in fixed if not name.startswith("likelihood.")}
        free = torch.ones(self.layout.size, device=self.device, dtype=self.dtype)
        free[self.layout.index(fixed).to(self.device)] = 0.0
        return free

    @cached_property
    def subset_index(self) -> Tensor:
        """Positions of the uncertain weights in the flat vector."""
        return self.layout.index(self.net.subset_names).to(self.device)

    @cached_property
    def subset_where(self) -> slice | Tensor:
        """The same as a slice where they lie together, which costs no copies."""
        spans = [self.layout.slices[name] for name in self.net.subset_names]
        start, stop = spans[0].start, spans[-1].stop
        together = stop - start == sum(span.stop - span.start for span in spans)
        return slice(start, stop) if together else self.subset_index

    @cached_property
    def subset_prior(self) -> BoundPrior:
        """The prior of the uncertain weights alone: what an evidence, or a bound on it, counts."""
        return self.prior.of(self.subset_index)

    def once(self, what: str, make: Callable[[], T]) -> T:
        """Something that a method makes of this run, made when first asked for: a function of the
        run alone, since a fit that is resumed makes it again."""
        if what not in self._derived:
            self._derived[what] = make()
        return self._derived[what]

    def part(self, rows: slice) -> Self:
        """The same run for some of its members."""
        if rows == slice(0, self.size):
            return self
        key = (rows.start, rows.stop)
        if key not in self._derived:
            own = lambda tree: {k: v[rows] for k, v in tree.items()}  # noqa: E731
            self._derived[key] = replace(
                self, members=self.members[rows], run_of=self.run_of[rows],
                split_of=self.split_of[rows], seeds=self.seeds[rows], n=self.n[rows],
                hyper=own(self.hyper), constants=own(self.constants),
                prior=self.prior[rows] if self.prior.runs else self.prior,
                initial=self.initial[rows], data=self.data.members(rows),
                particle_of=self.particle_of[rows],
            )  # fmt: skip
        return self._derived[key]

    def times(self, k: int) -> Self:
        """k particles in the place of every member: M·k rows, with numbers of their own."""
        if k not in self._derived:
            again = lambda tree: {name: v.repeat_interleave(k, 0) for name, v in tree.items()}  # noqa: E731
            each = torch.arange(self.size).repeat_interleave(k)
            many = lambda values: [values[m] for m in each.tolist()]  # noqa: E731
            before = self.particle_of or [""] * self.size
            wide = replace(
                self, members=many(self.members), run_of=many(self.run_of),
                split_of=many(self.split_of), seeds=many(self.seeds),
                n=self.n.repeat_interleave(k, 0), hyper=again(self.hyper),
                constants=again(self.constants), data=self.data.members(each),
                prior=self.prior[each] if self.prior.runs else self.prior,
                initial=self.initial.repeat_interleave(k, 0),
                particle_of=[f"{own}/{j}" for own in before for j in range(k)],
            )  # fmt: skip
            self._derived[k] = wide
        return self._derived[k]
