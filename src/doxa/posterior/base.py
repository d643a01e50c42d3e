"""What every fit gives back, whichever method made it.

A `Posterior` predicts, draws functions, says whether it can be trusted (`status`), and saves
itself. It is an equal mixture over its members. Subclasses say how parameters or functions are
drawn.

Kinds of posterior, by the names under which they are saved.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import checks, describe, store
from doxa.data import (
    FittedRows,
    Names,
    Standardisation,
    as_tensors,
    cast,
    check_finite,
    gathered,
    in_order,
    rows_of,
    warn_far,
)
from doxa.engine.engine import default_modes
from doxa.errors import DataError, MethodError, ShapeError, StoreError, Unavailable
from doxa.likelihoods import Affine, Likelihood
from doxa.linalg.layout import Params
from doxa.model import Model
from doxa.predictive import Predictive

REGISTRY: dict[str, type[Posterior]] = {}


def register_posterior(cls: type[Posterior]) -> type[Posterior]:
    """Make a kind loadable by name."""
    REGISTRY[cls.kind] = cls
    return cls


def posterior_class(kind: str) -> type[Posterior]:
    if kind not in REGISTRY:
        import doxa.registry

        doxa.registry.import_all()
    if kind not in REGISTRY:
        raise StoreError(f"unknown kind of posterior {kind!r}; known: {sorted(REGISTRY)}")
    return REGISTRY[kind]


class Status(str):
    """ "ok", "diverged", "not-converged"…, with the reason in plain words as `.reason`."""

    reason: str

    def __new__(cls, value: str = "ok", reason: str = "") -> Status:
        status = super().__new__(cls, value)
        status.reason = reason
        return status


@dataclass
class Record:
    """What the driver knows of a fit, for people: none of it changes a prediction but the seed."""

    seed: int = 0
    status: Status = field(default_factory=Status)
    history: dict[str, Any] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    validation: float | None = None  # mean log predictive of the held-out rows
    stats: dict[str, Tensor] = field(default_factory=dict)  # of each kept draw, {name: [K, T]}


class Posterior(describe.Described, ABC):
    """Belief after seeing data.

    Attributes
    ----------
    model: the network as it was fitted (None for methods that bring their own functions).
    method: the method's settings. members: how many are averaged.
    status, diagnostics, history, validation, metadata: what the driver recorded.
    log_evidence, elbo: numbers where the method has them, else None.
    columns: the names of x's columns, where the fit was given a frame; else None.
    scalar_targets: the fit was given y of shape [N] and the outputs are [N, 1]: predictions have
        the shape [N]. A tuple, one entry per head, where there are several.
    """

    kind: ClassVar[str]
    # what computes in torch's default modes, whichever are set around it
    computes: ClassVar[tuple[str, ...]] = ("features", "draw", "condition", "restore")
    may_be_infinite: ClassVar[frozenset[str]] = frozenset()  # stored tensors; NaN is never right
    log_evidence: float | None = None
    elbo: float | None = None
    columns: list[str] | None = None
    scalar_targets: bool | tuple[bool, ...] = False
    fitted_rows: FittedRows | None = None  # None: not known, as of rows that were streamed

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in cls.computes:
            own = vars(cls).get(name)
            if isinstance(own, classmethod):
                setattr(cls, name, classmethod(default_modes()(own.__func__)))
            elif own is not None:
                setattr(cls, name, default_modes()(own))

    def __init__(
        self,
        model: Model | None,
        method: Any,
        likelihood: Likelihood,
        scales: Standardisation | None = None,
        inputs: Any = None,
        ids: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.method = method
        self.base_likelihood = likelihood
        self.scales = scales or Standardisation()
        self.inputs = inputs  # the shape of one row of x
        self._ids = None if ids is None else list(ids)
        self.record = Record()

    @property
    def status(self) -> Status:
        return self.record.status

    @property
    def history(self) -> dict[str, Any]:
        return self.record.history

    @property
    def diagnostics(self) -> dict[str, Any]:
        return self.record.diagnostics

    @property
    def metadata(self) -> dict[str, Any]:
        return self.record.metadata

    @property
    def validation(self) -> float | None:
        return self.record.validation

    @property
    @abstractmethod
    def members(self) -> int: ...

    @property
    def ids(self) -> list[int]:
        """Who the members are: their draws depend on it, not on who else there is."""
        return list(range(self.members)) if self._ids is None else self._ids

    def split(self, n: int) -> list[int]:
        """n samples over the members, as evenly as they go."""
        base, rest = divmod(n, self.members)
        return [base + (k < rest) for k in range(self.members)]

    @property
    def device(self) -> torch.device:
        return self._reference().device

    @property
    def dtype(self) -> torch.dtype:
        return self._reference().dtype

    @abstractmethod
    def _reference(self) -> Tensor:
        """A tensor whose device and type are the posterior's."""

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs mean, in the units of y."""
        if self.scales.y_loc is None:
            return self.base_likelihood
        scales = self.scales.to(self.device, torch.float64)
        return Affine(self.base_likelihood, scales.y_loc, scales.y_scale)

    @property
    def fitted_likelihood(self) -> Likelihood:
        """What outputs meant in training, before rows left out were asked."""
        before = self.metadata.get("fitted_likelihood")
        return self.base_likelihood if before is None else store.decode(before, "likelihood")

    @default_modes()
    def predict(
        self, x: Any, n: int | None = None, seed: int | None = None, keep: str = "samples"
    ) -> Predictive:
        """The predictive distribution at x, in the shape of the fit's y.

        Parameters
        ----------
        x: inputs as given to `fit`, in their original units. A frame's columns are put in the
            order of the fit; the batches of a `DataLoader` (or the rows of a `Dataset`) are joined
            in their order, and of pairs (x, y) x is taken.
        n: how many samples in all, split over members; default: every kept draw, else 100.
        seed: default: the fit's, so that repeated calls agree.
        keep: "samples", or "moments" to stream where samples would not fit in memory.
        """
        return self._predict(x, n, seed, keep).for_targets(self.scalar_targets)

    @default_modes()
    def functions(self, x: Any, n: int = 20, seed: int | None = None) -> Tensor:
        """Whole function draws at x, [n, N, ...], in the units and shape of y: one weight draw
        each; jointly over the rows of x for a process."""
        return self._in_shape(self._draw_functions(x, n, seed))

    @default_modes()
    def prior_functions(self, x: Any, n: int = 20, seed: int | None = None) -> Tensor:
        """Whole functions at x as they were believed in before the data, [n, N, ...], in the units
        and shape of y (logits for classes); of a learned prior, as it was learned."""
        return self._in_shape(self._draw_prior_functions(x, n, seed))

    def _in_shape(self, f: Any) -> Any:
        if isinstance(f, tuple) and isinstance(self.scalar_targets, tuple):
            each = zip(f, self.scalar_targets, strict=True)
            return tuple(part.squeeze(-1) if scalar else part for part, scalar in each)
        return f.squeeze(-1) if self.scalar_targets else f

    @abstractmethod
    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """`predict` with the axis of one output that the network has, whatever y's shape."""

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """`functions` with that axis, likewise."""
        return self._predict(x, n, seed, "samples").samples

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        raise Unavailable(f"a {self.kind} posterior has no prior over functions to draw from")

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        """Parameter dicts with leading axis n."""
        raise Unavailable(f"a {self.kind} posterior has no weights to draw")

    def features(self, x: Any) -> Tensor:
        """What goes into the network's last layer at x, averaged over members: [N, ...]."""
        raise Unavailable(f"a {self.kind} posterior has no network to take features from")

    @default_modes()
    def condition(self, x: Any, y: Any) -> Posterior:
        """The posterior after more data, without refitting: processes and exact models."""
        new = self._condition(x, y)
        new.columns, new.scalar_targets = self.columns, self._scalar_with(y)
        rows = FittedRows.of(self.read(x), as_tensors(y, "y"))
        new.fitted_rows = rows if self.fitted_rows is None else self.fitted_rows.plus(rows)
        return new

    def _scalar_with(self, y: Any) -> bool | tuple[bool, ...]:
        """`scalar_targets` after such y was added: the fit's."""
        return self.scalar_targets

    def _condition(self, x: Any, y: Any) -> Posterior:
        raise Unavailable(
            f"a {self.kind} posterior cannot be conditioned in closed form; fit again with all rows"
        )

    def to_arviz(self) -> Any:
        """Draws as an arviz DataTree, for its diagnostics and plots."""
        raise Unavailable(f"a {self.kind} posterior keeps no chains")

    def count_fitted(self, x: Any, y: Any) -> int:
        """How many of these rows the fit used, to train on or to stop by: see `FittedRows`. 0 where
        that is not known, or where rows may be alike by chance."""
        if self.fitted_rows is None:
            return 0
        return self.fitted_rows.overlap(self.read(x), as_tensors(y, "y"))

    def ordered(self, x: Any) -> Any:
        """x with the batches of a loader joined, and the columns of a frame in the fit's order."""
        return in_order(gathered(x), self.columns)

    def ordered_pair(self, data: Any) -> Any:
        """(x, y) with such an x; anything else as it is."""
        if not isinstance(data, tuple | list) or len(data) != 2:
            return data
        return self.ordered(data[0]), data[1]

    def read(self, x: Any) -> Any:
        """The same as tensors."""
        return as_tensors(self.ordered(x), "x")

    def check_inputs(self, x: Any) -> Any:
        """x as tensors in fitted units, checked."""
        names = Names(None if self.columns is None else tuple(self.columns), Names.of(x).index)
        x = self.read(x)
        self._check_shape(x)
        if rows_of(x, "x") == 0:
            raise DataError("x has no rows (N = 0)")
        check_finite(x, "x", dtype=self.dtype, names=names)
        x, device, dtype = self.scales.x(x, self.dtype), self.device, self.dtype
        if self.scales.x_loc is not None:
            warn_far(x, self.columns)
        return each(lambda t: cast(t, device, dtype), x)

    def _check_shape(self, x: Any) -> None:
        """Rows have the shape that the fit saw; of images and sequences, as many axes."""
        if self.inputs is None:
            return
        fitted = _shape_list(self.inputs)
        whole = _shape_list(each(lambda t: list(t.shape), x))
        if whole == fitted and all(fitted):
            raise ShapeError(
                f"x has the shape {fitted} of a single row; the first axis must be the rows: "
                "x[:1] and x[None] have one"
            )
        given = [shape[1:] for shape in whole]
        same_axes = [len(s) for s in given] == [len(s) for s in fitted]
        if given != fitted and (all(len(s) <= 1 for s in fitted) or not same_axes):
            raise ShapeError(f"x has rows of shape {given}, but the fit saw {fitted}")

    def sampling(self, n: int | None, seed: int | None, keep: str) -> int:
        if n is not None:
            checks.whole("n", n)
        if keep not in ("samples", "moments"):
            raise MethodError(f"keep must be 'samples' or 'moments', not {keep!r}")
        return self.record.seed if seed is None else checks.seed("seed", seed)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What must be stored besides the recipe."""

    def extra(self) -> dict[str, Any]:
        """JSON-able facts a subclass needs to be rebuilt."""
        return {}

    @classmethod
    @abstractmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> Posterior:
        """From what `tensors` and `extra` gave; `common` are the base class's arguments."""

    def check_restored(self) -> None:
        """Whether what `restore` was given fits together, before anything is predicted: an artefact
        may come from anybody. Raises an error of doxa, or anything, which counts as one."""
        if not self.members or len(self.ids) != self.members:
            raise StoreError(f"{len(self.ids)} ids for {self.members} members")
        if not all(type(number) is int for number in self.ids):
            raise StoreError("a member's id is no whole number")
        bounds = (self.log_evidence, self.elbo)
        if not all(value is None or isinstance(value, float) for value in bounds):
            raise StoreError("the evidence is no number")
        self._check_scales()

    def check_two_rows(self) -> None:
        """Predict two rows, at the mean of those fitted: what does not fit together fails here,
        while the artefact is read. For posteriors whose x are numbers."""
        shape = _shape_list(self.inputs)[0] if self.inputs is not None else ()
        x = torch.zeros(2, *shape, dtype=self.dtype, device=self.device)
        if isinstance(self.scales.x_loc, Tensor):
            x = x + self.scales.x_loc.to(x)
        p = self.predict(x, n=self.members)
        if not (bool(torch.isfinite(p.mean).all()) and bool(torch.isfinite(p.variance).all())):
            raise StoreError("the artefact holds numbers that predict none")

    def shadow(self) -> Self:
        """A copy that shares its tensors, and remembers nothing of what is done with it."""
        return copy.copy(self)

    def _check_scales(self) -> None:
        s = self.scales
        for name, loc, scale in (("x", s.x_loc, s.x_scale), ("y", s.y_loc, s.y_scale)):
            if (loc is None) != (scale is None):
                raise StoreError(f"{name} has a location or a scale, not both")
            for a, b in zip(leaves(loc), leaves(scale), strict=True) if loc is not None else ():
                if a.shape != b.shape or not bool((b > 0).all()):
                    raise StoreError(f"the scale of {name} does not fit, or is not positive")
        shapes = _shape_list(self.inputs)
        if s.x_loc is not None and self.inputs is not None:
            for loc, shape in zip(leaves(s.x_loc), shapes, strict=True):
                if loc.ndim > len(shape) or loc.shape != shape[len(shape) - loc.ndim :]:
                    raise StoreError(f"x of shape {shape} has scales of shape {tuple(loc.shape)}")

    def save(self, path: str | Path) -> None:
        """Write a directory of safetensors and JSON, atomically and checksummed."""
        from doxa.posterior.saving import to_artefact

        tensors, meta = to_artefact(self)
        store.write_artefact(path, tensors, meta)

    def described(self) -> describe.Words:
        return describe.posterior(self)


def _shape_list(tree: Any) -> list[tuple[int, ...]]:
    """Shapes of the leaves of x, in pytree order."""
    if isinstance(tree, dict):
        return [tuple(tree[k]) for k in sorted(tree)]
    if isinstance(tree, tuple) or (isinstance(tree, list) and tree and isinstance(tree[0], list)):
        return [tuple(v) for v in tree]
    return [tuple(tree)] if tree is not None else []


def leaves(tree: Any) -> list[Tensor]:
    return tree_flatten(tree)[0]


def each(fn: Callable[..., Any], *trees: Any) -> Any:
    """`tree_map`, without its cost where there is one tensor."""
    return fn(*trees) if isinstance(trees[0], Tensor) else tree_map(fn, *trees)
