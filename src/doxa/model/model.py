"""A network, a likelihood and a prior as pure functions of a parameter dict.

    log p(θ, D) = log p(θ) + Σ_i log p(y_i | f(x_i; θ))

`Model` works on a copy of the user's network, which is never changed. Only this package uses
`nn.Module` objects; all other code uses flat parameter vectors (`layout`), forward passes and
log-likelihoods per example. `build` runs one row through the network, to find what methods need to
know of it: the shapes of layers, their noise, the last layer, and the buffers that training writes.

**Outputs** (`pick`). A network returns a tensor, or a tuple of heads. If it returns a dict, a
dataclass or a named tuple, the likelihood applies to the output named in `Model(net, output=...)`,
else to "logits", else to the only tensor.

**Subset** (`chosen`). The uncertain weights are all weights, those of the last layer, or those
selected by a predicate, by names or by shell patterns ("*lora_*" for adapters). Parameters with
`requires_grad=False` are not weights: they are constants, shared by all members. Layers of
constants that run before all trained ones are a trunk (`doxa.model.trunk`), which is always in
evaluation mode.

**Problems.** A method fits one of

    Network        a `Model` and rows: log p(θ) + Σ log p(y | f(x; θ))
    LogDensity     any log density of a flat vector, without rows
    NoNetwork      the method's own functions only (a GP, a linear model, a neural process)

Each may also have `modules` of the method (a flow, an auxiliary network, a kernel).
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from doxa import likelihoods, nets
from doxa.errors import DoxaError, MethodError, ModelError, deprecated
from doxa.likelihoods import Heads
from doxa.linalg.layout import LARGE, Entry, Layout, Params
from doxa.model.functional import (
    Functional,
    Part,
    check_parts,
    find_parts,
    parts_of_pass,
    recomputed_bytes,
)
from doxa.model.inspection import (
    Start,
    bytes_per_row,
    draws_itself,
    duplicate,
    failure,
    freeze_layers,
    fresh_rows,
    inputs_of,
    inputs_of_rows,
    lies_in,
    look,
    masked_layers,
    noise_sites,
    probe,
    trainable,
    watched,
)
from doxa.model.layers import (
    Shape,
    Site,
    swap_dropout,
    unfuse_attention,
    without_cache,
    without_checkpointing,
)
from doxa.model.plan import Plan
from doxa.model.trunk import Split, Trunk, find
from doxa.noise import drawing
from doxa.priors import BoundPrior, Normal, bind

log = logging.getLogger("doxa")

Name = str | tuple[str, ...] | None


def output_name(name: Any) -> str | tuple[str, ...]:
    """The name of an output, or the names of several, checked."""
    if isinstance(name, str):
        return name
    if not isinstance(name, tuple | list) or not all(isinstance(each, str) for each in name):
        raise ModelError(
            f"output must be the name of an output, or a tuple of names for several heads, not "
            f"{name!r}"
        )
    return tuple(name)


def pick(given: Any, name: Name, heads: bool) -> Any:
    """The output to which the likelihood applies. `heads`: there is one likelihood per output."""
    if name is None and (isinstance(given, Tensor) or (heads and isinstance(given, tuple))):
        return given
    parts = _parts(given)
    if parts is None:
        if name is None:
            return given
        raise ModelError(
            f"the network returns a {type(given).__name__}, which has no named outputs: remove "
            f"output={name!r}"
        )
    if name is None:
        name = _only(parts, heads)
    missing = [n for n in ((name,) if isinstance(name, str) else name) if n not in parts]
    if missing:
        raise ModelError(f"the network has no output named {missing[0]!r}; {_there_are(parts)}")
    return parts[name] if isinstance(name, str) else tuple(parts[each] for each in name)


def _parts(given: Any) -> dict[str, Any] | None:
    """The named outputs that are not None; None if the outputs have no names."""
    if isinstance(given, Mapping):  # also the output class of transformers, without None values
        parts = dict(given)
    elif is_dataclass(given):
        parts = {field.name: getattr(given, field.name) for field in fields(given)}
    elif hasattr(given, "_asdict"):
        parts = given._asdict()
    elif isinstance(given, Tensor | list | tuple) or not hasattr(given, "__dict__"):
        return None
    else:
        parts = vars(given)
    return {name: part for name, part in parts.items() if part is not None}


def _only(parts: Mapping[str, Any], heads: bool) -> str:
    """The output that is used if no name is given."""
    tensors = [name for name, part in parts.items() if isinstance(part, Tensor)]
    if not heads and "logits" in tensors:
        return "logits"
    if not heads and len(tensors) == 1:
        return tensors[0]
    example = repr(tuple(tensors)) if heads else repr(tensors[0]) if tensors else "…"
    raise ModelError(
        f"the network returns several named outputs; {_there_are(parts)}: name the output for "
        f"the likelihood, like Model(net, output={example})"
    )


def _there_are(parts: Mapping[str, Any]) -> str:
    return f"there are {', '.join(map(repr, parts)) or 'none'}"


def check_rows(one: Any, two: Any) -> None:
    """Check that outputs for one row and for two are tensors whose first axis is the rows."""
    given = [v if isinstance(v, list | tuple) else (v,) for v in (one, two)]
    for count, leaves in enumerate(given, 1):
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ModelError(
                    "the network must return a tensor, or a tuple of tensors for several heads, "
                    "not "
                    f"{type(leaf).__name__}"
                )
            if leaf.ndim == 0 or leaf.shape[0] != count:
                raise ModelError(
                    f"the network returns shape {list(leaf.shape)} for {count} row(s) of x: the "
                    "first axis must be the rows, also for one row: use squeeze(-1), not squeeze()"
                )


Subset = str | Callable[[str], bool] | tuple[str, ...]


def chosen(subset: Subset, names: Sequence[str], head: str | None) -> tuple[str, ...]:
    """The uncertain weights of a network; `head` is the layer that runs last."""
    if subset == "all":
        return tuple(names)
    if subset == "last_layer":
        if head is None:
            raise ModelError("subset='last_layer' needs model.build(x) first")
        prefix = f"{head}." if head else ""
        found = [name for name in names if name.startswith(prefix)]
    elif callable(subset):
        found = [name for name in names if subset(name)]
    elif isinstance(subset, tuple) or _is_pattern(subset):
        found = _matched(subset if isinstance(subset, tuple) else (subset,), names)
    else:
        raise ModelError(
            "subset must be 'all', 'last_layer', a pattern such as '*lora_*', a tuple of names or "
            f"a predicate, not {subset!r}"
        )
    if not found:
        raise ModelError(
            f"subset {subset!r} selects no trainable parameter; there are {list(names)}"
        )
    return tuple(found)


def _is_pattern(subset: object) -> bool:
    return isinstance(subset, str) and any(mark in subset for mark in "*?[")


def _matched(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that are listed or that match a pattern."""
    return [n for n in names if any(n == p or fnmatchcase(n, p) for p in patterns)]


FACTS = (
    "output", "rows_first", "sites", "masked", "head", "last", "widths", "calls", "written", "drew",
    "default_prior", "subset", "at_rest",
)  # fmt: skip


class _Turn:
    """A re-entrant lock; a copy of the object gets a new lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return _Turn, ()


Inputs = Any  # a tensor [N, ...], a tuple of tensors (several inputs) or a dict (keyword inputs)


class Applied(NamedTuple):
    """One forward pass: outputs, additional terms of layers, and buffers changed by training."""

    f: Any
    terms: Params
    buffers: Params


class Model:
    """A network with a likelihood and a prior, before it is fitted to data.

    Parameters
    ----------
    net : nn.Module
        Any network. It may take several inputs (pass a tuple or dict as x), return several outputs
        (with a tuple of likelihoods), share or freeze parameters, and have buffers.
    likelihood : str, Likelihood or tuple, default None
        A name ("gaussian", "categorical", ...) or a `Likelihood`; a tuple of them for several
        heads. None means Gaussian, unless `fit` infers another one from y, which is logged.
    prior : Prior or dict, default None
        A prior, or a dict {name pattern: prior} with "*" for the rest. None means Normal(1).
    subset : str, tuple or callable, default "all"
        The parameters that are uncertain: "all", "last_layer", a shell pattern of names
        ("*lora_*"), a tuple of names or patterns, or a predicate on names. The others are point
        estimates under the same prior. Parameters with requires_grad=False are constants without a
        prior.
    output : str or tuple of str, default None
        The name of the output for the likelihood, if the network returns a dict or a dataclass; a
        tuple of names for several heads. None means "logits", or the only tensor.
    trunk : str or tuple of str, default None
        Layers of the network that are frozen, by name: their parameters are constants, as with
        requires_grad=False, and they run before all trained layers. A frozen trunk is always in
        evaluation mode (its dropout is off, its BatchNorm uses running statistics), and `fit`
        computes its outputs once for the data. Frozen layers that do a fifth of the work, and run
        before all trained ones, are a trunk also if they are not named.

    Examples
    --------
    >>> import torch, doxa
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> model = doxa.Model(net, "gaussian", prior=doxa.Normal(0.5), subset="last_layer")
    >>> x, y = torch.randn(20, 2), torch.randn(20)
    >>> posterior = doxa.fit(model, (x, y), "map", steps=5)
    >>> posterior.predict(x).mean.shape
    torch.Size([20])
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Any = None,
        prior: Any = None,
        subset: Subset = "all",
        *,
        output: Name = None,
        trunk: str | Sequence[str] | None = None,
    ) -> None:
        if not isinstance(net, nn.Module):
            given = f"the class {net.__name__}" if isinstance(net, type) else type(net).__name__
            raise ModelError(f"net must be a torch.nn.Module, an object, not {given}")
        self.assumed = likelihood is None  # the likelihood was not given
        self.likelihood = likelihoods.likelihood("gaussian" if self.assumed else likelihood)
        self.prior = Normal(1.0) if prior is None else prior
        self.default_prior = prior is None  # the prior was not given: a method may fit its scale
        self.subset = subset
        self.named = None if output is None else output_name(output)
        self.builder = nets.builder_of(net)
        self.net = duplicate(net).eval()
        self.shares = False  # whether trainable parameters are those of another network
        swap_dropout(self.net)
        unfuse_attention(self.net)
        self.given_trunk = freeze_layers(self.net, trunk)
        self.trunk: Trunk | None = None  # after `build`
        self.at_rest: tuple[str, ...] = ()  # layers of the trunk, always in evaluation mode
        self.whole: Model | None = None  # the network that this one is the trained part of
        # layers whose activations the backward pass computes again (`recompute_parts`)
        self.recompute: Any = without_checkpointing(self.net) or None
        if self.recompute:
            without_cache(self.net)
        self.output: Any = None  # the shape of the output for one row, after `build`
        self.rows_first = True  # rows are the first axis in all layers with noise or parameters
        self.sites: dict[str, Site] = {}  # the noise of layers, by buffer
        self.masked: dict[str, str] = {}  # the parametrised layer after each dropout layer
        self.head: str | None = None  # the trainable layer that ran last
        self.last: str | None = None  # the layer with weights that ran last, trainable or frozen
        self.widths: list[tuple[str, int]] = []  # output size of each layer for one row, in order
        self.calls: dict[str, tuple[Shape | None, ...]] = {}  # each layer's inputs for one row
        self.row_bytes = 0  # what a pass keeps for its backward pass, for one row
        self.recomputed_bytes = 0  # the same if blocks are computed again; 0: not known
        self.written: tuple[str, ...] = ()  # buffers that training writes, besides BatchNorm's
        self.drew = False  # whether a training pass drew random numbers itself
        self.given_facts: dict[str, Any] | None = None  # `facts` before a method's `prepare`
        trainable = [p for p in self.net.parameters() if p.requires_grad]
        kinds = {p.dtype for p in trainable}
        if len(kinds) > 1:
            raise ModelError(
                f"parameters of mixed types {sorted(map(str, kinds))}; cast the network"
            )
        self.dtype = kinds.pop() if kinds else torch.get_default_dtype()
        first = next(chain(self.net.parameters(), self.net.buffers()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.derive()

    def derive(self) -> None:
        """Recompute everything that follows from the network alone, after a change of it."""
        self.turn = _Turn()  # a pass puts its tensors into the network: one thread at a time
        self.fixed, self.terms, self.momenta, self.batch_norm = look(self.net, self.at_rest)
        # buffers that training changes; each member has its own copy
        self.tracked = (*self.momenta, *(name for name in self.written if name in self.fixed))
        self.draws = self.drew or draws_itself(self.net, self.at_rest)
        self.recomputed: tuple[Part, ...] = ()
        if self.recompute is not None:
            self.recomputed = find_parts(self.net, self.recompute, self.at_rest)
        self.forget("layout", "layers", "plan", "bound_prior", "parts")

    def __getstate__(self) -> dict[str, Any]:
        """Without the trained part of a split network, whose class is made for it."""
        return {name: value for name, value in vars(self).items() if name != "parts"}

    def forget(self, *names: str) -> None:
        """Clear cached properties; by default those that depend on the likelihood."""
        for name in names or ("layout", "bound_prior", "parts"):
            self.__dict__.pop(name, None)

    def facts(self) -> dict[str, Any]:
        """What `build` found, and the choices of the user: all that a method's `prepare` may use
        besides layers, likelihood and prior. A posterior saves them, for `prepare` on loading."""
        subset = self.subset if isinstance(self.subset, str) else self.subset_names
        return {name: getattr(self, name) for name in FACTS} | {"subset": subset}

    def share(self, net: nn.Module) -> None:
        """Use the memory of the trainable parameters of the network that this model is a copy of,
        until `own` is called. Nothing writes to it: a fit stores its weights elsewhere."""
        with torch.no_grad():
            for p, given in zip(self.net.parameters(), net.parameters(), strict=True):
                if p.requires_grad and type(given) is nn.Parameter:
                    p.data = given.detach()
        self.shares = True

    def own(self) -> None:
        """Copy the parameters that are shared with another network."""
        if self.shares:
            for p in self.net.parameters():
                p.data = p.data.clone()
        self.shares = False

    def recompute_parts(self, given: Any) -> None:
        """Compute the activations of these parts again in the backward pass; an error if there are
        none (`doxa.model.functional`)."""
        check_parts(self, given)
        without_cache(self.net)
        self.recompute = given
        self.derive()

    def unseen(self) -> Self:
        """A copy with its own network, before `build`."""
        new = copy.copy(self)
        new.net, new.output, new.given_facts = duplicate(self.net), None, None
        new.shares, new.trunk, new.at_rest = False, None, ()
        new.derive()
        return new

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """A copy on another device and in another floating-point type; the object itself if nothing
        changes."""
        tensors = [*self.net.parameters(), *self.net.buffers()]
        cast = (t.dtype for t in tensors if t.is_floating_point() or t.is_complex())
        if {self.dtype, *cast} == {dtype} and {t.device for t in tensors} == {torch.device(device)}:
            return self
        moved = copy.copy(self)
        moved.net, moved.shares = duplicate(self.net).to(device=device, dtype=dtype), False
        moved.device, moved.dtype = torch.empty(0, device=device).device, dtype
        moved.derive()
        return moved

    def with_likelihood(self, likelihood: Any) -> Self:
        """A copy with another likelihood."""
        changed = copy.copy(self)
        changed.likelihood, changed.assumed = likelihoods.likelihood(likelihood), False
        changed.forget()
        return changed

    def with_prior(self, prior: Any) -> Self:
        """A copy with another prior."""
        changed = copy.copy(self)
        changed.prior = prior
        changed.forget()
        return changed

    def meaning(self, likelihood: Any) -> Self:
        """Deprecated: `with_likelihood`."""
        deprecated("Model.meaning", "Model.with_likelihood")
        return self.with_likelihood(likelihood)

    @cached_property
    def layout(self) -> Layout:
        """The positions of the weights in the flat vector; the likelihood's parameters are last."""
        entries, _ = trainable(self.net)
        for name, value in self._likelihood_parameters().items():
            entries.append(Entry(name, tuple(value.shape)))
        if not entries:
            raise ModelError(
                "the network has no trainable parameter: requires_grad is False on all"
            )
        return Layout(tuple(entries))

    @cached_property
    def layers(self) -> Layout:
        """The parameters that rewritten layers added, which are not weights."""
        return Layout(tuple(trainable(self.net)[1]))

    def _likelihood_parameters(self) -> Params:
        output = (1,) if self.output is None else self.output
        return {f"likelihood.{k}": v for k, v in self.likelihood.parameters(output).items()}

    @cached_property
    def plan(self) -> Plan | None:
        if self.tracked:  # a replayed graph would not update these buffers
            return None
        return Plan.of(self.net)

    @cached_property
    def bound_prior(self) -> BoundPrior:
        return bind(self.prior, self.layout).to(self.device, self.dtype)

    @property
    def subset_names(self) -> tuple[str, ...]:
        """Names of the network's parameters that are uncertain, in layout order."""
        names = [name for name in self.layout.names if not name.startswith("likelihood.")]
        if self.subset == "last_layer" and self.head is not None:
            self._check_head(names)
        return chosen(self.subset, names, self.head)

    def _check_head(self, names: Sequence[str]) -> None:
        """Raise an error if all weights of the last layer are those of other layers, too."""
        assert self.head is not None
        own = {id(p) for p in self.net.get_submodule(self.head).parameters(recurse=False)}
        prefix = f"{self.head}." if self.head else ""
        tied = [name for name, p in self.net.named_parameters() if id(p) in own and name in names]
        if tied and not any(name.startswith(prefix) for name in tied):
            raise ModelError(
                f"the last layer, {self.head!r}, shares its weights with another layer (tied "
                f"embeddings), so that they are not the last ones: pass subset={tied[0]!r} for "
                "these weights in both places, or another subset"
            )

    def width(self, layers: Collection[str] | None = None) -> int:
        """The size of the largest activation for one row, from the first of `layers` on."""
        if not layers:
            return max((size for _, size in self.widths), default=1)
        names = [name for name, _ in self.widths]
        first = min((names.index(n) for n in layers if n in names), default=0)
        return max((size for _, size in self.widths[first:]), default=1)

    def given(self) -> Tensor:
        """The network's own weights and the likelihood's starting values, flat [P]."""
        named = dict(self.net.named_parameters())
        values = {name: named[name].detach() for name in self.layout.names if name in named}
        values |= self._likelihood_parameters()
        return self.layout.flatten({k: v.to(self.device, self.dtype) for k, v in values.items()})

    def fresh(self, starts: Sequence[Start]) -> Tensor:
        """Newly initialised weights for each (seed, member id), [M, P]."""
        own = {k: v.to(self.dtype) for k, v in self._likelihood_parameters().items()}
        net = (self.whole or self).net  # all layers draw from one generator, in order
        rows = fresh_rows(net, self.layout, starts, own)
        return rows.to(self.device, self.dtype)

    def fresh_layers(self, starts: Sequence[Start]) -> Tensor:
        """Newly initialised parameters of rewritten layers, [M, Q]."""
        net = (self.whole or self).net
        return fresh_rows(net, self.layers, starts).to(self.device, self.dtype)

    def build(self, x: Inputs) -> Model:
        """Run one row through the network, to find its output shape, its dropout layers, its last
        layer, and the buffers that a training pass writes.

        Parameters
        ----------
        x : Tensor, tuple or dict
            Inputs, of which the first row is used.
        """
        row = tree_map(lambda t: t[:1], x)
        try:
            with torch.no_grad(), watched(self.net) as trace:
                output = self.forward({}, row, buffers=self.scratch())
        except DoxaError:
            raise
        except Exception as error:  # whatever the user's forward raises
            raise failure(x, error) from error
        two = tree_map(lambda t: torch.cat([t, t]), row)
        with torch.no_grad(), watched(self.net) as twice:
            check_rows(output, self.forward({}, two, buffers=self.scratch()))
        self.output = tree_map(lambda t: tuple(t.shape[1:]), output)
        if isinstance(output, list | tuple):
            self.output = tuple(tuple(t.shape[1:]) for t in output)
        self.head, self.last, self.widths = trace.head, trace.last, trace.widths
        self.calls = inputs_of_rows(trace, twice)
        self.sites = noise_sites(trace, twice) if trace.noise else {}
        self.rows_first = {*trace.leads} <= {1} and {*twice.leads} <= {2}
        self.masked = masked_layers(trace.order, trace.dropouts) if trace.dropouts else {}
        self._find_trunk(two)
        self.written, self.drew = probe(self.net, self.momenta, two, self.at_rest)
        self.derive()
        self.row_bytes = bytes_per_row(self.forward, self.scratch(), row, two)
        if self.recomputed or self.layout.size >= LARGE:
            parts = self.recomputed or find_parts(self.net, "blocks", self.at_rest)
            self.recomputed_bytes = recomputed_bytes(self, parts, self.scratch, row, two)
        return self

    def _find_trunk(self, x: Inputs) -> None:
        """Find the frozen trunk from two rows of x. Its dropout layers are no longer dropout."""
        before = self.at_rest
        self.trunk, self.at_rest = None, ()
        if self.whole is None and not all(p.requires_grad for p in self.net.parameters()):
            self.trunk = find(self, x, self.given_trunk)
        if self.trunk is not None:
            self.at_rest = rest = self.trunk.layers
            self.sites = {k: v for k, v in self.sites.items() if not lies_in(k, rest)}
            self.masked = {k: v for k, v in self.masked.items() if not lies_in(k, rest)}
        late = [
            name for name in self.given_trunk
            if not any(lies_in(name, (at,)) or lies_in(at, (name,)) for at in self.at_rest)
        ]  # fmt: skip
        if late and self.whole is None:
            log.warning(
                "trunk=: %s is frozen, but is no trunk, because its input depends on what is "
                "trained, or because the method replaces it: it runs in every pass",
                ", ".join(map(repr, late)),
            )
        if self.at_rest != before:
            self.net.eval()  # a training pass puts all other layers into training mode
            self.derive()

    def split(self, x: Inputs) -> Split | None:
        """The network as frozen trunk and trained part, from some rows of x; None if it has no
        trunk, or if the two cannot be separated."""
        if not self.at_rest:
            return None
        if "parts" not in self.__dict__:
            two = tree_map(lambda t: torch.cat([t[:2], t[:1]])[:2], x)
            try:
                if self.trunk is None:  # loaded from a file
                    self.trunk = find(self, two, self.given_trunk or self.at_rest)
                self.__dict__["parts"] = Split(self, two)
            except ValueError as error:
                log.info("the frozen trunk is computed in every pass: %s", error)
                self.__dict__["parts"] = None
        parts: Split | None = self.__dict__["parts"]
        return parts

    def scratch(self) -> Params:
        """Copies of all buffers, for a pass before the written buffers are known."""
        return {name: value.clone() for name, value in self.net.named_buffers()}

    def forward(
        self,
        params: Mapping[str, Tensor],
        x: Inputs,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        training: bool = False,
    ) -> Any:
        """The network's output at x, [N, *output], for one member's parameters.

        Parameters
        ----------
        params : dict of str to Tensor
            The parameters by name.
        x : Tensor, tuple or dict
            The inputs.
        buffers : dict of str to Tensor, default None
            Values in place of the network's buffers: the noise of layers, without which dropout is
            off, and buffers that training changes (BatchNorm statistics, the vectors of spectral
            norm).
        training : bool, default False
            Whether the network is in training mode.
        """
        return self.apply(params, x, buffers=buffers, training=training).f

    def apply(
        self,
        params: Mapping[str, Tensor],
        x: Inputs,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        training: bool = False,
        who: str | None = None,
    ) -> Applied:
        """As `forward`, with the additional terms of layers and, in training, the new values of
        changed buffers. The tensors that are passed are not changed.

        `who` is a key of member and step, for a network that draws random numbers itself: they are
        then a function of the key. Without it, they come from torch's default generator."""
        tensors: dict[str, Any] = self.fixed | {
            k: v for k, v in params.items() if not k.startswith("likelihood.")
        }
        if buffers:
            tensors |= buffers
        learned = self.tracked if training else ()
        # outside training too: a layer may write a buffer in every pass, and the result is dropped
        tensors |= {name: tensors[name].clone() for name in learned or self.written}
        tensors |= dict.fromkeys(self.terms)
        args = () if isinstance(x, dict) else tuple(x) if isinstance(x, list) else x
        own = nullcontext() if who is None else drawing("forward", who)
        with self.turn, own:
            self.set_mode(training)
            parts = parts_of_pass(self, tensors, training, own) if self.recomputed else None
            with parts or nullcontext():
                f = functional_call(self.net, tensors, args, x if isinstance(x, dict) else {})
        f = pick(f, self.named, isinstance(self.likelihood, Heads))
        f = self.likelihood.arrange(f)
        given = {name: tensors[name] for name in self.terms if tensors[name] is not None}
        return Applied(f, given, {name: tensors[name] for name in learned})

    def set_mode(self, training: bool) -> None:
        """Put the network into training or evaluation mode. A frozen trunk stays in the latter."""
        if training != self.net.training:
            self.net.train(training)
            for layer in self.at_rest:
                self.net.get_submodule(layer).eval()

    def features(
        self,
        params: Mapping[str, Tensor],
        x: Inputs,
        layer: str | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The input of the last parametrised layer, or of a named one, [N, ...].

        Parameters
        ----------
        params : dict of str to Tensor
            The parameters by name.
        x : Tensor, tuple or dict
            The inputs.
        layer : str, default None
            The name of the layer. None means the last parametrised layer.
        buffers : dict of str to Tensor, default None
            As in `forward`.
        """
        name = self.head if layer is None else layer
        if name is None:
            raise ModelError("features need model.build(x) first, or a layer's name")
        with self.turn, inputs_of(self.net, name) as seen:
            self.forward(params, x, buffers=buffers)
        return seen[-1]

    def log_prior(self, params: Mapping[str, Tensor]) -> Tensor:
        return self.bound_prior.log_prob(self.layout.flatten(params))

    def log_likelihood(
        self,
        params: Mapping[str, Tensor],
        x: Inputs,
        y: Any,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The log-likelihood per example, [N]; `buffers` are as in `forward`."""
        given = self.likelihood.constants(self.output, None)
        theta = {k: v.to(self.device, self.dtype) for k, v in given.items()}
        theta |= likelihood_parameters(params)
        return self.likelihood.log_prob(self.forward(params, x, buffers=buffers), y, theta)

    def log_joint(self, params: Mapping[str, Tensor], x: Inputs, y: Any) -> Tensor:
        return self.log_prior(params) + self.log_likelihood(params, x, y).sum()

    def rewrite(
        self, rule: Callable[[str, nn.Module], nn.Module | None], subset: Subset | None = None
    ) -> Model:
        """A copy of the model with replaced layers, and optionally with another subset.

        Parameters
        ----------
        rule : callable
            A function (name, layer) that returns the new layer, or None to keep the layer.
        subset : Subset, default None
            The new subset. None keeps the subset.
        """
        own = None if self.default_prior else self.prior
        changed = Model(self.net, self.likelihood, own, subset or self.subset, output=self.named)
        changed.builder, changed.prior = self.builder, self.prior
        changed.given_trunk, changed.recompute = self.given_trunk, self.recompute
        if self.shares:
            changed.share(self.net)
        for name, module in list(changed.net.named_modules()):
            new = rule(name, module)
            if new is None:
                continue
            if not name:
                changed.net = new.eval()
            else:
                parent, _, leaf = name.rpartition(".")
                setattr(changed.net.get_submodule(parent), leaf, new.eval())
        changed.derive()
        return changed

    def freeze(self, subset: Subset) -> Model:
        """A copy in which only the parameters of a subset are weights. All others are constants
        with their given values."""
        frozen = copy.copy(self)
        frozen.net, frozen.subset, frozen.shares = duplicate(self.net), subset, False
        frozen.trunk, frozen.at_rest = None, ()
        weights = set(frozen.subset_names)
        for name, p in frozen.net.named_parameters():
            p.requires_grad_(p.requires_grad and name in weights)
        frozen.output = None  # the last trained layer may be another one
        frozen.derive()
        return frozen


def likelihood_parameters(params: Mapping[str, Tensor]) -> Params:
    """The entries `likelihood.*`, without the prefix."""
    prefix = "likelihood."
    return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}


_Modules = Mapping[str, Functional]


@dataclass(frozen=True)
class Problem:
    """Base of all problems."""

    model: Model | None = field(default=None, kw_only=True)  # the network, if there is one
    modules: _Modules = field(default_factory=dict, kw_only=True)

    compared: ClassVar[str] = "functions"  # the quantity in which chains are compared
    missing: ClassVar[str] = "this method needs a network, and there is none"

    @property
    def net(self) -> Model:
        """The network, for a method that needs one."""
        if self.model is None:
            raise MethodError(self.missing)
        return self.model

    @property
    def layout(self) -> Layout:
        """The positions of the weights in a flat row."""
        return Layout(()) if self.model is None else self.model.layout

    @property
    def batch_norm(self) -> bool:
        return self.model is not None and self.model.batch_norm

    @property
    def joins_rows(self) -> bool:
        """Whether the output of a row in training depends on the other rows of the batch: with
        BatchNorm, or another buffer that is learned from a batch."""
        return self.batch_norm or (self.model is not None and bool(self.model.tracked))

    @property
    def partial(self) -> bool:
        """Whether only some weights are uncertain."""
        return self.model is not None and self.model.subset != "all"

    def add_modules(self, **modules: nn.Module) -> Any:
        """The same problem with additional modules of the method. Like the weights of a network,
        they have a layout, members, a device, a type and checkpoints. Each is an entry of
        `run.init_modules()`."""
        own = {name: Functional(module) for name, module in modules.items()}
        return replace(self, modules={**self.modules, **own})

    def rewrite(
        self, rule: Callable[[str, nn.Module], nn.Module | None], subset: Subset | None = None
    ) -> Self:
        """The problem with replaced layers of its network: see `Model.rewrite`."""
        return replace(self, model=self.net.rewrite(rule, subset))

    def freeze(self, subset: Subset) -> Self:
        """The problem with the weights of a subset only: see `Model.freeze`."""
        return replace(self, model=self.net.freeze(subset))

    def to(self, device: torch.device, dtype: torch.dtype) -> Any:
        model = None if self.model is None else self.model.to(device, dtype)
        moved = {name: module.to(device, dtype) for name, module in self.modules.items()}
        return replace(self, model=model, modules=moved)


@dataclass(frozen=True)
class Network(Problem):
    """A network, its likelihood and its prior."""

    model: Model = field()  # required


@dataclass(frozen=True)
class LogDensity(Problem):
    """A bare log density: [M, P] to [M]."""

    function: Callable[..., Tensor]
    flat: Layout
    estimated: bool = False  # whether it takes a batch besides: it is then an estimate

    compared = "parameters"
    missing = (
        "this method needs a network and data; a bare log density can be sampled with "
        "methods that only need its value and gradient: hmc, nuts, metropolis"
    )

    def at(self, theta: Tensor, batch: Any) -> Tensor:
        """The log density [M] at weights [M, P], or its estimate from a batch."""
        return self.function(theta, batch) if self.estimated else self.function(theta)

    @property
    def layout(self) -> Layout:
        return self.flat


@dataclass(frozen=True)
class NoNetwork(Problem):
    """A problem without a network: only the method's own functions.

    Parameters
    ----------
    inputs : tree of shapes
        The shape of one row of x.
    targets : tree of shapes
        The shape of one row of y.
    """

    inputs: Any = None
    targets: Any = None
