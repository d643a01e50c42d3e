"""A network, a likelihood and a prior as pure functions of a parameter dict.

    log p(θ, D) = log p(θ) + Σ_i log p(y_i | f(x_i; θ))

`Model` works on a copy of the user's network, which is never changed. Only this folder touches an
`nn.Module`; everything downstream sees flat parameter vectors (`layout`), forward passes and
per-example log-likelihoods.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from doxa.errors import DoxaError, ModelError
from doxa.likelihoods import Heads
from doxa.linalg.layout import Params
from doxa.model.inspection import (
    duplicate,
    failure,
    inputs_of,
    inputs_of_rows,
    masked_layers,
    noise_sites,
    probe,
    watched,
)
from doxa.model.outputs import check_rows, pick
from doxa.model.structure import Structure
from doxa.model.subset import Subset
from doxa.noise import drawing

Inputs = Any  # a tensor [N, ...], a tuple of tensors (several inputs) or a dict (keyword inputs)


class Applied(NamedTuple):
    """One forward pass: outputs, what layers gave besides, and buffers as training left them."""

    f: Any
    terms: Params
    buffers: Params


class Model(Structure):
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

    def build(self, x: Inputs) -> Model:
        """Run one row through the network: its output shape, dropout layers and last layer, and
        which buffers a training pass writes."""
        row = tree_map(lambda t: t[:1], x)
        try:
            with torch.no_grad(), watched(self.net) as trace:
                output = self.forward({}, row, buffers=self._scratch())
        except DoxaError:
            raise
        except Exception as error:  # whatever the user's forward raises
            raise failure(x, error) from error
        two = tree_map(lambda t: torch.cat([t, t]), row)
        with torch.no_grad(), watched(self.net) as twice:
            check_rows(output, self.forward({}, two, buffers=self._scratch()))
        self.output = tree_map(lambda t: tuple(t.shape[1:]), output)
        if isinstance(output, list | tuple):
            self.output = tuple(tuple(t.shape[1:]) for t in output)
        self.head, self.last, self.widths = trace.head, trace.last, trace.widths
        self.calls = inputs_of_rows(trace, twice)
        self.sites = noise_sites(trace, twice) if trace.noise else {}
        self.rows_first = {*trace.leads} <= {1} and {*twice.leads} <= {2}
        self.masked = masked_layers(trace.order, trace.dropouts) if trace.dropouts else {}
        self.written, self.drew = probe(self.net, self.momenta, two)
        self._derive()
        return self

    def _scratch(self) -> Params:
        """Copies of the buffers, for a pass before it is known which of them a pass writes."""
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

        `buffers` stand in for the network's own: layers' noise, without which dropout is off, and
        those that training changes (BatchNorm's statistics, spectral norm's vectors).
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
        """`forward`, with the terms that layers gave and, in training, the new values of buffers
        that it changes; no tensor that was passed is changed.

        `who` names a member and a step, for a network that draws random numbers of its own: they
        are then a function of it. Without it they come from torch's default generator."""
        tensors: dict[str, Any] = self.fixed | {
            k: v for k, v in params.items() if not k.startswith("likelihood.")
        }
        if buffers:
            tensors |= buffers
        learned = self.tracked if training else ()
        # out of training too: a layer may write a buffer whenever it runs, and nobody keeps that
        tensors |= {name: tensors[name].clone() for name in learned or self.written}
        tensors |= dict.fromkeys(self.terms)
        args = () if isinstance(x, dict) else tuple(x) if isinstance(x, list) else x
        own = nullcontext() if who is None else drawing("forward", who)
        with self.turn, own:
            if training != self.net.training:
                self.net.train(training)
            f = functional_call(self.net, tensors, args, x if isinstance(x, dict) else {})
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
        with self.turn, inputs_of(self.net, name) as seen:
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
        changed._derive()
        return changed

    def freeze(self, subset: Subset) -> Model:
        """A copy whose weights are those of a subset alone; all others stay as they are given, and
        are no weights."""
        frozen = copy.copy(self)
        frozen.net, frozen.subset = duplicate(self.net), subset
        weights = set(frozen.subset_names)
        for name, p in frozen.net.named_parameters():
            p.requires_grad_(p.requires_grad and name in weights)
        frozen.output = None  # another layer may be the last that is trained
        frozen._derive()
        return frozen


def likelihood_parameters(params: Mapping[str, Tensor]) -> Params:
    """The entries `likelihood.*`, without the prefix."""
    prefix = "likelihood."
    return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}
