"""A Gaussian over weights whose prior is over functions: functional variational inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doxa.noise import Noise
from doxa.posterior import GaussianPosterior, register_posterior
from doxa.priors.functions import FunctionPrior, GPPrior, flat_inputs


@register_posterior
class FunctionalPosterior(GaussianPosterior):
    """A Gaussian over the weights, one a member, whose prior is over functions.

    kernel: log (lengthscales, variance, period) of each member's Gaussian process, [K, D + 2],
    where they were fitted; else None.
    """

    kind = "functional"

    def __init__(self, *args: Any, kernel: Tensor | None = None, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.kernel = kernel

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Of the prior over functions that was fitted under."""
        prior = self.method.function_prior
        if prior == "weights":
            return super()._draw_prior_functions(x, n, seed)
        seed = self.sampling(n, seed, "samples")
        x = self.check_inputs(x).unsqueeze(0)  # [1, N, ...]
        output = tuple(self.network.output)
        outputs = torch.Size(output).numel()
        drawn = []
        for k, count in enumerate(self.split(n)):
            keys = [f"{self.ids[k]}/{j}" for j in range(count)]
            noise = Noise(seed, "prior", keys, self.device, self.dtype)
            named = not isinstance(prior, FunctionPrior)
            own = GPPrior(prior) if named else prior
            eps = noise.normal(own.noise_shape(x.shape[1], outputs)).unsqueeze(0)
            if named and self.kernel is not None:
                root = own.root(flat_inputs(x), hyper=self.kernel[k : k + 1])
                drawn.append((root.unsqueeze(1) @ eps)[0])
            else:
                drawn.append(own.functions(x, eps, outputs)[0])
        f = torch.cat(drawn).reshape(n, x.shape[1], *output)
        return self.likelihood.location(f, 1)

    def tensors(self) -> dict[str, Tensor]:
        own = {} if self.kernel is None else {"kernel": self.kernel}
        return super().tensors() | own

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GaussianPosterior:
        new = super().restore(common, tensors, extra)
        assert isinstance(new, FunctionalPosterior)
        new.kernel = tensors.get("kernel")
        return new
