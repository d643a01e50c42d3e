"""The protocol of all methods: `Method`, the rules of its settings, and the memory of a fit.

**Methods.** A method is a frozen dataclass of hyper-parameters. It defines the problem (`prepare`),
the initial state (`init`), the `Stage`s, and the posterior (`finish`). The step of a stage advances
all members at once.

**Settings.** Each field of a method is declared together with its allowed values:

    draws: int = whole(100, least=1)
    step: float | None = positive(None, per_run=True)
    friction: float = between(0.1, 0, 1, ends="(]")
    correction: str = one_of("freeze", "none", "gamma")

Each helper returns a dataclass field with a default and a `Rule`. The rule is the only definition
of the allowed values: `check_fields`, the options of the command line and their help all use it. A
default of None allows None, which means a value chosen by `fit` or from the data. With
`per_run=True`, a grid of runs may vary the field; its values are then [M], one per member.
Conditions that involve two fields are checked by the method itself.

**Renames.** A setting that was renamed keeps its old name for one version. The class declares it,
and may declare old values of a setting:

    renamed = {"polish": "newton_steps"}
    renamed_values = {"link": {"odds": "log-odds"}}

`Method.current_settings` translates both, wherever settings are given: in the constructor, a grid,
the command line and saved files. It warns, except for files. Reading an old attribute warns too.

**Keywords.** Settings of one method belong to its class, `doxa.HMC(draws=10)`. Settings of all fits
are keywords of `fit`, `doxa.fit(..., members=4)`. For an unknown keyword, the error names the place
where it belongs, or a similar name (`keywords`, `check_settings`).

**Memory.** `fit` compares the method's `planned_bytes` for the `Workload` with the available
memory, before anything of the size of all members is allocated. If the estimate is larger, it
raises an error with the figure (`check_planned`). The estimate counts memory that grows with
members and weights, or with rows if a method stores a matrix of them, and the activations that a
step keeps for its backward pass. It does not count Python and torch themselves. It only decides
whether a fit starts; it does not change the result. `planned_parts` divides it by what it is for,
and `smaller_plans` computes it again with settings that take less; `doxa.plan` shows both.

**Precision.** `check_precision` checks whether a fit may use half precision: methods that follow
stochastic gradients may, and methods that need exact values may not.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from doxa.data import Batch, Data, free_memory
from doxa.errors import (
    DoxaError,
    MemoryBudgetError,
    MethodError,
    UnknownSetting,
    deprecated,
    did_you_mean,
)
from doxa.method.run import Run
from doxa.method.stage import Stage
from doxa.method.state import State, flatten_particles, network_part
from doxa.model.model import Network, Problem
from doxa.priors import Normal, Prior
from doxa.registry import get_method

if TYPE_CHECKING:
    from doxa.posterior import Posterior


@dataclass(frozen=True)
class Workload:
    """The size of a fit.

    Parameters
    ----------
    members : int
        Runs × members.
    weights : int
        Trained weights of one network, with the learned noise.
    uncertain : int
        The number of weights in the model's subset.
    brought : int
        Parameters of the method's own modules and layers, for one member.
    rows : int
        The largest number of rows that a member is fitted to.
    columns : int
        Numbers in one row of x.
    outputs : int
        Outputs of the network, or of the method's own functions, for one row.
    features : int
        Inputs of the network's last layer; 0 without a network.
    batch : int
        Rows per step.
    itemsize : int
        Bytes per number.
    draws_budget : int
        Bytes of kept draws in memory; the rest is on disk.
    by_tensor : bool
        Whether steps make no copies of a row of weights (`Run.by_tensor`).
    held_out : bool
        Whether the best state on held-out rows is kept.
    activations : int
        Bytes that a pass through the network keeps for its backward pass, for one row.
    at_once : int
        Members (times particles) whose gradient is computed at once.
    microbatch : int, optional
        The most rows whose gradient is computed at once. None means all rows of a step.
    moments : int
        Numbers per weight that the optimiser keeps.
    parts : bool
        Whether the members are networks that each leave out a part of the rows, before the fit.
    recomputed : int
        What `activations` would be with recompute="blocks"; 0 if it is not known, or if parts are
        computed again already.
    factors : int
        Numbers in the Kronecker factors of one network: the squares of the inputs and of the
        outputs of each tensor of uncertain weights.
    divisible : bool
        Whether each member is trained to its end before the next one begins, if members are
        computed one at a time.
    """

    members: int
    weights: int
    uncertain: int
    brought: int
    rows: int
    columns: int
    outputs: int
    features: int
    batch: int
    itemsize: int
    draws_budget: int
    by_tensor: bool = False
    held_out: bool = False
    activations: int = 0
    at_once: int = 1
    microbatch: int | None = None
    moments: int = 2
    parts: bool = False
    recomputed: int = 0
    factors: int = 0
    divisible: bool = False

    @classmethod
    def of(
        cls, problem: Problem, data: Data, members: int, batch: int, output: Any, inputs: Any,
        draws_budget: int | None, by_tensor: bool = False, at_once: int = 1,
        microbatch: int | None = None, moments: int = 2, parts: bool = False,
        divisible: bool = False,
    ) -> Workload:  # fmt: skip
        model = problem.model
        brought = sum(module.layout.size for module in problem.modules.values())
        uncertain = weights = problem.layout.size
        features = activations = recomputed = factors = 0
        if model is not None:
            brought += model.layers.size
            uncertain = problem.layout.select(model.subset_names).size
            activations, recomputed = model.row_bytes, model.recomputed_bytes
            if model.recomputed:
                activations, recomputed = recomputed or activations, 0
            shapes = [e.shape for e in problem.layout.select(model.subset_names).entries]
            factors = sum(s[0] ** 2 + math.prod(s[1:]) ** 2 for s in shapes if len(s) > 1)
            last = [e.shape for e in problem.layout.entries if e.name == f"{model.head}.weight"]
            features = last[0][-1] if last else 0
        if draws_budget is None:
            draws_budget = free_memory(data.device) // 4
        return cls(
            members, weights, uncertain, brought, max(map(len, data.rows)), _count(inputs),
            _count(output), features, batch, torch.finfo(data.dtype).bits // 8, draws_budget,
            by_tensor, data.validation is not None, activations, at_once, microbatch, moments,
            parts, recomputed, factors, divisible,
        )  # fmt: skip

    @property
    def copy(self) -> int:
        """Bytes of one copy of all members' weights."""
        return self.members * (self.weights + self.brought) * self.itemsize

    @property
    def in_turn(self) -> bool:
        """Whether members are trained one after the other."""
        return self.divisible and self.at_once == 1 and self.members > 1

    @property
    def step_rows(self) -> int:
        """Rows whose gradient is computed at once."""
        return min(self.batch, self.microbatch or self.batch)

    @property
    def step_activations(self) -> int:
        """Bytes that a step keeps for its backward pass."""
        return self.at_once * self.step_rows * self.activations


def drawn_bytes(draws: int, work: Workload) -> int:
    """The memory of a prediction with this number of drawn weights, as measured: some numbers for
    each, in groups of at most 256 MiB / 4 of weights (`posterior/weights.py`)."""
    one, each = work.uncertain * work.itemsize, -(-draws // work.members)
    most = max(1, (64 << 20) // max(1, one))
    if work.members * each <= most:
        return 3 * one * work.members * each
    return int(3.4 * one * min(each, most))


def planned_parts(method: Method, work: Workload) -> dict[str, int]:
    """The peak memory of a fit in bytes, by what it is for; empty parts are not listed.

    Everything but the activations adds up to the method's `planned_bytes`. "working copies" are
    temporary tensors of a step or of a prediction, and matrices of the method."""
    rest, copy = method.planned_bytes(work), work.copy * method.width
    state = method.state_copies
    state = float(work.moments) if state is None else state
    large = work.by_tensor and method.large_copies is not None
    sizes = {
        "weights": copy,
        "state of the method and the optimiser": int(state * copy),
        "gradients": copy // work.members if work.by_tensor else copy,
        "last finite state": copy if large else int((1.0 + state) * copy),
        "held-out copy": copy if work.held_out and method.overfits else 0,
        "draws kept": method.kept_bytes(work),
    }
    parts: dict[str, int] = {}
    for name, size in sizes.items():
        parts[name] = min(size, rest)
        rest -= parts[name]
    parts |= {"working copies": rest, "activations": work.step_activations}
    return {name: size for name, size in parts.items() if size > 0}


def smaller_plans(method: Method, work: Workload) -> dict[str, int]:
    """Changes of settings that need less memory, with the bytes that then are needed, the smallest
    first."""
    single = replace(work, members=1, at_once=1 if work.at_once == 1 else method.width)
    changes = {
        f"microbatch={max(1, work.step_rows // 4)}": replace(
            work, microbatch=max(1, work.step_rows // 4)
        ),
        'engine="loop"': replace(work, at_once=1),
        "draws_budget=0 (draws on disk)": replace(work, draws_budget=0),
        "validation=None (no early stopping, and the fit is not evaluated)": replace(
            single if work.parts else work, held_out=False
        ),
    }
    if work.recomputed:
        changes['recompute="blocks"'] = replace(work, activations=work.recomputed, at_once=1)
    if not work.parts:
        changes["one member at a time, with members=[0], members=[1], …"] = single
    if work.features and work.uncertain > (last := (work.features + 1) * work.outputs):
        factors = work.outputs**2 + work.features**2
        changes['subset="last_layer"'] = replace(work, uncertain=last, factors=factors)
    now = sum(planned_parts(method, work).values())
    found = {text: sum(planned_parts(method, own).values()) for text, own in changes.items()}
    worth = {text: size for text, size in found.items() if size < 0.95 * now}
    return dict(sorted(worth.items(), key=lambda item: item[1]))


def check_planned(method: Method, work: Workload, device: torch.device) -> int:
    """The estimated bytes of a fit; an error if they are not available."""
    parts = planned_parts(method, work)
    need = sum(parts.values())
    if need > free_memory(device):
        what = f"{work.members} members" if work.members > 1 else "one member"
        if work.weights:
            what += f" of {work.weights:,} weights"
        changes = smaller_plans(method, work).items()
        less = "; ".join(f"{text} takes {in_units(size)}" for text, size in changes)
        smaller = f"{less}; or {method.smaller}" if less else method.smaller
        require(need, device, f"{method.name} with {what}", smaller, parts)
    return need


def require(
    need: int, device: torch.device, what: str, smaller: str, parts: Mapping[str, int] | None = None
) -> None:
    """Raise an error with the figures if `need` bytes are not available."""
    free = free_memory(device)
    if need > free:
        each = ", ".join(f"{name} {in_units(size)}" for name, size in (parts or {}).items())
        raise MemoryBudgetError(
            f"{what} takes about {need / 2**30:.3g} GiB ({need} bytes), and {free / 2**30:.3g} GiB "
            f"are available on {device}{f' ({each})' if each else ''}: {smaller}"
        )


def in_units(size: float) -> str:
    """A number of bytes in a readable unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def _count(shapes: Any) -> int:
    """Numbers in a row whose shape is a list of sizes, or a tree of such lists."""
    if isinstance(shapes, dict):
        return sum(map(_count, shapes.values()))
    if isinstance(shapes, list | tuple | torch.Size):
        if all(isinstance(size, int) for size in shapes):
            return math.prod(shapes)
        return sum(map(_count, shapes))
    return sum(leaf for leaf in tree_flatten(shapes)[0] if isinstance(leaf, int)) or 1


@dataclass(frozen=True)
class Alternatives:
    """Settings that are tried where the defaults may learn too little (`driver/alternatives.py`).

    Parameters
    ----------
    prior : Prior, default Normal(3.0)
        The prior, in place of the default N(0, 1).
    rate : float, default 5.0
        A factor of the method's learning rate.
    settings : sequence of dict, default ({},)
        Settings of the method. The fits of all of them are one stacked fit.
    """

    prior: Prior = field(default_factory=lambda: Normal(3.0))
    rate: float = 5.0
    settings: Sequence[Mapping[str, float]] = ({},)


Ends = Literal["[]", "[)", "(]", "()"]  # closed or open ends of an interval

_KEY = "doxa.rule"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The allowed values of one field.

    Parameters
    ----------
    none : bool, default False
        Whether None is allowed.
    per_run : bool, default False
        Whether a grid of runs may vary the field.
    because : str, default ""
        The reason for the rule, if it is not obvious. It is added to the error message.
    """

    none: bool = False
    per_run: bool = False
    because: str = ""

    def allows(self, value: Any) -> bool:
        return self.none if value is None else self.holds(value)

    def words(self, name: str) -> str:
        """The allowed values as text, for the error message after "must be" and for the help."""
        return self.described(name) + (", or None" if self.none else "")

    def holds(self, value: Any) -> bool:
        """Whether a value that is not None is allowed."""
        raise NotImplementedError

    def described(self, name: str) -> str:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Whole(Rule):
    """A whole number of any integer type, from `least` to `most`."""

    least: int
    most: int | None = None

    def holds(self, value: Any) -> bool:
        if not isinstance(value, Integral) or isinstance(value, bool):
            return False
        return self.least <= int(value) and (self.most is None or int(value) <= self.most)

    def described(self, name: str) -> str:
        if self.most is None:
            return f"a whole number, at least {self.least}"
        return f"a whole number from {self.least} to {self.most}"


@dataclass(frozen=True, kw_only=True)
class Number(Rule):
    """A finite number in an interval, or one of those listed in `also`."""

    low: float
    high: float = math.inf
    ends: Ends = "[]"
    also: tuple[float, ...] = ()

    def holds(self, value: Any) -> bool:
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        try:
            number = float(value)
        except OverflowError:  # an integer too large for a float
            return False
        above = number > self.low or (self.ends[0] == "[" and number == self.low)
        below = number < self.high or (self.ends[1] == "]" and number == self.high)
        return (math.isfinite(number) and above and below) or number in self.also

    def described(self, name: str) -> str:
        left, right = ("≤" if end in "[]" else "<" for end in self.ends)
        if self.high == math.inf:
            text = f"a number, {name} {'≥' if left == '≤' else '>'} {self.low:g}"
            text = f"positive ({name} > 0)" if (self.low, left) == (0, "<") else text
        else:
            text = f"a number, {self.low:g} {left} {name} {right} {self.high:g}"
        return ", or ".join([text, *(f"{number:g}" for number in self.also)])


@dataclass(frozen=True, kw_only=True)
class Flag(Rule):
    """True or False; the numbers 0 and 1 are not allowed."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, bool | np.bool_)

    def described(self, name: str) -> str:
        return "True or False"


@dataclass(frozen=True, kw_only=True)
class Choice(Rule):
    """One of some names (None may be among them), or an object of one of some types."""

    choices: tuple[str | None, ...] = ()
    kinds: Any = ()  # as isinstance takes them
    called: str = ""  # a description of the objects, for messages

    def holds(self, value: Any) -> bool:
        named = isinstance(value, str) and value in self.choices
        return named or isinstance(value, self.kinds)

    def allows(self, value: Any) -> bool:
        return (value is None and None in self.choices) or super().allows(value)

    def described(self, name: str) -> str:
        names = "one of " + ", ".join(map(repr, self.choices)) if self.choices else ""
        return ", or ".join(filter(None, [names, self.called]))


def whole(
    default: int | None, least: int, most: int | None = None, *, per_run: bool = False
) -> Any:
    """A whole number, at least `least` and at most `most` (None: no limit)."""
    return _declared(default, Whole(none=default is None, per_run=per_run, least=least, most=most))


def positive(default: float | None, *, per_run: bool = False) -> Any:
    """A finite number above zero."""
    return _declared(default, Number(none=default is None, per_run=per_run, low=0, ends="()"))


def between(
    default: float | None,
    low: float,
    high: float,
    ends: Ends = "[]",
    *,
    also: tuple[float, ...] = (),
    because: str = "",
    per_run: bool = False,
) -> Any:
    """A number from `low` to `high`, or one of the values in `also`. `ends` gives open and closed
    ends."""
    rule = Number(
        none=default is None, per_run=per_run, because=because,
        low=low, high=high, ends=ends, also=also,
    )  # fmt: skip
    return _declared(default, rule)


def flag(default: bool | None) -> Any:
    """True or False."""
    return _declared(default, Flag(none=default is None))


_FIRST: Any = object()


def one_of(*choices: str | None, default: Any = _FIRST, or_a: Any = (), called: str = "") -> Any:
    """One of some names, or an object of the types `or_a`, which messages describe as `called`. The
    default is the first name, unless `default` is given."""
    rule = Choice(choices=choices, kinds=or_a, called=called)
    return _declared(choices[0] if default is _FIRST else default, rule)


def plain(default: Any, kind: Any, called: str) -> Any:
    """An object of one or several types, which messages describe as `called`. The method checks its
    content itself."""
    return _declared(default, Choice(none=default is None, kinds=kind, called=called))


def rules(method: Any) -> dict[str, Rule]:
    """The declared rules of a method or of its class, by field."""
    declared = {f.name: f.metadata.get(_KEY) for f in dataclasses.fields(method)}
    return {name: rule for name, rule in declared.items() if rule is not None}


def check_fields(method: Any) -> None:
    """Check each field against its rule; the error message contains the allowed values."""
    for name, rule in rules(method).items():
        value = getattr(method, name)
        if not rule.allows(value):
            endless = isinstance(value, float | np.floating) and not math.isfinite(value)
            because = rule.because or ("it has to be finite" if endless else "")
            message = f"{name} must be {rule.words(name)}, not {value!r}"
            raise MethodError(f"{message}: {because}" if because else message)


def _declared(default: Any, rule: Rule) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: rule})


P = ParamSpec("P")
R = TypeVar("R")

_TAKEN: dict[str, tuple[str, ...]] = {}  # keywords of each function that takes a method


def keywords(**checks: Callable[[str, Any], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator for functions that take a `method`.

    An unknown keyword is an error with a suggestion. `checks` maps keywords to functions that check
    a value other than the default before the call."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        known = signature.parameters
        _TAKEN[function.__name__] = tuple(known)

        @wraps(function)
        def checked(*args: P.args, **given: P.kwargs) -> R:
            for name, value in given.items():
                if name not in known:
                    rest = {key: value for key, value in given.items() if key in known}
                    arguments = signature.bind_partial(*args, **rest).arguments
                    method = arguments.get("method", known["method"].default)
                    message = _unknown(function.__name__, name, value, method, tuple(known))
                    raise UnknownSetting(message)
                if name in checks and value is not known[name].default:
                    given[name] = checks[name](name, value)
            return function(*args, **given)

        return checked

    return decorated


def _unknown(function: str, name: str, value: Any, method: Any, known: Sequence[str]) -> str:
    message = f"doxa.{function} has no keyword {name!r}"
    cls = _class(method)
    own = [] if cls is None else list(inspect.signature(cls).parameters)
    renamed = cls.renamed if cls is not None and issubclass(cls, Method) else {}
    now = renamed.get(name, name)
    if cls is not None and now in own:
        return f"{message}: it is a setting of the method, doxa.{cls.__name__}({now}={value!r})"
    return f"{message}{did_you_mean(name, [*known, *own], renamed=renamed)}"


def _class(method: Any) -> type | None:
    if isinstance(method, str):
        try:
            return get_method(method)
        except DoxaError:
            return None
    return method if isinstance(method, type) else type(method)


def check_settings(cls: type[Method], values: Sequence[Any], settings: Mapping[str, Any]) -> None:
    """Check that the class of a method has all the given settings."""
    parameters = inspect.signature(cls.__init__).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    known = [name for name in parameters if name != "self"]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    for name, value in settings.items():
        if name in known:
            continue
        message = f"{cls.__name__} has no setting {name!r}"
        for function in sorted(_TAKEN, key=lambda function: (function != "fit", function)):
            if name in _TAKEN[function]:
                message += f": give it to doxa.{function}(..., {name}={value!r})"
                raise UnknownSetting(message)
        raise UnknownSetting(f"{message}{did_you_mean(name, known, renamed=cls.renamed)}")
    if len(values) > len(known) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise UnknownSetting(
            f"{cls.__name__} has {len(known)} settings, but {len(values)} values were given: pass "
            "them by keyword"
        )


class _Renaming(type):
    """The metaclass of methods: old names and values of settings are translated before a method is
    made. The constructor of a dataclass accepts its fields only."""

    if not TYPE_CHECKING:  # type checkers see the constructor of the dataclass

        def __call__(cls, *values: Any, **settings: Any) -> Any:
            known = dataclasses.is_dataclass(cls) and values
            fields = [f.name for f in dataclasses.fields(cls) if f.init] if known else []
            given = dict(zip(fields, values, strict=False))  # too many: an error of the constructor
            settings = cls.current_settings(settings, given)
            first = cls.current_settings(given).values()
            return super().__call__(*first, *values[len(fields) :], **settings)

        @property
        def __signature__(cls) -> inspect.Signature:
            own = inspect.signature(cls.__init__)
            return own.replace(parameters=list(own.parameters.values())[1:])


class Method(metaclass=_Renaming):
    """Base of all methods. Subclasses are frozen dataclasses; their fields are declared with the
    allowed values (`doxa.method.method`)."""

    name: ClassVar[str]
    renamed: ClassVar[Mapping[str, str]] = {}  # old name of a setting: its name
    renamed_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # setting: {old value: value}
    default_members: ClassVar[int] = 1
    default_steps: ClassVar[int] = 2000
    default_rate: ClassVar[float] = 1e-2
    default_batch: ClassVar[int] = 128
    overfits: ClassVar[bool] = False  # it can overfit: rows are held out by default
    shrinks: ClassVar[bool] = False  # it may collapse to its prior: training rows are checked
    needs_network: ClassVar[bool] = True
    uses_rate: ClassVar[bool] = True  # a grid over lr changes something
    rate_by_network: ClassVar[bool] = False  # the default rate suits the network (`optim.rate_for`)
    regression_only: ClassVar[bool] = False
    sums_over_rows: ClassVar[bool] = True  # its objective is one: `microbatch` divides it
    is_ensemble: ClassVar[bool] = False  # more members are the way to a wider posterior
    # The settings with which held-out rows choose the prior scale; empty: they cannot.
    by_held_out: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    # Settings that are tried besides the defaults; None: no others (`driver/alternatives.py`).
    alternatives: ClassVar[Alternatives | None] = None
    # How it reads rows that are not in memory (`data/streams.py`): by mini-batches alone, also by
    # passes over all rows, or not at all.
    streams: ClassVar[Literal["batches", "passes"] | None] = None
    # What several processes can divide among themselves: "members", the "rows" of sums over all
    # rows (`method/row_sums.py`), "both" or "none".
    shares: ClassVar[str] = "members"
    half_precision: ClassVar[bool] = False  # its network may compute in bfloat16
    own_weights: ClassVar[bool] = False  # `prepare` makes weights that are not the given network's
    modules_stack: ClassVar[bool] = False  # the method's own modules run under vmap
    copies: ClassVar[float] = 24.0  # copies of all weights at the peak of a fit, as measured
    # Copies of all members' weights, and of one member's, at the peak of a fit of a large network
    # whose steps make none; None: `copies`. With held-out rows, there is one more of `best_copies`.
    large_copies: ClassVar[tuple[float, float] | None] = None
    best_copies: ClassVar[float] = 1.0
    # Copies of all weights in the state besides the weights; None: the optimiser's moments.
    state_copies: ClassVar[float | None] = None
    # Settings that may change between two steps (`doxa.method.trace`): each is per run, or belongs
    # to the state (`change`).
    controls: ClassVar[tuple[str, ...]] = ()
    predicted_draws: ClassVar[int] = 0  # draws of the weights held at once to predict held-out rows
    # Advice in the error message if memory is short:
    smaller: ClassVar[str] = (
        "fit fewer members or runs at a time, a smaller network, or subset='last_layer'"
    )

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        check_settings(cls, values, settings)
        return super().__new__(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            now = type(self).renamed.get(name)
            if now is None:
                return object.__getattribute__(self, name)  # with the usual error
            deprecated(f"{type(self).__name__}.{name}", now)
            return getattr(self, now)

    @classmethod
    def current_settings(
        cls, settings: Mapping[str, Any], given: Iterable[str] = (), warn: bool = True
    ) -> dict[str, Any]:
        """Settings by their current names and with current values.

        Parameters
        ----------
        settings : dict
            Settings, some perhaps by an old name or with an old value.
        given : iterable of str
            Settings that are given besides, as positional arguments.
        warn : bool
            Whether an old name or value gives a warning. False for files: their user wrote none.
        """
        current: dict[str, Any] = {}
        for name, value in settings.items():
            now = cls.renamed.get(name, name)
            if now != name:
                if now in given or now in settings or now in current:
                    raise MethodError(
                        f"{cls.__name__} is given {now} twice: {name} is its old name"
                    )
                if warn:
                    deprecated(f"{cls.__name__}({name}=...)", f"{now}=...")
            old = cls.renamed_values.get(now, {})
            if isinstance(value, str) and value in old:
                if warn:
                    deprecated(f"{cls.__name__}({now}={value!r})", f"{now}={old[value]!r}")
                value = old[value]
            current[now] = value
        return current

    def __post_init__(self) -> None:
        """Check the fields. Conditions on two fields are checked after super().__post_init__()."""
        check_fields(self)

    @property
    def per_run(self) -> tuple[str, ...]:
        """The fields that a grid of runs may vary."""
        return tuple(name for name, rule in rules(self).items() if rule.per_run)

    @property
    def width(self) -> int:
        """Parameter vectors (particles) per member: the engine is chosen for members × width."""
        return 1

    def piece_rows(self, size: int) -> int:
        """The rows of a piece of a batch, of which the user allows `size` (`microbatch`)."""
        return size

    @property
    def row_work(self) -> int | None:
        """The multiplications per row and member of the sums over rows that it divides. None: one
        for each weight of the network."""
        return None

    def num_particles_on(self, problem: Problem) -> int:
        """The number of particles per member for a prepared problem, if it depends on it."""
        return self.width

    def alternatives_on(self, problem: Problem) -> Alternatives | None:
        """The alternatives for a problem before `prepare`, if they depend on it."""
        return self.alternatives

    @property
    def gradients(self) -> tuple[int, int] | None:
        """The smallest and largest number of full-data gradients per chain, as a measure of cost.
        None if the number of steps determines the cost."""
        return None

    @property
    def holds_out(self) -> bool:
        """Whether `validation="auto"` holds out rows."""
        return self.overfits

    @property
    def kept_draws(self) -> int:
        """The largest number of times that the stages keep `parameters`."""
        return 0

    def planned_bytes(self, work: Workload) -> int:
        """The peak memory of a fit: state, gradients, copies and kept draws. It is right to a
        factor of two; for large networks with `large_copies`, within 15 %.
        `doxa.method.method` lists what is not counted."""
        kept = self.kept_bytes(work)
        if work.by_tensor and self.large_copies is not None:
            return self.training_bytes(work) + kept
        return self.training_bytes(work) + kept + drawn_bytes(self.predicted_draws, work)

    def kept_bytes(self, work: Workload) -> int:
        """The part of `planned_bytes` that is kept draws. Those of members that are trained one
        after the other are joined at the end, which takes a copy."""
        kept = min(self.kept_draws * work.copy * self.width, work.draws_budget)
        return 2 * kept if work.in_turn else kept

    def training_bytes(self, work: Workload) -> int:
        """The part of `planned_bytes` that steps need. Where members are trained one after the
        other, it is that of one of them, and what is kept of the others: of a large network, what
        the posterior is made of (`best_copies`); of others the state, and a copy of the weights."""
        if work.by_tensor and self.large_copies is not None:
            every, one = self.large_copies
            every += self.best_copies * (work.held_out and self.overfits)
            done = self.best_copies
        else:
            every, one = self.copies, 0.0
            done = 2.0 + (work.moments if self.state_copies is None else self.state_copies)
        rows = every * work.members + one
        if work.in_turn:
            rows = min(rows, every + one + done * work.members)
        return int(rows * work.copy * self.width / work.members)

    def reads_inputs(self, run: Run) -> bool:
        """Whether x is used other than as the network's input. The outputs of a frozen trunk are
        then not computed once, in place of x."""
        return False

    def prepare(self, problem: Problem) -> Problem:
        """Replace layers in a copy of the network, or add the method's own modules.

        It is also called when a posterior is loaded, and sees the same then: layers and their
        shapes, everything that `Model.build` found, the likelihood, prior and subset (names in
        place of a predicate). The values of weights and buffers are other ones: the result must not
        depend on them."""
        return problem

    def streamed_row_weights(self, keys: Sequence[str], numbers: Tensor) -> Tensor | None:
        """A weight for each member and row of a stream, [M, N], from the keys of the members
        (`Run.keys`) and the numbers of the rows; their mean is 1. None: no weights."""
        return None

    def row_weights(self, run: Run) -> Tensor | None:
        """Weights of the rows for each member, [M, N]. They are multiplied by the user's."""
        return None

    def stages(self, run: Run) -> Iterable[Stage]:
        raise NotImplementedError

    def init(self, run: Run) -> State:
        """The initial state: named tensors, each with leading axis M."""
        return run.init_network()

    def check_setting(self, name: str, values: Sequence[float]) -> None:
        """An error if a setting may not have one of these values."""
        rule = rules(self).get(name)
        for each in values:
            if isinstance(rule, Number) and not rule.allows(each):
                raise MethodError(f"{name} must be {rule.words(name)}, not {each!r}")

    def change(self, run: Run, state: State, name: str, value: Tensor) -> tuple[Run, State]:
        """The run and the state in which one of the `controls` has the value [M]."""
        return replace(run, hyper={**run.hyper, name: value}), state

    def restart(self, run: Run, state: State, theta: Tensor) -> State:
        """The state in which the weights are others, [M, P] or [M, K, P], as at a new start."""
        return {**state, "theta": theta}

    def parameters(self, run: Run, state: State) -> Tensor:
        """The current weights of each member, [M, P], or of its particles, [M, K, P]. `keep` stores
        them, and validation scores them."""
        return state["theta"]

    def score(self, run: Run, state: State, batch: Batch) -> Tensor:
        """The log-likelihood of held-out rows, [M], for early stopping. It is averaged over
        particles as in a prediction."""
        theta = self.parameters(run, state)
        if theta.ndim == 2:
            return run.log_likelihood(theta, batch, state)
        k = theta.shape[1]
        inner = flatten_particles(network_part(state), k)
        each = run.expand_particles(k).log_likelihoods(
            theta.flatten(0, 1), batch.expand_particles(k), inner
        )
        mixed = torch.logsumexp(each.unflatten(0, (-1, k)), 1) - math.log(k)  # [M, B]
        weight = 1.0 if batch.weight is None else batch.weight
        return (mixed * weight).sum(-1) * batch.scale

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        """The posterior of one run. `state` and `run` contain the members of that run only."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


def as_method(spec: str | Method | type[Method]) -> Method:
    """A method object from a name, a class or a method object."""
    if isinstance(spec, str):
        named: Method = get_method(spec)()
        return named
    if isinstance(spec, type) and issubclass(spec, Method):
        return spec()
    if isinstance(spec, Method):
        return spec
    raise MethodError(f"method must be a name or a method object, not {spec!r}")


def check_precision(precision: str, method: Method, run: Run) -> None:
    """An error if the precision is unknown, or not accurate enough for the method."""
    if precision == "full":
        return
    if precision not in ("bfloat16", "tf32"):
        raise MethodError(f"precision must be 'full' or 'bfloat16' or 'tf32', not {precision!r}")
    if not method.half_precision or not isinstance(run.problem, Network):
        raise MethodError(
            f"{method.name} computes in full precision only: the three digits of {precision} are "
            "not enough for acceptance steps, curvature and kernels; do not set precision"
        )
    if run.dtype != torch.float32:
        raise MethodError(
            f"precision={precision!r} is mixed with float32, not {run.dtype}: give "
            "dtype=torch.float32"
        )
    if precision == "tf32" and run.device.type != "cuda":
        raise MethodError(
            f"precision='tf32' is of CUDA devices, and the fit is on {run.device}: give "
            "device='cuda', or do not set precision"
        )
