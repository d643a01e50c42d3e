"""The scales of a hierarchical prior, given the weights that a posterior has drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from doxa.errors import Unavailable
from doxa.linalg.layout import Layout
from doxa.noise import generator
from doxa.priors import Hierarchical, each_prior
from doxa.priors.hierarchical import SharedScale

if TYPE_CHECKING:
    from doxa.posterior.weights import WeightPosterior


def prior_scales(
    posterior: WeightPosterior, n: int | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """σ of each tensor under a `Hierarchical` prior, {name: [n]}: a draw of p(σ | w) for each of n
    draws of the weights, by default all that were kept. Weights and scales together are then draws
    of their joint posterior; for a method that gives points they are those scales' conditional.
    """
    network = posterior.network
    spec = network.prior if posterior.priors is None else posterior.priors[0]
    pairs = zip(network.layout.entries, each_prior(spec, network.layout), strict=True)
    own = {entry: prior for entry, prior in pairs if isinstance(prior, Hierarchical)}
    if not own:
        raise Unavailable(
            "no weight of this posterior has a Hierarchical prior, whose scales could be drawn"
        )
    draws, scales = posterior.draw(n), {}
    for entry, prior in own.items():
        (part,) = prior.bind(Layout((entry,))).parts
        flat = part.centred(draws[entry.name].double().cpu().reshape(-1, entry.size))
        assert isinstance(part.family, SharedScale)
        drawn = part.family.scales(flat, generator("prior scales", seed, entry.name))
        scales[entry.name] = drawn[..., 0]
    return scales
