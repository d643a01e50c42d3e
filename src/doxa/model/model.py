"""A network, a likelihood and a prior as pure functions of a parameter dict.

    log p(θ, D) = log p(θ) + Σ_i log p(y_i | f(x_i; θ))

`Model` works on a copy of the user's network, which is never changed. Only this module touches an
`nn.Module`; everything downstream sees flat parameter vectors (`layout`), forward passes and
per-example log-likelihoods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from doxa import likelihoods, nets
from doxa.errors import DoxaError, ModelError
from doxa.likelihoods import Heads
from doxa.linalg.layout import Entry, Layout, Params
from doxa.model.inspection import (
    Start,
    call_arguments,
    failure,
    fixed_tensors,
    fresh_rows,
    given_terms,
    inputs_of,
    masked_layers,
    noise_sites,
    tracked_buffers,
    trainable,
    watched,
)
from doxa.model.layers import Site, swap_dropout, unfuse_attention
from doxa.model.outputs import Name, check_rows, output_name, pick
from doxa.model.plan import Plan
from doxa.model.subset import Subset, chosen
from doxa.priors import BoundPrior, Normal, bind

Inputs = Any  # a tensor [N, ...], a tuple of tensors (several inputs) or a dict (keyword inputs)


class Applied(NamedTuple):
    """One forward pass: outputs, what layers gave besides, and buffers as training left them."""

    f: Any
    terms: Params
    buffers: Params


class Model:
    """What is believed before seeing data.

    Parameters
    ----------
    net: any `nn.Module`. It may take several inputs (pass a tuple or dict as x), give several
        outputs (with a tuple of likelihoods), share or freeze parameters, and hold buffers.
    likelihood: a string ("gaussian", "categorical", ...) or a `Likelihood`; a tuple of them for
        several heads. Default: Gaussian, unless `fit` infers another from y, and says so.
    prior: a prior, or a dict {name pattern: prior} with "*" for the rest. Default: Normal(1).
    subset: which parameters are uncertain: "all", "last_layer", a shell pattern of names
        ("*lora_*"), a tuple of names or patterns, or a predicate on names. The others are point
        estimates under the same prior; those with requires_grad=False are constants, without one.
    output: which output the likelihood is about, by name, where the network gives a dict or a
        dataclass; a tuple of names for several heads. Default: "logits", or the only tensor.
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Any = None,
        prior: Any = None,
        subset: Subset = "all",
        *,
        output: Name = None,
    ) -> None:
        if not isinstance(net, nn.Module):
            given = f"the class {net.__name__}" if isinstance(net, type) else type(net).__name__
            raise ModelError(f"net must be a torch.nn.Module, an object, not {given}")
        self.assumed = likelihood is None  # nobody said what the outputs mean
        self.likelihood = likelihoods.likelihood("gaussian" if self.assumed else likelihood)
        self.prior = Normal(1.0) if prior is None else prior
        self.default_prior = prior is None  # nobody chose it: a method may find its scale
        self.subset = subset
        self.named = output_name(output)
        self.builder = nets.builder_of(net)
        self.net = copy.deepcopy(net).eval()
        swap_dropout(self.net)
        unfuse_attention(self.net)
        self.output: Any = None  # the shape of one row's output, once seen
        self.rows_first = True  # every layer with noise, or trainables of its own, sees rows first
        self.sites: dict[str, Site] = {}  # the noise that layers take, by buffer
        self.masked: dict[str, str] = {}  # the parametrised layer that each dropout layer feeds
        self.head: str | None = None  # the trainable layer that ran last
        self.last: str | None = None  # the layer with weights that ran last, perhaps a frozen one
        self.widths: list[tuple[str, int]] = []  # numbers each layer gives for one row, in order
        self._mode = False
        trainable = [p for p in self.net.parameters() if p.requires_grad]
        kinds = {p.dtype for p in trainable}
        if len(kinds) > 1:
            raise ModelError(
                f"parameters of mixed types {sorted(map(str, kinds))}; cast the network"
            )
        self.dtype = kinds.pop() if kinds else torch.get_default_dtype()

    @property
    def device(self) -> torch.device:
        first = next(chain(self.net.parameters(), self.net.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Model:
        """A copy on another device and in another floating type."""
        moved = copy.copy(self)
        moved.net = copy.deepcopy(self.net).to(device=device, dtype=dtype)
        moved.dtype = dtype
        moved._forget()
        return moved

    def meaning(self, likelihood: Any) -> Model:
        """A copy whose outputs mean something else."""
        changed = copy.copy(self)
        changed.likelihood, changed.assumed = likelihoods.likelihood(likelihood), False
        changed._forget()
        return changed

    def _forget(self) -> None:
        """What was derived from the network, and is derived again when asked for."""
        for name in ("layout", "layers", "plan", "fixed", "bound_prior", "terms", "tracked"):
            self.__dict__.pop(name, None)

    def build(self, x: Inputs) -> Model:
        """Run one row through the network: its output shape, dropout layers and last layer."""
        row = tree_map(lambda t: t[:1], x)
        try:
            with torch.no_grad(), watched(self.net) as trace:
                output = self.forward({}, row)
        except DoxaError:
            raise
        except Exception as error:  # whatever the user's forward raises
            raise failure(x, error) from error
        with torch.no_grad(), watched(self.net) as twice:
            check_rows(output, self.forward({}, tree_map(lambda t: torch.cat([t, t]), row)))
        self.output = tree_map(lambda t: tuple(t.shape[1:]), output)
        if isinstance(output, list | tuple):
            self.output = tuple(tuple(t.shape[1:]) for t in output)
        self.sites, self.widths = noise_sites(trace, twice), trace.widths
        self.rows_first = {*trace.leads} <= {1} and {*twice.leads} <= {2}
        self.head, self.last = trace.head, trace.last
        self.masked = masked_layers(trace.order, trace.dropouts)
        self._forget()
        return self

    @cached_property
    def layout(self) -> Layout:
        """Where each weight lies; the likelihood's own parameters come last."""
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
        """Trainables that rewritten layers brought, which are no weights."""
        return Layout(tuple(trainable(self.net)[1]))

    @cached_property
    def terms(self) -> tuple[str, ...]:
        """What layers give besides their outputs."""
        return given_terms(self.net)

    def _likelihood_parameters(self) -> Params:
        output = (1,) if self.output is None else self.output
        return {f"likelihood.{k}": v for k, v in self.likelihood.parameters(output).items()}

    @cached_property
    def fixed(self) -> Params:
        """Frozen parameters and buffers, the same for all members."""
        return fixed_tensors(self.net)

    @cached_property
    def tracked(self) -> tuple[str, ...]:
        """Buffers that training changes (BatchNorm): each member has its own."""
        return tuple(self.momenta)

    @property
    def momenta(self) -> dict[str, float]:
        """The share of a batch's statistics in each tracked buffer, starting from none."""
        return tracked_buffers(self.net)

    @property
    def batch_norm(self) -> bool:
        return any(isinstance(module, _BatchNorm) for module in self.net.modules())

    @cached_property
    def plan(self) -> Plan | None:
        return Plan.of(self.net)

    @cached_property
    def bound_prior(self) -> BoundPrior:
        return bind(self.prior, self.layout).to(self.device, self.dtype)

    @property
    def subset_names(self) -> tuple[str, ...]:
        """Names of the network's parameters that are uncertain, in layout order."""
        names = [name for name in self.layout.names if not name.startswith("likelihood.")]
        return chosen(self.subset, names, self.head)

    def width(self, layers: Collection[str] | None = None) -> int:
        """Numbers in the widest activation of one row, from the first of some layers on."""
        names = [name for name, _ in self.widths]
        first = min((names.index(n) for n in layers or () if n in names), default=0)
        return max((size for _, size in self.widths[first:]), default=1)

    def forward(
        self,
        params: Mapping[str, Tensor],
        x: Inputs,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        training: bool = False,
    ) -> Any:
        """The network's output at x, [N, *output], for one member's parameters.

        `buffers` stand in for the network's own: layers' noise, without which dropout is off, and
        BatchNorm's statistics.
        """
        return self.apply(params, x, buffers=buffers, training=training).f

    def apply(
        self,
        params: Mapping[str, Tensor],
        x: Inputs,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        training: bool = False,
    ) -> Applied:
        """`forward`, with the terms that layers gave and, in training, BatchNorm's new statistics;
        no tensor that was passed is changed."""
        if training != self._mode:
            self.net.train(training)
            self._mode = training
        tensors: dict[str, Any] = self.fixed | {
            k: v for k, v in params.items() if not k.startswith("likelihood.")
        }
        if buffers:
            tensors |= buffers
        learned = self.tracked if training else ()
        tensors |= {name: tensors[name].clone() for name in learned}
        tensors |= dict.fromkeys(self.terms)
        args, kwargs = call_arguments(x)
        f = functional_call(self.net, tensors, args, kwargs)
        f = pick(f, self.named, isinstance(self.likelihood, Heads))
        given = {name: tensors[name] for name in self.terms if tensors[name] is not None}
        return Applied(f, given, {name: tensors[name] for name in learned})

    def features(
        self,
        params: Mapping[str, Tensor],
        x: Inputs,
        layer: str | None = None,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """What goes into the last parametrised layer (or a named one), [N, ...]."""
        name = self.head if layer is None else layer
        if name is None:
            raise ModelError("features need model.build(x) first, or a layer's name")
        with inputs_of(self.net, name) as seen:
            self.forward(params, x, buffers=buffers)
        return seen[-1]

    def log_prior(self, params: Mapping[str, Tensor]) -> Tensor:
        return self.bound_prior.log_prob(self.layout.flatten(params))

    def log_likelihood(self, params: Mapping[str, Tensor], x: Inputs, y: Any) -> Tensor:
        """Per example: [N]."""
        given = self.likelihood.constants(self.output, None)
        theta = {k: v.to(self.device, self.dtype) for k, v in given.items()}
        theta |= likelihood_parameters(params)
        return self.likelihood.log_prob(self.forward(params, x), y, theta)

    def log_joint(self, params: Mapping[str, Tensor], x: Inputs, y: Any) -> Tensor:
        return self.log_prior(params) + self.log_likelihood(params, x, y).sum()

    def rewrite(
        self, rule: Callable[[str, nn.Module], nn.Module | None], subset: Subset | None = None
    ) -> Model:
        """A copy of the model in which `rule(name, layer)` replaced layers (None keeps a layer),
        and perhaps with another subset."""
        own = None if self.default_prior else self.prior
        changed = Model(self.net, self.likelihood, own, subset or self.subset, output=self.named)
        changed.builder = self.builder
        for name, module in list(changed.net.named_modules()):
            new = rule(name, module)
            if new is None:
                continue
            if not name:
                changed.net = new.eval()
            else:
                parent, _, leaf = name.rpartition(".")
                setattr(changed.net.get_submodule(parent), leaf, new.eval())
        return changed

    def freeze(self, subset: Subset) -> Model:
        """A copy whose weights are those of a subset alone; all others stay as they are given, and
        are no weights."""
        frozen = copy.copy(self)
        frozen.net, frozen.subset = copy.deepcopy(self.net), subset
        weights = set(frozen.subset_names)
        for name, p in frozen.net.named_parameters():
            p.requires_grad_(p.requires_grad and name in weights)
        frozen._forget()
        return frozen

    def given(self) -> Tensor:
        """The network's own weights and the likelihood's starting values, flat [P]."""
        named = dict(self.net.named_parameters())
        values = {name: named[name].detach() for name in self.layout.names if name in named}
        values |= self._likelihood_parameters()
        return self.layout.flatten({k: v.to(self.device, self.dtype) for k, v in values.items()})

    def fresh(self, starts: Sequence[Start]) -> Tensor:
        """Newly initialised weights for each (seed, member id), [M, P]."""
        own = {k: v.to(self.dtype) for k, v in self._likelihood_parameters().items()}
        rows = fresh_rows(self.net, self.layout, starts, own)
        return rows.to(self.device, self.dtype)

    def fresh_layers(self, starts: Sequence[Start]) -> Tensor:
        """The same of what layers brought, [M, Q]."""
        return fresh_rows(self.net, self.layers, starts).to(self.device, self.dtype)


def likelihood_parameters(params: Mapping[str, Tensor]) -> Params:
    """The entries `likelihood.*`, without the prefix."""
    prefix = "likelihood."
    return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}
