"""The protocol every method follows.

A method is a frozen dataclass of hyper-parameters. It says what it fits (`prepare`), where it
starts (`init`), which `Stage`s it runs, and what comes out (`finish`); each stage's step advances
all members at once.

What a method's field may hold, said once, where the field is declared.

    draws: int = whole(100, least=1)
    step: float | None = positive(None, per_run=True)
    friction: float = between(0.1, 0, 1, ends="(]")
    correction: str = one_of("freeze", "none", "gamma")

Each helper gives a dataclass field with its default and a `Rule`. The check of a method's settings
(`check_fields`), the flags of the command line and their help read that rule, and nothing else says
what is allowed. A default of None allows None, which stands for what `fit` or the data decide.
`per_run=True` lets a grid of runs vary the field: its values are then [M], one a member. What two
fields ask of each other is checked by the method.

Keywords that nothing takes: an error that says where they belong, or what was meant.

What a method is about are its own settings, `doxa.HMC(draws=10)`; what every fit has are those of
`fit`, `doxa.fit(..., members=4)`. Each says so of what is the other's.

Which fits may compute in half precision: what climbs, and not what must be exact.

How much memory a fit takes, planned before it is taken.

`fit` asks the method for `planned_bytes` of the `Workload` and refuses, with the figure, what is
larger than the memory that is available. Nothing of the size of all members has been allocated by
then. The plan counts what grows with members and weights, or with rows where a method holds a
matrix of them; activations of a batch and what Python and torch take themselves come on top. It
decides whether a fit starts, and nothing about its result.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from doxa.data import Batch, Data, free_memory
from doxa.errors import DoxaError, MemoryBudgetError, MethodError, UnknownSetting, did_you_mean
from doxa.method.run import Run
from doxa.method.stage import Stage
from doxa.method.state import State, flatten_particles, network_part
from doxa.model.model import Network, Problem
from doxa.registry import get_method

if TYPE_CHECKING:
    from doxa.posterior import Posterior


@dataclass(frozen=True)
class Workload:
    """How large a fit is.

    Parameters
    ----------
    members: runs × members.
    weights: trained weights of one network, with learned noise.
    uncertain: those of them in the model's subset.
    brought: parameters of the modules and layers that the method brings, for one member.
    rows: the most rows that a member is fitted to.
    columns: numbers in one row of x.
    outputs: outputs of the network at one row, or of a method's own functions.
    features: inputs of the network's last layer; 0 without a network.
    batch: rows of a step.
    itemsize: bytes of a number.
    draws_budget: bytes of kept draws that stay in memory; the rest is on disk.
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

    @classmethod
    def of(
        cls, problem: Problem, data: Data, members: int, batch: int, output: Any, inputs: Any,
        draws_budget: int | None,
    ) -> Workload:  # fmt: skip
        model = problem.model
        brought = sum(module.layout.size for module in problem.modules.values())
        uncertain = weights = problem.layout.size
        features = 0
        if model is not None:
            brought += model.layers.size
            uncertain = problem.layout.select(model.subset_names).size
            last = [e.shape for e in problem.layout.entries if e.name == f"{model.head}.weight"]
            features = last[0][-1] if last else 0
        if draws_budget is None:
            draws_budget = free_memory(data.device) // 4
        return cls(
            members, weights, uncertain, brought, max(map(len, data.rows)), _count(inputs),
            _count(output), features, batch, torch.finfo(data.dtype).bits // 8, draws_budget,
        )  # fmt: skip

    @property
    def copy(self) -> int:
        """Bytes of all members' weights, once."""
        return self.members * (self.weights + self.brought) * self.itemsize


def check_planned(method: Method, work: Workload, device: torch.device) -> int:
    """The bytes that a fit will take; an error where they are not available."""
    need = method.planned_bytes(work)
    what = f"{work.members} members" if work.members > 1 else "one member"
    if work.weights:
        what += f" of {work.weights:,} weights"
    require(need, device, f"{method.name} with {what}", method.smaller)
    return need


def require(need: int, device: torch.device, what: str, smaller: str) -> None:
    """An error that gives the figure, where so many bytes are not available."""
    free = free_memory(device)
    if need > free:
        raise MemoryBudgetError(
            f"{what} takes about {need / 2**30:.3g} GiB ({need} bytes), and {free / 2**30:.3g} GiB "
            f"are available on {device}: {smaller}"
        )


def _count(shapes: Any) -> int:
    """Numbers in a row whose shape is a list of sizes, or in a tree of such."""
    if isinstance(shapes, dict):
        return sum(map(_count, shapes.values()))
    if isinstance(shapes, list | tuple | torch.Size):
        if all(isinstance(size, int) for size in shapes):
            return math.prod(shapes)
        return sum(map(_count, shapes))
    return sum(leaf for leaf in tree_flatten(shapes)[0] if isinstance(leaf, int)) or 1


Ends = Literal["[]", "[)", "(]", "()"]  # which ends of an interval belong to it

_KEY = "doxa.rule"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one field may hold.

    none: None is allowed. per_run: a grid of runs may vary it. because: the reason for the rule,
    where its words alone would not say.
    """

    none: bool = False
    per_run: bool = False
    because: str = ""

    def allows(self, value: Any) -> bool:
        return self.none if value is None else self.holds(value)

    def words(self, name: str) -> str:
        """What is allowed, as it stands after "must be" and in the help."""
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
        except OverflowError:  # a whole number that no float holds
            return False
        above = number > self.low or (self.ends[0] == "[" and number == self.low)
        below = number < self.high or (self.ends[1] == "]" and number == self.high)
        return (math.isfinite(number) and above and below) or number in self.also

    def described(self, name: str) -> str:
        left, right = ("≤" if end in "[]" else "<" for end in self.ends)
        if self.high == math.inf:
            words = f"a number, {name} {'≥' if left == '≤' else '>'} {self.low:g}"
            words = f"positive ({name} > 0)" if (self.low, left) == (0, "<") else words
        else:
            words = f"a number, {self.low:g} {left} {name} {right} {self.high:g}"
        return ", or ".join([words, *(f"{number:g}" for number in self.also)])


@dataclass(frozen=True, kw_only=True)
class Flag(Rule):
    """True or False; 0 and 1 are numbers."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, bool | np.bool_)

    def described(self, name: str) -> str:
        return "True or False"


@dataclass(frozen=True, kw_only=True)
class Choice(Rule):
    """One of some names (None may be among them), or an object of one of some types."""

    choices: tuple[str | None, ...] = ()
    kinds: Any = ()  # as isinstance takes them
    called: str = ""  # the objects, in words

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
    """A whole number, at least `least` and, where it is given, at most `most`."""
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
    """A number from `low` to `high`, with or without either end; `also` are values besides."""
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
    """One of some names, the first unless `default` says which; or an object of a type (or one of
    some), `called` in words."""
    rule = Choice(choices=choices, kinds=or_a, called=called)
    return _declared(choices[0] if default is _FIRST else default, rule)


def plain(default: Any, kind: Any, called: str) -> Any:
    """An object of a type (or one of some), `called` in words: the method looks into it itself."""
    return _declared(default, Choice(none=default is None, kinds=kind, called=called))


def rules(method: Any) -> dict[str, Rule]:
    """The declared rules of a method or of its class, by field."""
    declared = {f.name: f.metadata.get(_KEY) for f in dataclasses.fields(method)}
    return {name: rule for name, rule in declared.items() if rule is not None}


def check_fields(method: Any) -> None:
    """Each field holds what it declares, or an error says what that is."""
    for name, rule in rules(method).items():
        value = getattr(method, name)
        if not rule.allows(value):
            endless = isinstance(value, float | np.floating) and not math.isfinite(value)
            because = rule.because or ("it has to be finite" if endless else "")
            said = f"{name} must be {rule.words(name)}, not {value!r}"
            raise MethodError(f"{said}: {because}" if because else said)


def _declared(default: Any, rule: Rule) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: rule})


P = ParamSpec("P")
R = TypeVar("R")

_TAKEN: dict[str, tuple[str, ...]] = {}  # by functions that take a method, beside it


def keywords(**checks: Callable[[str, Any], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function that takes a `method`: unknown keywords are an error with a suggestion, and
    what a person gives for those named here, other than the default, is checked first."""

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
                    said = _not_ours(function.__name__, name, value, method, tuple(known))
                    raise UnknownSetting(said)
                if name in checks and value is not known[name].default:
                    given[name] = checks[name](name, value)
            return function(*args, **given)

        return checked

    return decorated


def _not_ours(function: str, name: str, value: Any, method: Any, known: Sequence[str]) -> str:
    said = f"doxa.{function} has no keyword {name!r}"
    cls = _class(method)
    own = [] if cls is None else list(inspect.signature(cls).parameters)
    if cls is not None and name in own:
        return f"{said}: it is a setting of the method, doxa.{cls.__name__}({name}={value!r})"
    return f"{said}{did_you_mean(name, [*known, *own])}"


def _class(method: Any) -> type | None:
    if isinstance(method, str):
        try:
            return get_method(method)
        except DoxaError:
            return None
    return method if isinstance(method, type) else type(method)


def check_settings(cls: type, values: Sequence[Any], settings: Mapping[str, Any]) -> None:
    """The settings given to a method's class are its own."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    kinds = {parameter.kind for parameter in parameters.values()}
    known = [name for name in parameters if name != "self"]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    for name, value in settings.items():
        if name in known:
            continue
        said = f"{cls.__name__} has no setting {name!r}"
        for function in sorted(_TAKEN):
            if name in _TAKEN[function]:
                said += f": give it to doxa.{function}(..., {name}={value!r})"
                raise UnknownSetting(said)
        raise UnknownSetting(f"{said}{did_you_mean(name, known)}")
    if len(values) > len(known) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise UnknownSetting(
            f"{cls.__name__} has {len(known)} settings, {len(values)} values were given: name them"
        )


class Method:
    """Base of all methods: subclasses are frozen dataclasses, whose fields declare what they may
    hold (`doxa.method.method`)."""

    name: ClassVar[str]
    default_members: ClassVar[int] = 1
    default_steps: ClassVar[int] = 2000
    default_rate: ClassVar[float] = 1e-2
    default_batch: ClassVar[int] = 128
    overfits: ClassVar[bool] = False  # it learns rows by heart, if it is let
    shrinks: ClassVar[bool] = False  # it may end at its prior: training rows tell
    needs_network: ClassVar[bool] = True
    uses_rate: ClassVar[bool] = True  # a grid over lr changes something
    regression_only: ClassVar[bool] = False
    half_precision: ClassVar[bool] = False  # its network may compute in bfloat16
    modules_stack: ClassVar[bool] = False  # modules that it brings run under vmap
    copies: ClassVar[float] = 24.0  # of all weights that a fit holds at its peak, as measured
    predicted_draws: ClassVar[int] = 0  # weights drawn at once to predict held-out rows
    # What to do where memory is short:
    smaller: ClassVar[str] = (
        "fit fewer members or runs at a time, a smaller network, or subset='last_layer'"
    )

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        check_settings(cls, values, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """A method that compares two of its fields does so after super().__post_init__()."""
        check_fields(self)

    @property
    def per_run(self) -> tuple[str, ...]:
        """The fields that a grid of runs may vary."""
        return tuple(name for name, rule in rules(self).items() if rule.per_run)

    @property
    def width(self) -> int:
        """Parameter vectors inside a member: the engine is chosen for members × width."""
        return 1

    def num_particles_on(self, problem: Problem) -> int:
        """The same for a problem that was prepared, where it depends on that."""
        return self.width

    @property
    def gradients(self) -> tuple[int, int] | None:
        """The least and the most gradients on all rows that a chain takes: what the cost of such a
        method is. None where the number of steps says it."""
        return None

    @property
    def holds_out(self) -> bool:
        """Whether rows are held out of a fit, unless the user says which."""
        return self.overfits

    @property
    def kept_draws(self) -> int:
        """How many times the stages keep `parameters`, at most."""
        return 0

    def planned_bytes(self, work: Workload) -> int:
        """What a fit holds at its peak, to a factor of two: its state, gradients, copies and kept
        draws. See `doxa.method.method` for what is not counted."""
        particles = work.copy * self.width
        kept = min(self.kept_draws * particles, work.draws_budget)
        predicting = self.predicted_draws * work.weights * work.itemsize
        return int(self.copies * particles) + kept + predicting

    def prepare(self, problem: Problem) -> Problem:
        """Rewrite the network on a copy, or bring modules of the method's own."""
        return problem

    def row_weights(self, run: Run) -> Tensor | None:
        """Weights of the data set's rows for each member, [M, N], on top of the user's."""
        return None

    def stages(self, run: Run) -> Iterable[Stage]:
        raise NotImplementedError

    def init(self, run: Run) -> State:
        """Named tensors, each with leading axis M."""
        return run.init_network()

    def parameters(self, run: Run, state: State) -> Tensor:
        """The current weights of each member, [M, P], or [M, K, P] of its particles: what `keep`
        stores and validation scores."""
        return state["theta"]

    def score(self, run: Run, state: State, batch: Batch) -> Tensor:
        """The log-likelihood of held-out rows, [M]: what early stopping watches. Particles are
        averaged as in a prediction."""
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
        """The posterior of one run: state and run hold that run's members only."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


def as_method(spec: str | Method | type[Method]) -> Method:
    """A method from its name, its class, or itself."""
    if isinstance(spec, str):
        return get_method(spec)()
    if isinstance(spec, type) and issubclass(spec, Method):
        return spec()
    if isinstance(spec, Method):
        return spec
    raise MethodError(f"method must be a name or a method object, not {spec!r}")


def in_half(precision: str, method: Method, run: Run) -> bool:
    """Of a precision that is not the full one: True, or an error where bfloat16 would be no
    approximation to be content with."""
    if precision != "bfloat16":
        raise MethodError(f"precision must be 'full' or 'bfloat16', not {precision!r}")
    if not method.half_precision or not isinstance(run.problem, Network):
        raise MethodError(
            f"{method.name} computes in full precision only: accept steps, curvature and kernels "
            "are lost in the three digits of bfloat16; leave precision= out"
        )
    if run.dtype != torch.float32:
        raise MethodError(
            f"precision='bfloat16' is mixed with float32, not {run.dtype}: give dtype=torch.float32"
        )
    return True
