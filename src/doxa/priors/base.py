"""A prior over weights: its settings, its density, and both bound to a flat parameter vector.

A `Prior` is a frozen dataclass of settings. Its `Family` is the density of each element, centred at
0, with score and curvature in closed form. The score is the gradient of log p; the curvature is
minus its second derivative. Each prior stands below its family. The Gaussian ones are here, because
every other prior needs them: for entries that it does not name, and for parameters of a likelihood.

A `BoundPrior` has tensors with one value per element of the flat parameter vector, so that one
expression covers all tensors of all members:

    log p(w) = sum_j log p_j(w_j - m_j)

with m_j the centre of the entry: 1 for normalisation scales, else 0. The elements of a tensor
depend on each other where they share an unknown scale (`hierarchical.py`). Likelihood parameters
(entries "likelihood.*", log scales) always have the prior N(0, 1).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from doxa.errors import MethodError, ModelError
from doxa.linalg.layout import LARGE, Entry, Layout

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
Values = dict[str, Tensor]


class Family(ABC):
    """A centred density of each element.

    `exact` holds the settings in float64, [*runs, p]. The working tensors in `at` are derived from
    them, so that no precision is lost. Settings that are the same for all elements may be expanded
    tensors, which take the memory of one number; `at` then holds expanded tensors too.
    """

    widens: ClassVar[bool] = False  # whether `widening` has a closed form
    grouped: ClassVar[bool] = False  # whether it needs the tensor of each element: "group"

    def __init__(self, exact: Values, device: torch.device, dtype: torch.dtype) -> None:
        self.exact = exact
        self.constant = not self.grouped and all(v.stride(-1) == 0 for v in exact.values())
        derived = self.derive(**(_first(exact) if self.constant else exact))
        self.at = {name: v.to(device=device, dtype=dtype) for name, v in derived.items()}
        if self.constant:
            p = next(iter(exact.values())).shape[-1]
            self.at = {
                name: v.expand(*v.shape[:-1], p) if name != "norm"
                else (derived[name] * p).to(device=device, dtype=dtype)
                for name, v in self.at.items()
            }  # fmt: skip

    def some(self, index: Any, p: int) -> Values:
        """The settings of some runs, or of p elements."""
        if not self.constant:
            return {name: v[index] for name, v in self.exact.items()}
        kept = {name: v[index] for name, v in _first(self.exact).items()}
        return {name: v.expand(*v.shape[:-1], p) for name, v in kept.items()}

    @abstractmethod
    def derive(self, **exact: Tensor) -> Values:
        """Precomputed tensors of the closed forms; "norm" [*runs] is the constant."""

    @abstractmethod
    def log_prob(self, x: Tensor) -> Tensor:
        """[..., p] to [...]."""

    @abstractmethod
    def score(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def curvature(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def sample(self, n: int, generator: Generator) -> Tensor:
        """[n, *runs, p]"""

    def widening(self, x: Tensor, std: Tensor) -> Tensor:
        """E log p(x + std ε) − log p(x) for standard normal ε, [..., p] to [...]."""
        raise NotImplementedError

    def widening_score(self, x: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `widening` by x and by std."""
        raise NotImplementedError


def uniform(n: int, like: Tensor, generator: Generator) -> Tensor:
    shape = (n, *like.shape)
    draws = torch.rand(shape, generator=generator, dtype=like.dtype, device=generator.device)
    return draws.clamp_min_(torch.finfo(like.dtype).tiny).to(like.device)


def normal(n: int, like: Tensor, generator: Generator) -> Tensor:
    shape = (n, *like.shape)
    draws = torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device)
    return draws.to(like.device)


@dataclass(frozen=True)
class Prior(ABC):
    """An elementwise prior, centred at the centre of each entry. Its fields are positive."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_positive(self, vars(self))

    @property
    @abstractmethod
    def family(self) -> type[Family]:
        """The density of its elements. A class attribute, unless it depends on the settings."""

    def settings(self, entry: Entry) -> dict[str, float]:
        """The arguments of the family's `derive` for the elements of one entry: the fields."""
        return dict(vars(self))

    def bind(self, layout: Layout) -> BoundPrior:
        return bind(self, layout)


def check_positive(prior: Prior, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(prior, name)
        number = float(value) if isinstance(value, Real) else math.nan
        if not 0.0 < number < math.inf:
            raise ModelError(f"{type(prior).__name__}: {name} must be positive, got {value!r}")


class GaussianFamily(Family):
    """log p = -x^2 / (2 s^2) - log s - log(2 pi)/2"""

    widens = True

    def derive(self, *, scale: Tensor) -> Values:  # type: ignore[override]
        norm = -(scale.log() + HALF_LOG_2PI).sum(-1)
        return {"scale": scale, "minus_precision": -(scale**-2), "norm": norm}

    def __init__(self, exact: Values, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(exact, device, dtype)
        scale = exact["scale"]
        alike = scale.ndim == 1 and scale.numel() > 0
        alike = alike and (self.constant or bool((scale == scale[0]).all()))
        # Minus the precision where all elements share one: a number is faster than a vector.
        self.same = -float(scale[0] ** -2) if alike else None

    def log_prob(self, x: Tensor) -> Tensor:
        if self.same is not None:
            squares: Tensor = torch.linalg.vector_norm(x, dim=-1).square()
            return (0.5 * self.same) * squares + self.at["norm"]
        return 0.5 * (x.square() * self.at["minus_precision"]).sum(-1) + self.at["norm"]

    def score(self, x: Tensor) -> Tensor:
        return x * (self.at["minus_precision"] if self.same is None else self.same)

    def curvature(self, x: Tensor) -> Tensor:
        return (-self.at["minus_precision"]).expand(x.shape)

    def sample(self, n: int, generator: Generator) -> Tensor:
        return self.at["scale"] * normal(n, self.at["scale"], generator)

    def widening(self, x: Tensor, std: Tensor) -> Tensor:
        return self.log_prob(std) - self.at["norm"]  # −std²/2s², for any x

    def widening_score(self, x: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_zeros(()), self.score(std)


@dataclass(frozen=True)
class Normal(Prior):
    """N(centre, std^2) on every element."""

    name = "normal"
    family = GaussianFamily

    std: float = 1.0

    def settings(self, entry: Entry) -> dict[str, float]:
        return {"scale": self.std}


@dataclass(frozen=True)
class FanInNormal(Prior):
    """N(centre, scale^2 / fan_in): the input of a unit has the same variance at any width (Neal,
    1996).

    Biases and normalisation parameters have fan_in 1, hence the standard deviation `scale`.
    """

    name = "fan-in-normal"
    family = GaussianFamily

    scale: float = 1.0

    def settings(self, entry: Entry) -> dict[str, float]:
        return {"scale": self.scale / math.sqrt(entry.fan_in)}


@dataclass(frozen=True, eq=False)
class Part:
    """The elements that share a family: a slice where they are contiguous, else positions."""

    where: slice | Tensor
    loc: Tensor | None  # [p]; None where all are 0, which saves one subtraction per step
    family: Family

    def centred(self, flat: Tensor) -> Tensor:
        x = flat[..., self.where]
        return x if self.loc is None else x - self.loc


_BLOCK = 1 << 16  # elements that are computed at a time in place


def _inside(where: slice, own: slice | Tensor) -> bool:
    """Whether a slice is in the place of a part, if that is a slice."""
    if isinstance(own, Tensor):
        return False
    return own == slice(None) or (own.start <= where.start and where.stop <= own.stop)


class BoundPrior:
    """log p(w), its score, curvature and draws on flat vectors [..., P].

    A stack of R priors (`stack_bound`) has a run axis: vectors are then [..., R, P] and
    log-probabilities [..., R].
    """

    def __init__(self, parts: Sequence[Part], size: int) -> None:
        self.parts = tuple(parts)
        self.size = size
        self.runs = tuple(next(iter(parts[0].family.exact.values())).shape[:-1])  # () or (R,)
        self._order = _inverse_order(self.parts, size) if len(parts) > 1 else None
        # what steps of large networks read again: no step may copy to a device
        self._some: dict[tuple[int, int], BoundPrior] = {}  # the priors of slices
        self._ones: dict[Any, Family] = {}  # the families of one element
        self._of_runs: dict[int, BoundPrior] = {}

    @property
    def is_gaussian(self) -> bool:
        return all(isinstance(part.family, GaussianFamily) for part in self.parts)

    def __getitem__(self, rows: Any) -> BoundPrior:
        """The priors of some runs of a stack; a number gives one without a run axis."""
        if not self.runs:
            raise MethodError("this prior is not a stack: all runs share it")
        if isinstance(rows, int):
            if rows not in self._of_runs:
                self._of_runs[rows] = self._of_rows(rows)
            return self._of_runs[rows]
        return self._of_rows(rows)

    def _of_rows(self, rows: Any) -> BoundPrior:
        index = rows.cpu() if isinstance(rows, Tensor) else rows
        parts = []
        for part in self.parts:
            like = next(iter(part.family.at.values()))
            p = next(iter(part.family.exact.values())).shape[-1]
            exact = part.family.some(index, p)
            family = type(part.family)(exact, like.device, like.dtype)
            parts.append(Part(part.where, part.loc, family))
        return BoundPrior(parts, self.size)

    def of_slice(self, where: slice) -> BoundPrior:
        """The prior of contiguous elements, for flat vectors [..., p]. Without positions in memory,
        where each part is contiguous and has one value of each setting."""
        slices = [part.where for part in self.parts if isinstance(part.where, slice)]
        if len(slices) < len(self.parts) or not all(part.family.constant for part in self.parts):
            return self.of(torch.arange(where.start, where.stop))
        parts = []
        for part, own in zip(self.parts, slices, strict=True):
            begin, end, _ = own.indices(self.size)
            start, stop = max(begin, where.start), min(end, where.stop)
            if start >= stop:
                continue
            like = next(iter(part.family.at.values()))
            exact = part.family.some((..., slice(None)), stop - start)
            family = type(part.family)(exact, like.device, like.dtype)
            loc = None if part.loc is None else part.loc[start - begin : stop - begin]
            parts.append(Part(slice(start - where.start, stop - where.start), loc, family))
        return BoundPrior(parts, where.stop - where.start)

    def of(self, index: Tensor) -> BoundPrior:
        """The prior of some elements, given by their positions; for flat vectors [..., p]."""
        if len(index) == self.size and int(index[0]) == 0:  # ascending positions: all of them
            return self
        place = torch.full((self.size,), -1)
        place[index.cpu()] = torch.arange(len(index))
        parts = []
        for part in self.parts:
            places = place[part.where.cpu() if isinstance(part.where, Tensor) else part.where]
            kept = places >= 0
            if not bool(kept.any()):
                continue
            like = next(iter(part.family.at.values()))
            loc = None if part.loc is None else part.loc[kept.to(part.loc.device)]
            every = slice(None) if part.family.constant else kept
            exact = part.family.some((..., every), int(kept.sum()))
            family = type(part.family)(exact, like.device, like.dtype)
            parts.append(Part(_span(places[kept], like.device), loc, family))
        return BoundPrior(parts, len(index))

    def log_prob(self, flat: Tensor) -> Tensor:
        """[..., P] to [...], constants included."""
        total = self.parts[0].family.log_prob(self.parts[0].centred(flat))
        for part in self.parts[1:]:
            total = total + part.family.log_prob(part.centred(flat))
        return total

    def score(self, flat: Tensor) -> Tensor:
        """The gradient of `log_prob`: [..., P]."""
        return self._join([part.family.score(part.centred(flat)) for part in self.parts])

    def add_score(self, grad: Tensor, flat: Tensor) -> Tensor:
        """grad + score(flat), in one pass where all elements share a Gaussian centred at 0."""
        first = self.parts[0]
        if len(self.parts) == 1 and isinstance(first.family, GaussianFamily) and first.loc is None:
            if first.family.same is not None:
                return torch.add(grad, flat, alpha=first.family.same)
            return torch.addcmul(grad, flat, first.family.at["minus_precision"])
        return grad + self.score(flat)

    def decay(self, where: slice) -> float | None:
        """The precision of the elements of a slice, where they have Gaussians of one precision,
        centred at 0: their score is then −precision · w. Otherwise None."""
        return self.precision_in(where, centred=True)

    def precision_in(self, where: slice, centred: bool = False) -> float | None:
        """The precision of the elements of a slice, where they have Gaussians of one precision; if
        `centred`, those centred at 0. Otherwise None."""
        for part in self.parts:
            if _inside(where, part.where) and isinstance(part.family, GaussianFamily):
                same = part.family.same
                return None if same is None or (centred and part.loc is not None) else -same
        return None

    def add_score_(self, grad: Tensor, flat: Tensor, where: slice, factor: float) -> None:
        """Add the score of the elements `where`, with values `flat` [p], times a factor, to `grad`
        [p] in place."""
        decay = self.decay(where)
        if decay is not None:
            grad.add_(flat, alpha=-factor * decay)
            return
        for part in self.parts:
            if part.family.constant and not self.runs and _inside(where, part.where):
                loc = 0.0 if part.loc is None else part.loc[0]
                family = self._of_one(part, grad)
                for x, g in zip(flat.split(_BLOCK), grad.split(_BLOCK), strict=True):
                    g.add_(family.score(x - loc), alpha=factor)
                return
        if (where.start, where.stop) not in self._some:
            self._some[where.start, where.stop] = self.of(torch.arange(where.start, where.stop))
        grad.add_(self._some[where.start, where.stop].score(flat), alpha=factor)

    def _of_one(self, part: Part, like: Tensor) -> Family:
        """The family of one element of a part in which all are alike."""
        key = (id(part), like.device, like.dtype)
        if key not in self._ones:
            own = part.family.some(..., 1)
            self._ones[key] = type(part.family)(own, like.device, like.dtype)
        return self._ones[key]

    @cached_property
    def widens(self) -> bool:
        """Whether E log p under normal weights has a closed form."""
        return all(part.family.widens for part in self.parts)

    def widening(self, flat: Tensor, std: Tensor) -> Tensor:
        """E log p(flat + std ∘ ε) − log p(flat) for standard normal ε: [..., P] to [...]."""
        each = [p.family.widening(p.centred(flat), std[..., p.where]) for p in self.parts]
        return sum(each[1:], each[0])

    def widening_score(self, flat: Tensor, std: Tensor) -> tuple[Tensor | None, Tensor]:
        """The gradients of `widening` by flat (None: 0, for a Gaussian) and by std, [..., P]."""
        parts = self.parts
        each = [p.family.widening_score(p.centred(flat), std[..., p.where]) for p in parts]
        by_std = self._join([own for _, own in each])
        if self.is_gaussian:
            return None, by_std
        return self._join([own.expand_as(other) for own, other in each]), by_std

    def add_widening_score(self, grad: Tensor, flat: Tensor, std: Tensor) -> Tensor:
        """grad + the gradient of `widening` by log std, in one pass where all elements share a
        Gaussian."""
        first = self.parts[0].family
        if len(self.parts) == 1 and isinstance(first, GaussianFamily) and first.same is not None:
            return torch.addcmul(grad, std, std, value=first.same)
        return torch.addcmul(grad, self.widening_score(flat, std)[1], std)

    def curvature(self, flat: Tensor) -> Tensor:
        """Minus the second derivative of `log_prob`, elementwise: [..., P]."""
        return self._join([part.family.curvature(part.centred(flat)) for part in self.parts])

    def sample(self, n: int, generator: Generator) -> Tensor:
        """[n, P], or [n, R, P] for a stack."""
        draws = []
        for part in self.parts:
            x = part.family.sample(n, generator)
            draws.append(x if part.loc is None else x + part.loc)
        return self._join(draws)

    @property
    def mean(self) -> Tensor:
        """[P]"""
        means = []
        for part in self.parts:
            like = next(iter(part.family.at.values()))  # [*runs, p]
            zero = torch.zeros_like(like)
            means.append(zero if part.loc is None else zero + part.loc)
        return self._join(means)

    @cached_property
    def precision(self) -> Tensor | None:
        """[P] where every element is Gaussian, else None."""
        if not self.is_gaussian:
            return None
        return self._join([-part.family.at["minus_precision"] for part in self.parts])

    @cached_property
    def shared_precision(self) -> float | None:
        """The precision, where all elements have Gaussians of the same precision; else None. A
        number is faster than a vector."""
        if not self.is_gaussian:
            return None
        found = {getattr(part.family, "same", None) for part in self.parts}
        same = found.pop() if len(found) == 1 else None
        return None if same is None else -same

    def to(self, device: torch.device | str, dtype: torch.dtype) -> BoundPrior:
        device = torch.device(device)
        parts = []
        for part in self.parts:
            where = part.where if isinstance(part.where, slice) else part.where.to(device)
            loc = part.loc
            if loc is not None and part.family.constant:
                loc = loc[:1].to(device=device, dtype=dtype).expand(len(loc))
            elif loc is not None:
                loc = loc.to(device=device, dtype=dtype)
            family = type(part.family)(part.family.exact, device, dtype)
            parts.append(Part(where, loc, family))
        return BoundPrior(parts, self.size)

    def _join(self, pieces: Sequence[Tensor]) -> Tensor:
        if len(pieces) == 1:
            return pieces[0]
        joined = torch.cat(list(pieces), dim=-1)
        return joined if self._order is None else joined[..., self._order]


def stack_bound(priors: Sequence[BoundPrior]) -> BoundPrior:
    """Priors of several runs as one with a leading run axis; their families must agree."""
    if not priors:
        raise MethodError("there are no priors to stack")
    first = priors[0]
    if any(prior.runs for prior in priors):
        raise MethodError("a stack of priors cannot be stacked again")
    parts = []
    for part in first.parts:
        values = next(iter(part.family.at.values()))
        same = [_counterpart(part, prior) for prior in priors]
        exact = {
            name: torch.stack([other.family.exact[name] for other in same])
            if not all(other.family.constant for other in same)
            else torch.stack([other.family.exact[name][..., :1] for other in same]).expand(
                -1, part.family.exact[name].shape[-1]
            )
            for name in part.family.exact
        }
        family = type(part.family)(exact, values.device, values.dtype)
        parts.append(Part(part.where, part.loc, family))
    return BoundPrior(parts, first.size)


def _counterpart(part: Part, prior: BoundPrior) -> Part:
    for other in prior.parts:
        if type(other.family) is type(part.family) and _same_place(part.where, other.where):
            return other
    raise MethodError(
        "runs of one stack must have priors of the same families on the same parameters; only "
        "their scales may differ"
    )


def _span(places: Tensor, device: torch.device) -> slice | Tensor:
    """Positions as a slice where they are contiguous, because a slice needs no copy."""
    start = int(places[0])
    together = torch.equal(places, torch.arange(start, start + len(places)))
    return slice(start, start + len(places)) if together else places.to(device)


def _same_place(a: slice | Tensor, b: slice | Tensor) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return isinstance(a, slice) and isinstance(b, slice) and a == b


def _inverse_order(parts: Sequence[Part], size: int) -> Tensor | None:
    """The position of each element of the flat vector in the concatenated parts; None where the
    order is the same."""
    spans = [part.where for part in parts if isinstance(part.where, slice)]
    ends = [0, *(span.stop for span in spans)]
    if len(spans) == len(parts) and [span.start for span in spans] == ends[:-1]:
        return None
    places = torch.arange(size)
    order = torch.cat([places[part.where].cpu() for part in parts])
    if torch.equal(order, places):
        return None
    device = next(iter(parts[0].family.at.values())).device
    return torch.argsort(order).to(device)


def _first(exact: Values) -> Values:
    return {name: value[..., :1] for name, value in exact.items()}


def bind(spec: Prior | Mapping[str, Prior], layout: Layout, merge: bool = True) -> BoundPrior:
    """The prior of every element of a layout.

    The patterns of a mapping {pattern: Prior} are compared with the names of the entries. They are
    shell patterns; the first match is used, and "*" is tried last. Entries without a match have
    Normal(1.0). A pattern that matches no name is an error. In a large layout, tensors with the
    same settings one after the other have one density, whose settings take no memory; without
    `merge`, each tensor has its own, as priors of several runs need it.
    """
    chosen = each_prior(spec, layout)
    if layout.size >= LARGE and not any(prior.family.grouped for prior in chosen):
        return BoundPrior(_large_parts(chosen, layout, merge), layout.size)
    groups: dict[type[Family], list[tuple[Entry, Prior]]] = {}
    for entry, its_prior in zip(layout.entries, chosen, strict=True):
        groups.setdefault(its_prior.family, []).append((entry, its_prior))
    if not groups:
        groups = {GaussianFamily: []}  # no parameters: log p = 0
    parts = [_part(family, members, layout) for family, members in groups.items()]
    return BoundPrior(parts, layout.size)


def each_prior(spec: Prior | Mapping[str, Prior], layout: Layout) -> list[Prior]:
    """The prior of each entry of a layout."""
    table = {"*": spec} if isinstance(spec, Prior) else spec
    patterns = sorted(table, key=lambda pattern: pattern == "*")
    unused = set(patterns) - {"*"}
    chosen: list[Prior] = []
    for name in layout.names:
        matches = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        unused.difference_update(matches)
        if name.startswith("likelihood."):
            chosen.append(Normal(1.0))
        else:
            chosen.append(table[matches[0]] if matches else Normal(1.0))
    if unused:
        raise ModelError(
            f"prior pattern {min(unused)!r} matches no parameter; there are "
            + ", ".join(layout.names)
        )
    return chosen


def _part(family: type[Family], members: list[tuple[Entry, Prior]], layout: Layout) -> Part:
    entries = [entry for entry, _ in members]
    sizes = torch.tensor([entry.size for entry in entries], dtype=torch.long)

    def spread(values: list[float]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), sizes)

    settings = [its_prior.settings(entry) for entry, its_prior in members]
    names = settings[0] if settings else Normal().settings(Entry("", ()))
    exact = {name: spread([values[name] for values in settings]) for name in names}
    if family.grouped:
        exact["group"] = spread([float(g) for g in range(len(entries))])
    loc = spread([entry.centre for entry in entries])
    return Part(
        slice(None) if len(entries) == len(layout.entries) else _place(entries, layout),
        loc if bool(loc.any()) else None,
        family(exact, torch.device("cpu"), torch.float64),
    )


def _expanded(value: float, p: int) -> Tensor:
    return torch.tensor([value], dtype=torch.float64).expand(p)


def _large_parts(chosen: Sequence[Prior], layout: Layout, merge: bool) -> list[Part]:
    """The parts of a large layout, of expanded settings."""
    parts: list[Part] = []
    cpu = torch.device("cpu")
    last: Any = None
    entries = zip(layout.entries, chosen, layout.slices.values(), strict=True)
    for entry, prior, where in entries:
        if entry.size == 0:
            continue
        settings = prior.settings(entry)
        facts = prior.family, settings, entry.centre
        start = where.start
        if merge and facts == last:
            start = parts.pop().where.start  # type: ignore[union-attr]
        last, p = facts, where.stop - start
        exact = {k: _expanded(v, p) for k, v in settings.items()}
        family = prior.family(exact, cpu, torch.float64)
        loc = _expanded(entry.centre, p) if entry.centre else None
        parts.append(Part(slice(start, where.stop), loc, family))
    if len(parts) == 1:
        parts = [Part(slice(None), parts[0].loc, parts[0].family)]
    return parts


def _place(entries: list[Entry], layout: Layout) -> slice | Tensor:
    """A slice where the entries are contiguous, else their positions."""
    positions = layout.index(entry.name for entry in entries)
    if positions.numel() == 0:
        return slice(0, 0)
    first = int(positions[0])
    if int(positions[-1]) - first + 1 == positions.numel():
        return slice(first, first + positions.numel())
    return positions
