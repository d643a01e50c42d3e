"""A gpytorch module with a minibatch objective: a sparse GP that the method brings, without a
network; it gets a layout, members, device, type and checkpoints as weights do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from trial import curve, held_to_the_protocol

from doxa import store
from doxa.linalg.layout import Params
from doxa.method import Method, Problem, Run, Stage, State, optimise
from doxa.model.functional import Functional
from doxa.posterior import ProcessPosterior, register_posterior
from doxa.posterior.process import square_root

gpytorch = pytest.importorskip("gpytorch")


class Sparse(gpytorch.models.ApproximateGP):
    """f ~ GP through eight inducing points, and log σ."""

    def __init__(self) -> None:
        points = torch.linspace(-2, 2, 8).unsqueeze(1)
        q = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, q))
        self.mean_module = gpytorch.means.ZeroMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.log_noise = nn.Parameter(torch.zeros(1))
        self.variational_strategy.variational_params_initialized.fill_(1)

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.kernel(x))


class Bound(nn.Module):
    """Σ E_q log p(y | f) and KL(q(u) ‖ p(u)), or the marginals of f."""

    def __init__(self) -> None:
        super().__init__()
        self.gp = Sparse()

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        f = self.gp(x)
        if y is None:
            return f.mean, f.covariance_matrix
        precision = (-2 * self.gp.log_noise).exp()
        misfit = (y - f.mean).square() + f.variance
        each = -0.5 * (misfit * precision + math.log(2 * math.pi)) - self.gp.log_noise
        return each.sum(), self.gp.variational_strategy.kl_divergence()


@register_posterior
class SparsePosterior(ProcessPosterior):
    kind = "test-sparse-gp"
    event = (1,)

    def __init__(self, *args: Any, module: Functional, flat: Tensor, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.module, self.flat = module, flat

    @property
    def members(self) -> int:
        return len(self.flat)

    def _reference(self) -> Tensor:
        return self.flat

    def _at(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.module.forward(self.module.layout.unflatten(self.flat[k]), x)

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [self._at(x, k) for k in range(self.members)]
        mean = torch.stack([m for m, _ in pairs]).unsqueeze(2)
        return mean, torch.stack([c.diagonal() for _, c in pairs]).unsqueeze(2)

    def joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        mean, covariance = self._at(x, k)
        return mean.unsqueeze(1), square_root(covariance)[None]

    def prior_joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def theta(self) -> Params:
        rows = self.module.layout.unflatten(self.flat)
        return {"log_noise": rows["gp.log_noise"].squeeze(1)}

    def tensors(self) -> dict[str, Tensor]:
        return {"flat": self.flat}

    @classmethod
    def restore(cls, common: Any, tensors: Any, extra: Any) -> SparsePosterior:
        module = Functional(Bound())
        return cls(**common, module=module, flat=tensors["flat"])


@store.register("test-sparse-gp")
@dataclass(frozen=True)
class SparseGP(Method):
    name: ClassVar[str] = "test-sparse-gp"
    needs_network: ClassVar[bool] = False

    def prepare(self, problem: Problem) -> Problem:
        return problem.add_modules(gp=Bound())

    def init(self, run: Run) -> State:
        start = run.init_modules(given=True)["gp"]
        return {"gp": start + 0.1 * run.noise("start").normal((start.shape[1],))}

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(self._bound, run.steps, over=("gp",), validates=False, capturable=False)

    def _bound(self, run: Run, params: State, batch: Any, clock: Any) -> tuple[Tensor, State]:
        shared = None if batch.shared else 0
        fit, kl = run.call("gp", params, batch.x, batch.y.squeeze(-1), dims=shared)
        return fit * batch.scale - kl, {}

    def finish(self, run: Run, state: State, kept: Tensor | None) -> SparsePosterior:
        return SparsePosterior(
            **run.common(self), module=run.problem.modules["gp"], flat=state["gp"]
        )


@pytest.mark.slow
def test_it_trains_with_members_and_is_resumed(tmp_path: Path) -> None:
    x, y = data = curve()
    posterior = held_to_the_protocol(None, data, SparseGP(), tmp_path, steps=80, lr=0.1)
    p = posterior.predict(x)
    assert float((p.mean - y).square().mean().sqrt()) < 0.2
    away = posterior.predict(torch.tensor([[6.0]]).double())
    assert float(away.epistemic) > 5 * float(p.epistemic.mean())
    assert posterior.functions(x, 6).shape == (6, 40, 1)
