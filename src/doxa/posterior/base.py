"""`Posterior`, the result of every fit, for all methods.

A `Posterior` predicts, draws functions, reports whether it is reliable (`status`), and can be
saved. It is an equal mixture over its members. Subclasses implement how parameters or functions are
drawn.

The registry holds the kinds of posterior by the names under which they are saved.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, Required, Self, TypedDict

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import checks, describe, registry, store
from doxa.data import (
    FittedRows,
    Names,
    Standardisation,
    as_tensors,
    blocks,
    cast,
    check_finite,
    join_batches,
    reorder_columns,
    rows_of,
    warn_far,
    without_labels,
)
from doxa.data.rows import RowsByWindow, is_frame
from doxa.engine.engine import default_modes
from doxa.errors import DataError, MethodError, ShapeError, StoreError, Unavailable, deprecated
from doxa.likelihoods import Affine, Likelihood
from doxa.linalg.layout import Params
from doxa.model import Model
from doxa.model.checks import as_numbers
from doxa.posterior.certificate import Certificate, doxa_version, fingerprint, today
from doxa.predictive import Predictive

if TYPE_CHECKING:
    from doxa.tables.schema import Schema

log = logging.getLogger("doxa")

REGISTRY: dict[str, type[Posterior]] = {}


def register_posterior(cls: type[Posterior]) -> type[Posterior]:
    """Register a kind of posterior, so that it can be loaded by name."""
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
    """ "ok", "diverged", "not-converged"…; `.reason` holds the explanation.

    Where several statuses apply, a fit has the first of `ORDER`:

        diverged              it is not finite, or the loss rose
        stopped               it was stopped before its end
        degenerate            noise and function cannot be distinguished
        not-converged         chains or weights are not where they should be
        worse-than-map        Laplace predicts worse than its own maximum
        prior-collapse        training rows are predicted no better than by a constant
        worse-than-constant   held-out rows are predicted worse than by a constant
        overconfident         intervals hold too few held-out rows, or classes are too sure
        underfit              a simple model predicts held-out rows better
        underconfident        classes are too unsure
        not-evaluated         there are too few held-out rows to evaluate it
        ok                    none of these

    A status that is not in the table, of a method that is not part of doxa, follows "diverged".
    """

    ORDER: ClassVar[tuple[str, ...]] = (
        "diverged", "stopped", "degenerate", "not-converged", "worse-than-map", "prior-collapse",
        "worse-than-constant", "overconfident", "underfit", "underconfident", "not-evaluated",
        "ok",
    )  # fmt: skip

    reason: str

    def __new__(cls, value: str = "ok", reason: str = "") -> Status:
        status = super().__new__(cls, value)
        status.reason = reason
        return status

    @property
    def rank(self) -> float:
        """The place in `ORDER`."""
        return self.ORDER.index(self) if self in self.ORDER else 0.5

    def or_before(self, other: Status) -> Status:
        """The status of a fit for which both apply."""
        return other if other.rank < self.rank else self


class HeldOut(TypedDict, total=False):
    """Estimates of the mean scores of the posterior on new rows, from held-out rows.
    `driver/validation.py` has what each is, and what they are corrected for."""

    rows: Required[int]  # the number of held-out rows
    log_prob: Required[float]  # log predictive density, in nats and units of y
    gain: float  # the same, less that of a constant prediction
    coverage: float  # share inside the central 90 % interval; numeric y
    too_sure: float  # confidence less accuracy; classes
    twice_as_sure: float  # log density gained with logits twice as large; classes
    log_prob_error: float  # the standard errors, of the rows that were held out
    gain_error: float
    coverage_error: float
    by: str  # "parts of the members", "cross-fitting" or "one part", which all members hold out
    corrected_for: int  # how many numbers the same rows have chosen: step, noise, calibration
    cross_fit_parts: int  # the number of networks that gave the scores, if the fit was cross-fitted
    groups: int  # the number of groups of these rows, if rows belong to groups
    later_rows: bool  # whether these rows are later than those that the scored networks have seen


class Compared(TypedDict, total=False):
    """A fit and simple models of the same rows, on its held-out rows. There is one more entry for
    each of these models, by its name: the mean gain of the model over the fit, in nats per row. It
    is positive if the model predicts the rows better."""

    tested: Required[bool]
    why: str  # the reason if it was not tested
    rows: int  # the number of held-out rows
    trained: int  # the number of rows that the models were fitted to, at most
    best: str  # the name of the best model
    error: float  # the standard error of its gain


class Stopping(TypedDict):
    """Early stopping, for each member."""

    kept_step: list[int]  # the step whose state is kept: the best on held-out rows
    rows: list[float]  # the total weight of its held-out rows, which scores are summed over


class HeldOutCalibration(TypedDict, total=False):
    """The calibration of the likelihood on held-out rows."""

    rows: Required[int]
    likelihood: Required[str]  # what was found, as text
    noise_columns: list[int]  # the inputs that the noise depends on most; -1: the prediction
    noise_p_value: float  # of noise that does not depend on them


class AlternativeFits(TypedDict):
    """Fits with other settings than the defaults (`driver/alternatives.py`)."""

    tried: int  # the number of further fits
    chosen: bool  # whether one of them is this posterior
    settings: str  # its settings, as text; empty if the defaults were kept
    validation_of_defaults: float  # the held-out score of the defaults


# From a call of several processes on: the context in which one of them writes a path, and the
# others wait for it (True in that one).
writing: ContextVar[Callable[[str], AbstractContextManager[bool]] | None] = ContextVar(
    "doxa_writing", default=None
)


def written_once(path: str | Path) -> AbstractContextManager[bool]:
    """A context for writing a path: True in the process that writes, of several, or in the only
    one. The others wait until it has."""
    one_writes = writing.get()
    return nullcontext(True) if one_writes is None else one_writes(str(path))


class Processes(TypedDict):
    """The processes of a fit."""

    count: int
    blocks_by: list[int]  # the process that trained each block; empty if they divided rows
    row_blocks_by: NotRequired[list[int]]  # blocks of rows that each process has computed


class Diagnostics(dict[str, Any]):
    """Facts about a fit: typed attributes of what every fit may have, and a mapping of all.

    `posterior.diagnostics.seconds` and `posterior.diagnostics["seconds"]` are the same number. An
    attribute is None where there is no such entry. `own` are the entries of the method, which
    docs/posterior_diagnostics.md lists. An entry that was `renamed` is found by its old name,
    with a warning.
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "centre": "mean_correction", "left_out": "held_out_calibration", "rate": "step_size",
        "rate_limited": "step_size_limited",
    }  # fmt: skip

    def __missing__(self, name: str) -> Any:
        now = self.renamed.get(name)
        if now is None or now not in self:
            raise KeyError(name)
        deprecated(f"diagnostics[{name!r}]", f"diagnostics[{now!r}]")
        return ("mean" if self[now] else "mode") if name == "centre" else self[now]

    @property
    def engine(self) -> str | None:
        """How members were computed: "stack", all at once, or "loop", one at a time."""
        return self.get("engine")

    @property
    def mode(self) -> str | None:
        """How the longest stage was executed: "eager", "traced", "compiled" or "graph"."""
        return self.get("mode")

    @property
    def engine_reason(self) -> str | None:
        """Why this engine was chosen."""
        return self.get("engine_reason")

    @property
    def precision(self) -> str | None:
        """The precision of the network's products in training: "full", "bfloat16" or "tf32"."""
        return self.get("precision")

    @property
    def seconds(self) -> float | None:
        """The wall-clock time of the fit, of all its runs together."""
        return self.get("seconds")

    @property
    def trunk(self) -> str | None:
        """Whether a frozen trunk ran "once" for the data, or "in every pass"; None without one."""
        return self.get("trunk")

    @property
    def steps(self) -> int | None:
        """The number of steps that were done, of all stages together."""
        return self.get("steps")

    @property
    def rows(self) -> int | None:
        """The number of training rows; after `condition`, of all rows."""
        return self.get("rows")

    @property
    def held_out(self) -> HeldOut | None:
        """Estimates for new rows, from held-out rows: rows, log_prob, gain, coverage, too_sure,
        twice_as_sure; log_prob_error, gain_error, coverage_error; by, corrected_for,
        cross_fit_parts, groups and later_rows."""
        return self.get("held_out")

    @property
    def held_out_calibration(self) -> HeldOutCalibration | None:
        """The calibration of the likelihood on held-out rows: rows, likelihood; noise_columns and
        noise_p_value."""
        return self.get("held_out_calibration")

    @property
    def yardsticks(self) -> Compared | None:
        """The gain of simple models over the fit, on its held-out rows; tested, why, rows, trained,
        best, error."""
        return self.get("yardsticks")

    @property
    def stopping(self) -> Stopping | None:
        """Early stopping, for each member: kept_step, rows."""
        return self.get("stopping")

    @property
    def alternatives(self) -> AlternativeFits | None:
        """Fits with other settings than the defaults: tried, chosen, settings,
        validation_of_defaults."""
        return self.get("alternatives")

    @property
    def blocks(self) -> dict[str, int] | None:
        """How the members were divided: the count of blocks, and the most members of one."""
        return self.get("blocks")

    @property
    def row_blocks(self) -> dict[str, int] | None:
        """How the rows of a step or pass were divided: the count of blocks. None for one block."""
        return self.get("row_blocks")

    @property
    def threads(self) -> int | None:
        """The number of threads of a process, for products that are large enough."""
        return self.get("threads")

    @property
    def processes(self) -> Processes | None:
        """The processes of a fit by several: their count, and the one that trained each block,
        blocks_by; or how many blocks of rows each has computed, row_blocks_by."""
        return self.get("processes")

    @property
    def warnings(self) -> list[str] | None:
        """Messages of a sampler about its chains, the serious ones first."""
        return self.get("warnings")

    @classmethod
    def fields(cls) -> dict[str, str]:
        """The typed attributes and what they are."""
        found = {name: value for name, value in vars(cls).items() if isinstance(value, property)}
        del found["own"]
        return {name: " ".join((value.__doc__ or "").split()) for name, value in found.items()}

    @property
    def own(self) -> dict[str, Any]:
        """The entries of the method."""
        return {name: value for name, value in self.items() if name not in self.fields()}


@dataclass
class Record:
    """The driver's record of a fit, for users. Of it, only the seed affects predictions."""

    seed: int = 0
    status: Status = field(default_factory=Status)
    history: dict[str, Any] = field(default_factory=dict)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    metadata: dict[str, Any] = field(default_factory=dict)
    validation: float | None = None  # estimate of the mean log predictive of new rows
    stats: dict[str, Tensor] = field(default_factory=dict)  # of each kept draw, {name: [K, T]}
    certificate: Certificate | None = None  # of the rows that evaluated


class PredictiveTransform(ABC):
    """A map from one predictive to another. Subclasses are frozen dataclasses that the store
    registers."""

    @property
    def guaranteed_level(self) -> float | None:
        """The level that the intervals or sets were calibrated for; None if it is not
        conformal."""
        return None

    @abstractmethod
    def __call__(self, p: Predictive) -> Predictive: ...

    def at(self, p: Predictive, x: Any) -> Predictive:
        """The transform at inputs x, as the caller passed them; only some transforms use x."""
        return self(p)


class Posterior(describe.Described, ABC):
    """The posterior distribution over functions, given the data.

    Attributes
    ----------
    model : Model or None
        The network of the fit; None for methods without a network.
    method : Method
        The method with its settings.
    members : int
        The number of members that are averaged.
    status, history, metadata
        The driver's record of the fit.
    validation : float or None
        The estimated mean log predictive density of new rows, from held-out rows; its standard
        error is `diagnostics["held_out"]["log_prob_error"]`.
    diagnostics : Diagnostics
        Facts about the fit: time, steps, engine, scores on held-out rows, and those of the method.
    log_evidence, elbo : float or None
        None where the method has no such number.
    columns : list of str or None
        The names of the columns of x, where the fit was given a data frame.
    transform : PredictiveTransform or None
        The correction of the predictions, of a recalibrated or conformal posterior.
    scalar_targets : bool or tuple of bool
        True where the fit was given y of shape [N] and the outputs are [N, 1]: predictions then
        have the shape [N]. A tuple, one entry per head, where there are several heads.
    """

    kind: ClassVar[str]
    # methods that run in torch's default modes, whatever modes the caller has set
    computes: ClassVar[tuple[str, ...]] = ("features", "draw", "condition", "restore")
    may_be_infinite: ClassVar[frozenset[str]] = frozenset()  # stored tensors; NaN is never allowed
    log_evidence: float | None = None
    elbo: float | None = None
    objective: float | None = None  # what training maximised, where it is no bound on the evidence
    columns: list[str] | None = None
    scalar_targets: bool | tuple[bool, ...] = False
    transform: PredictiveTransform | None = None  # a recalibration or a conformal correction
    fitted_rows: FittedRows | None = None  # None: not known, for example for streamed rows
    input_reference: Tensor | None = None  # [R, K], what the inputs of new rows are compared with

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
    def reason(self) -> str:
        """Why the status is what it is, in a sentence; "" if there is nothing to say."""
        return self.record.status.reason

    @property
    def history(self) -> dict[str, Any]:
        return self.record.history

    @property
    def diagnostics(self) -> Diagnostics:
        return self.record.diagnostics

    @property
    def metadata(self) -> dict[str, Any]:
        return self.record.metadata

    @property
    def validation(self) -> float | None:
        return self.record.validation

    @property
    def certificate(self) -> Certificate:
        """What was evaluated about the fit, by which rows, and what was assumed. It is saved with
        the posterior, and `doxa.evaluate.Watch` compares new rows with it."""
        found, held = self.record.certificate or Certificate(), self.diagnostics
        if found.method:  # as it was saved
            return found
        return replace(
            found, data=self._fingerprint(), reference=fingerprint(self.input_reference),
            method=str(self.method.name), trained_rows=held.get("rows"), version=doxa_version(),
            yardsticks=held.get("yardsticks"), date=found.date or today(),
        )  # fmt: skip

    def _fingerprint(self) -> str:
        """Of the rows of the fit."""
        return "" if self.fitted_rows is None else fingerprint(self.fitted_rows.hashes)

    @property
    @abstractmethod
    def members(self) -> int: ...

    @property
    def ids(self) -> list[int]:
        """The ids of the members. The draws of a member depend on its id, not on other members."""
        return list(range(self.members)) if self._ids is None else self._ids

    def split(self, n: int) -> list[int]:
        """n samples split over the members, as evenly as possible."""
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
        """A tensor with the device and dtype of the posterior."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of y given the outputs, in the units of y."""
        if self.scales.y_loc is None:
            return self.base_likelihood
        scales = self.scales.to(self.device, torch.float64)
        return Affine(self.base_likelihood, scales.y_loc, scales.y_scale)

    @property
    def fitted_likelihood(self) -> Likelihood:
        """The likelihood in training, before held-out calibration."""
        before = self.metadata.get("fitted_likelihood")
        return self.base_likelihood if before is None else store.decode(before, "likelihood")

    @default_modes()
    def predict(
        self, x: Any, n: int | None = None, seed: int | None = None, keep: str = "samples"
    ) -> Predictive:
        """The predictive distribution at x, in the shape of the fit's y.

        Parameters
        ----------
        x : array, Tensor, data frame, DataLoader or Dataset
            Inputs as in `fit`, in their original units. The columns of a data frame are sorted as
            in the fit. The batches of a `DataLoader` (or the rows of a `Dataset`) are concatenated
            in their order; from pairs (x, y), x is used.
        n : int, optional
            The total number of samples, split over members. Default: every kept draw, else 100.
        seed : int, optional
            Default: the seed of the fit, so that repeated calls give the same result.
        keep : str
            "samples", or "moments" to stream where samples would not fit in memory.
        """
        return self._predict(x, n, seed, keep).for_targets(self.scalar_targets)

    def predict_blocks(
        self, x: Any, rows: int = 4096, n: int | None = None, seed: int | None = None,
        keep: str = "samples",
    ) -> Iterator[tuple[Tensor, Predictive]]:  # fmt: skip
        """Predictive distributions of rows that need not fit in memory, a block at a time.

        Function s is the same in every block, because it depends on the seed alone.

        Parameters
        ----------
        x : Stream, array, Tensor, data frame, DataLoader or Dataset
            Inputs as in `predict`, or rows that are read by windows (`doxa.data.read_parquet`), of
            which targets are not needed.
        rows : int, default 4096
            The most rows of a block. A `DataLoader` has its own batches.
        n, seed, keep
            As in `predict`.

        Yields
        ------
        tuple of (Tensor, Predictive)
            The numbers of the rows, and their predictive distribution.
        """
        first = 0
        if isinstance(x, RowsByWindow):
            x = reorder_columns(x, self.columns)
        for part in blocks(x, rows):
            p = self.predict(part, n, seed, keep)
            last = first + rows_of(part, "x")
            yield torch.arange(first, last), p
            first = last

    @default_modes()
    def functions(self, x: Any, n: int = 20, seed: int | None = None) -> Tensor:
        """Draws of whole functions at x, [n, N, ...], in the units and shape of y.

        Each function is one draw of the weights. A process draws jointly over the rows of x.
        """
        found: Tensor = self._in_shape(self._draw_functions(x, n, seed))
        return found

    @default_modes()
    def prior_functions(self, x: Any, n: int = 20, seed: int | None = None) -> Tensor:
        """Draws of functions from the prior at x, [n, N, ...], in the units and shape of y.

        Classes have logits. A learned prior is used with its learned values.
        """
        found: Tensor = self._in_shape(self._draw_prior_functions(x, n, seed))
        return found

    def _in_shape(self, f: Any) -> Any:
        if isinstance(f, tuple) and isinstance(self.scalar_targets, tuple):
            each = zip(f, self.scalar_targets, strict=True)
            return tuple(part.squeeze(-1) if scalar else part for part, scalar in each)
        return f.squeeze(-1) if self.scalar_targets else f

    @abstractmethod
    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """`predict`, but a single output keeps its axis, whatever the shape of y."""

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """`functions`, but a single output keeps its axis."""
        return self._predict(x, n, seed, "samples").samples

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        raise Unavailable(f"a {self.kind} posterior has no prior over functions to draw from")

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        """Draws of the parameters, {name: [n, ...]}."""
        raise Unavailable(f"a {self.kind} posterior has no weights to draw")

    def features(self, x: Any) -> Tensor:
        """The inputs of the network's last layer at x, averaged over members: [N, ...]."""
        raise Unavailable(f"a {self.kind} posterior has no network to take features from")

    @default_modes()
    def condition(self, x: Any, y: Any) -> Posterior:
        """The posterior given more data, without refitting; for processes and exact models."""
        new = self._condition(x, y)
        new.columns, new.scalar_targets = self.columns, self._scalar_with(y)
        rows = FittedRows.of(self.read(x), as_tensors(y, "y"))
        new.fitted_rows = rows if self.fitted_rows is None else self.fitted_rows.plus(rows)
        new.record = replace(new.record, certificate=None)  # of other predictions
        return new

    def _scalar_with(self, y: Any) -> bool | tuple[bool, ...]:
        """`scalar_targets` after y was added; it stays that of the fit."""
        return self.scalar_targets

    def _condition(self, x: Any, y: Any) -> Posterior:
        raise Unavailable(
            f"a {self.kind} posterior cannot be conditioned in closed form; fit again with all rows"
        )

    def to_arviz(self) -> Any:
        """Draws as an arviz DataTree, for its diagnostics and plots."""
        raise Unavailable(f"a {self.kind} posterior keeps no chains")

    def count_fitted(self, x: Any, y: Any) -> int:
        """The number of these rows that the fit used, for training or early stopping.

        0 where this is not known, or where rows can be equal by chance. See `FittedRows`.
        """
        if self.fitted_rows is None:
            return 0
        return self.fitted_rows.overlap(self.read(x), as_tensors(y, "y"))

    def ordered(self, x: Any) -> Any:
        """x with the batches of a loader concatenated, and the columns of a data frame in the order
        of the fit. A data frame for the fit of a table is encoded as in the fit."""
        x = join_batches(x)
        if "table" in self.metadata and is_frame(x):
            return self._encoded(x)
        return reorder_columns(x, self.columns)

    @property
    def table(self) -> Schema | None:
        """The columns of the table that was fitted, and how they are encoded; None if the fit was
        given numbers (`doxa.fit`)."""
        saved = self.metadata.get("table")
        if saved is None:
            return None
        from doxa.tables.schema import Schema  # imported here: most posteriors have no table

        return Schema.from_json(saved)

    def _encoded(self, frame: Any) -> Any:
        """The inputs of rows with raw columns, by the schema of the fit."""
        schema = self.table
        assert schema is not None
        inputs = [name for column in schema.columns for name in column.inputs]
        if list(frame.columns) == inputs:  # encoded before
            return reorder_columns(frame, self.columns)
        x, notes = schema.features(frame)
        for note in notes:
            log.warning(note)
        return x

    def ordered_pair(self, data: Any) -> Any:
        """(x, y) with x as in `ordered`; anything else is returned unchanged."""
        if not isinstance(data, tuple | list) or len(data) != 2:
            return data
        return self.ordered(data[0]), data[1]

    def read(self, x: Any) -> Any:
        """x as in `ordered`, as tensors."""
        x = self.ordered(x)
        return as_tensors(without_labels(x, self.inputs) if isinstance(x, Mapping) else x, "x")

    def of_network(self, model: Any, inputs: Any, scales: Standardisation) -> None:
        """Use another network with the same weights: the whole of which the fit trained a part.
        `inputs` are the shapes of one row of its inputs."""
        self.model, self.inputs, self.scales = model, inputs, scales

    def check_inputs(self, x: Any) -> Any:
        """x as checked tensors in fitted units."""
        names = Names(None if self.columns is None else tuple(self.columns), Names.of(x).index)
        x = self.read(x)
        if isinstance(x, Tensor) and not x.is_floating_point() and self.model is not None:
            x = as_numbers(self.model, x)
        self._check_shape(x)
        if rows_of(x, "x") == 0:
            raise DataError("x has no rows (N = 0)")
        check_finite(x, "x", dtype=self.dtype, names=names)
        x, device, dtype = self.scales.x(x, self.dtype), self.device, self.dtype
        if self.scales.x_loc is not None:
            warn_far(x, self.columns)
        return each(lambda t: cast(t, device, dtype), x)

    def _check_shape(self, x: Any) -> None:
        """Check that rows have the shape of the fitted rows; for images and sequences, the same
        number of axes."""
        if self.inputs is None:
            return
        if isinstance(x, dict) and isinstance(self.inputs, dict) and x.keys() != self.inputs.keys():
            names, wanted = (", ".join(map(repr, sorted(each))) for each in (x, self.inputs))
            raise ShapeError(f"x has the inputs {names}, but the fit had {wanted}")
        fitted = _shape_list(self.inputs)
        whole = _shape_list(each(lambda t: list(t.shape), x))
        if whole == fitted and all(fitted):
            raise ShapeError(
                f"x has the shape {fitted} of a single row; the first axis must be the rows: "
                "pass x[None]"
            )
        given = [shape[1:] for shape in whole]
        same_axes = [len(s) for s in given] == [len(s) for s in fitted]
        tokens = isinstance(x, dict) and not any(t.is_floating_point() for t in leaves(x))
        table = all(len(s) <= 1 for s in fitted) and not tokens  # sequences have any length
        if given != fitted and (table or not same_axes):
            raise ShapeError(f"x has rows of shape {given}, but the fit had {fitted}")

    def sampling(self, n: int | None, seed: int | None, keep: str) -> int:
        if n is not None:
            checks.whole("n", n)
        if keep not in ("samples", "moments"):
            raise MethodError(f"keep must be 'samples' or 'moments', not {keep!r}")
        return self.record.seed if seed is None else checks.seed("seed", seed)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are stored."""

    def extra(self) -> dict[str, Any]:
        """Further values, as JSON, that `restore` of the subclass needs."""
        return {}

    @classmethod
    @abstractmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> Posterior:
        """Rebuild the posterior from `tensors` and `extra`; `common` are the arguments of the base
        class."""

    def check_restored(self) -> None:
        """Check that the arguments of `restore` are consistent, before any prediction.

        An artefact may come from an untrusted source. Any exception that is raised here counts as
        a damaged artefact.
        """
        if not self.members or len(self.ids) != self.members:
            raise StoreError(f"{len(self.ids)} ids for {self.members} members")
        if not all(type(number) is int for number in self.ids):
            raise StoreError("a member's id is not an integer")
        bounds = (self.log_evidence, self.elbo)
        if not all(value is None or isinstance(value, float) for value in bounds):
            raise StoreError("the evidence is not a number")
        self._check_scales()

    def check_two_rows(self) -> None:
        """Predict two rows, at the mean of the fitted rows, so that inconsistent tensors fail while
        the artefact is loaded. For posteriors with numeric x."""
        shape = _shape_list(self.inputs)[0] if self.inputs is not None else ()
        x = torch.zeros(2, *shape, dtype=self.dtype, device=self.device)
        if isinstance(self.scales.x_loc, Tensor):
            x = x + self.scales.x_loc.to(x)
        p = self.predict(x, n=self.members)
        if not (bool(torch.isfinite(p.mean).all()) and bool(torch.isfinite(p.variance).all())):
            raise StoreError("the artefact is damaged: its predictions are not finite")

    def shadow(self) -> Self:
        """A shallow copy. It shares the tensors; what is done with it does not change the
        original."""
        return copy.copy(self)

    def _check_scales(self) -> None:
        s = self.scales
        for name, loc, scale in (("x", s.x_loc, s.x_scale), ("y", s.y_loc, s.y_scale)):
            if (loc is None) != (scale is None):
                raise StoreError(f"{name} has only one of location and scale")
            for a, b in zip(leaves(loc), leaves(scale), strict=True) if loc is not None else ():
                if a.shape != b.shape or not bool((b > 0).all()):
                    raise StoreError(f"the scale of {name} has the wrong shape, or is not positive")
        shapes = _shape_list(self.inputs)
        if s.x_loc is not None and self.inputs is not None:
            for loc, shape in zip(leaves(s.x_loc), shapes, strict=True):
                if loc.ndim > len(shape) or loc.shape != shape[len(shape) - loc.ndim :]:
                    raise StoreError(f"x of shape {shape} has scales of shape {tuple(loc.shape)}")

    def save(self, path: str | Path, frozen: bool = True, overwrite: bool | None = None) -> None:
        """Write a directory of safetensors and JSON files, atomically and with checksums.

        Parameters
        ----------
        path : str or Path
            The directory.
        frozen : bool, default True
            False: parameters with requires_grad=False are not written, only their checksums. The
            artefact of adapters then does not contain the network that they adapt, and loading it
            needs the same network: `doxa.load(path, net=net)`.
        overwrite : bool, optional
            What happens if the directory holds an artefact already. True: it is replaced. False:
            an error. Default: it is replaced, with a warning in the log. Other files in the
            directory are always an error.

        Notes
        -----
        After a fit by several processes, process 0 writes, and the others wait until it has.
        """
        with written_once(path) as first:
            if first:
                self._write(path, frozen, overwrite)

    def _write(self, path: str | Path, frozen: bool, overwrite: bool | None) -> None:
        if not overwrite and store.is_artefact(path):
            if overwrite is not None:
                raise StoreError(
                    f"{path} holds an artefact already: choose another folder, or overwrite=True"
                )
            log.warning("%s held an artefact, which is replaced (overwrite=True says so)", path)
        from doxa.posterior.saving import to_artefact, without_frozen

        tensors, meta = to_artefact(self)
        if not frozen:
            tensors, meta = without_frozen(self, tensors, meta)
        store.write_artefact(path, tensors, meta)

    def described(self) -> describe.Words:
        found = describe.posterior(self)
        row = next((row for row in registry.ROWS if row.name == self.method.name), None)
        if row is None or row.evidence or row.elbo or row.tasks == ("tasks",):
            return found
        none = f"none: {row.name} gives neither evidence nor a bound; laplace, linear and gp do"
        return replace(found, facts=[*found.facts, ("evidence", none)])


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
    """`tree_map`, with a shortcut for a single tensor."""
    return fn(*trees) if isinstance(trees[0], Tensor) else tree_map(fn, *trees)
