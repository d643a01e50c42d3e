"""A network, a likelihood and a prior as pure functions of a parameter dict.

    log p(θ, D) = log p(θ) + Σ_i log p(y_i | f(x_i; θ))

`Model` works on a copy of the user's network, which is never changed. Only this module touches an
`nn.Module`; everything downstream sees flat parameter vectors (`layout`), forward passes and
per-example log-likelihoods.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map

from doxa import likelihoods, nets
from doxa.errors import ModelError
from doxa.layout import Entry, Layout, Params
from doxa.network import (
    call_arguments,
    check_rows,
    draws_itself,
    masked_layers,
    reset,
    swap_dropout,
    trainable,
    watched,
)
from doxa.noise import digest
from doxa.priors import BoundPrior, Normal, bind
from doxa.stacked import MaskedDropout, Plan

log = logging.getLogger("doxa")

Inputs = Any  # a tensor [N, ...], a tuple of tensors (several inputs) or a dict (keyword inputs)
Subset = str | Callable[[str], bool] | tuple[str, ...]


class Model:
    """What is believed before seeing data.

    Parameters
    ----------
    net: any `nn.Module`. It may take several inputs (pass a tuple or dict as x), give several
        outputs (with a tuple of likelihoods), share or freeze parameters, and hold buffers.
    likelihood: a string ("gaussian", "categorical", ...) or a `Likelihood`; a tuple of them for
        several heads.
    prior: a prior, or a dict {name pattern: prior} with "*" for the rest. Default: Normal(1).
    subset: which parameters are uncertain: "all", "last_layer", a predicate on names, or a tuple of
        names. The others are point estimates under the same prior.
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Any = "gaussian",
        prior: Any = None,
        subset: Subset = "all",
    ) -> None:
        if not isinstance(net, nn.Module):
            raise ModelError(f"net must be a torch.nn.Module, not {type(net).__name__}")
        self.likelihood = likelihoods.likelihood(likelihood)
        self.prior = Normal(1.0) if prior is None else prior
        self.subset = subset
        self.builder = nets.builder_of(net)
        self.net = copy.deepcopy(net).eval()
        swap_dropout(self.net)
        self.output: Any = None  # the shape of one row's output, once seen
        self.sites: dict[str, tuple[int, ...]] = {}  # dropout layers: the shape of one row's mask
        self.masked: dict[str, str] = {}  # the parametrised layer whose input each of them masks
        self.head: str | None = None  # the parametrised layer that ran last
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
        tensors = [*self.net.parameters(), *self.net.buffers()]
        return tensors[0].device if tensors else torch.device("cpu")

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Model:
        """A copy on another device and in another floating type."""
        moved = copy.copy(self)
        moved.net = copy.deepcopy(self.net).to(device=device, dtype=dtype)
        moved.dtype = dtype
        for name in ("layout", "plan", "fixed", "bound_prior"):
            moved.__dict__.pop(name, None)
        return moved

    def build(self, x: Inputs) -> Model:
        """Run one row through the network: its output shape, dropout layers and last layer."""
        row = tree_map(lambda t: t[:1], x)
        try:
            with torch.no_grad(), watched(self.net) as trace:
                output = self.forward({}, row)
        except Exception as error:  # whatever the user's forward raises
            shapes = [(tuple(t.shape[1:]), t.dtype) for t in tree_flatten(x)[0]]
            kinds = "" if all(d.is_floating_point for _, d in shapes) else _INTEGERS
            raise ModelError(
                f"the network fails on one row of x (shape, type: {shapes}): {error}{kinds}"
            ) from error
        with torch.no_grad():
            check_rows(output, self.forward({}, tree_map(lambda t: torch.cat([t, t]), row)))
        self.output = tree_map(lambda t: tuple(t.shape[1:]), output)
        if isinstance(output, list | tuple):
            self.output = tuple(tuple(t.shape[1:]) for t in output)
        self.sites, self.head, self.widths = trace.sites, trace.head, trace.widths
        self.masked = masked_layers(trace.order, trace.sites)
        self.__dict__.pop("layout", None)
        return self

    @cached_property
    def layout(self) -> Layout:
        """Where each trainable parameter lies; the likelihood's own come last."""
        entries = trainable(self.net)
        for name, value in self._likelihood_parameters().items():
            entries.append(Entry(f"likelihood.{name}", tuple(value.shape)))
        if not entries:
            raise ModelError(
                "the network has no trainable parameter: requires_grad is False on all"
            )
        return Layout(tuple(entries))

    def _likelihood_parameters(self) -> Params:
        output = (1,) if self.output is None else self.output
        return self.likelihood.parameters(output)

    @cached_property
    def fixed(self) -> Params:
        """Frozen parameters and buffers, the same for all members."""
        frozen = {n: p.detach() for n, p in self.net.named_parameters() if not p.requires_grad}
        return frozen | dict(self.net.named_buffers())

    @cached_property
    def tracked(self) -> tuple[str, ...]:
        """Buffers that training changes (BatchNorm): each member has its own."""
        return tuple(
            f"{path}.{name}" if path else name
            for path, module in self.net.named_modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats
            for name, _ in module.named_buffers(recurse=False)
        )

    @property
    def batch_norm(self) -> bool:
        return any(isinstance(module, _BatchNorm) for module in self.net.modules())

    @cached_property
    def plan(self) -> Plan | None:
        return Plan.of(self.net)

    @property
    def draws_itself(self) -> bool:
        """Has layers that may draw random numbers of their own in training."""
        return draws_itself(self.net)

    @cached_property
    def bound_prior(self) -> BoundPrior:
        return bind(self.prior, self.layout).to(self.device, self.dtype)

    @property
    def subset_names(self) -> tuple[str, ...]:
        """Names of the network's parameters that are uncertain, in layout order."""
        names = [name for name in self.layout.names if not name.startswith("likelihood.")]
        if self.subset == "all":
            return tuple(names)
        if self.subset == "last_layer":
            if self.head is None:
                raise ModelError("subset='last_layer' needs model.build(x) first")
            prefix = f"{self.head}." if self.head else ""
            chosen = [name for name in names if name.startswith(prefix)]
        elif callable(self.subset):
            chosen = [name for name in names if self.subset(name)]
        elif isinstance(self.subset, tuple):
            chosen = [name for name in names if name in self.subset]
        else:
            raise ModelError(
                f"subset must be 'all', 'last_layer' or a predicate, not {self.subset!r}"
            )
        if not chosen:
            raise ModelError(f"subset {self.subset!r} selects no parameter; there are {names}")
        return tuple(chosen)

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
        masks: Mapping[str, Tensor] | None = None,
        training: bool = False,
    ) -> Any:
        """The network's output at x, [N, *output], for one member's parameters.

        `masks` are the dropout layers' multiplicative masks; without them dropout is off.
        `training` lets BatchNorm use and update `buffers`.
        """
        if training != self._mode:
            self.net.train(training)
            self._mode = training
        tensors = self.fixed | {k: v for k, v in params.items() if not k.startswith("likelihood.")}
        if buffers:
            tensors |= buffers
        args, kwargs = call_arguments(x)
        if not masks:
            return functional_call(self.net, tensors, args, kwargs)
        sites = [(self._site(name), mask) for name, mask in masks.items()]
        try:
            for site, mask in sites:
                site.mask = mask
            return functional_call(self.net, tensors, args, kwargs)
        finally:
            for site, _ in sites:
                site.mask = None

    def _site(self, name: str) -> MaskedDropout:
        module = self.net.get_submodule(name)
        assert isinstance(module, MaskedDropout)
        return module

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
        try:
            module = self.net.get_submodule(name)
        except AttributeError as error:
            known = [n for n, _ in self.net.named_modules() if n]
            raise ModelError(f"no layer named {name!r}; there are {known}") from error
        seen: list[Tensor] = []
        hook = module.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
        try:
            self.forward(params, x, buffers=buffers)
        finally:
            hook.remove()
        return seen[-1]

    def log_prior(self, params: Mapping[str, Tensor]) -> Tensor:
        return self.bound_prior.log_prob(self.layout.flatten(params))

    def log_likelihood(self, params: Mapping[str, Tensor], x: Inputs, y: Any) -> Tensor:
        """Per example: [N]."""
        theta = likelihood_parameters(params)
        if not theta:
            theta = self.likelihood.constants(self.output, None)
        return self.likelihood.log_prob(self.forward(params, x), y, theta)

    def log_joint(self, params: Mapping[str, Tensor], x: Inputs, y: Any) -> Tensor:
        return self.log_prior(params) + self.log_likelihood(params, x, y).sum()

    def rewrite(self, rule: Callable[[str, nn.Module], nn.Module | None]) -> Model:
        """A copy of the model in which `rule(name, layer)` replaced layers (None keeps a layer)."""
        changed = Model(self.net, self.likelihood, self.prior, self.subset)
        changed.builder = self.builder
        for name, module in list(changed.net.named_modules()):
            new = rule(name, module)
            if new is None:
                continue
            if not name:
                changed.net = new
            else:
                parent, _, leaf = name.rpartition(".")
                setattr(changed.net.get_submodule(parent), leaf, new)
        return changed

    def given(self) -> Tensor:
        """The network's own weights and the likelihood's starting values, flat [P]."""
        named = dict(self.net.named_parameters())
        values = {name: named[name].detach() for name in self.layout.names if name in named}
        values |= {f"likelihood.{k}": v for k, v in self._likelihood_parameters().items()}
        return self.layout.flatten({k: v.to(self.device, self.dtype) for k, v in values.items()})

    def fresh(self, starts: Sequence[tuple[int, int]]) -> Tensor:
        """Newly initialised weights for each (seed, member id), [M, P]; the global RNG is left
        as it was."""
        net = copy.deepcopy(self.net).cpu()
        missed: set[str] = set()
        rows = []
        with torch.random.fork_rng(devices=[]):
            for seed, member in starts:
                # not torch.manual_seed, which would reseed the GPUs' generators too
                torch.default_generator.manual_seed(digest("init", seed, member) & 0xFFFFFFFF)
                missed = reset(net)
                named = {n: p.detach().clone() for n, p in net.named_parameters()}
                named |= {f"likelihood.{k}": v for k, v in self._likelihood_parameters().items()}
                rows.append(self.layout.flatten({k: v.to(self.dtype) for k, v in named.items()}))
        missed &= set(self.layout.names)
        if missed:
            log.warning(
                "init='fresh' cannot re-initialise %s: no reset_parameters sets them, so every "
                "member starts there from the given values", ", ".join(sorted(missed))
            )  # fmt: skip
        return torch.stack(rows).to(self.device)


_INTEGERS = (
    "; integers are passed on as they are, for embeddings: convert x to floats where the network "
    "multiplies them"
)


def likelihood_parameters(params: Mapping[str, Tensor]) -> Params:
    """The entries `likelihood.*`, without the prefix."""
    prefix = "likelihood."
    return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}
