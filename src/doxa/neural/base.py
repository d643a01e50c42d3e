"""Shared by all neural processes: training on tasks, to predict some points of a task from others.

    maximise  E_tasks (1/T) Σ_{j in T} log N(y_j; μ(x_j, C), σ(x_j, C)²),  σ = min_std + softplus(s)

C is the context, drawn again at every step (`doxa.data.tasks`). T are the targets; with
`reconstruct`, they are all points. The loss is per point, so it does not depend on the size of a
task. Weights are point estimates without a prior; `members` are networks trained from different
initial weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from doxa.data import Batch
from doxa.errors import DataError, MethodError, ModelError
from doxa.likelihoods import Gaussian, HeteroscedasticGaussian
from doxa.method import Clock, Method, Run, Stage, State, optimise
from doxa.model.model import NoNetwork, Problem
from doxa.neural.blocks import spanned
from doxa.neural.posterior import NeuralPosterior, points_scales
from doxa.noise import drawing


class Amortised(Method):
    """A network from a context to predictions. A subclass has `network` and the fields `width`,
    `depth` and `min_std`. It overrides how its network is called in training, if need be."""

    default_steps: ClassVar[int] = 10_000
    default_rate: ClassVar[float] = 5e-4
    default_batch: ClassVar[int] = 16
    needs_network: ClassVar[bool] = False
    shares: ClassVar[str] = "none"
    renamed: ClassVar[Mapping[str, str]] = {"floor": "min_std"}
    regression_only: ClassVar[bool] = True
    modules_stack: ClassVar[bool] = True
    latent: ClassVar[bool] = False  # whether it draws functions by a latent variable
    min_std: float

    @abstractmethod
    def network(self, inputs: int, outputs: int) -> nn.Module:
        """From a task to [B, targets, 2·outputs]: means, then s."""

    def fixed(self, low: Tensor, high: Tensor) -> tuple[Any, ...]:
        """Arguments of the network that are not tensors, from the range of a task in x, [..., D]
        each."""
        return ()

    @property
    def likelihood(self) -> HeteroscedasticGaussian:
        return HeteroscedasticGaussian(self.min_std)

    def reads_inputs(self, run: Run) -> bool:
        return True

    def prepare(self, problem: Problem) -> Problem:
        if not isinstance(problem, NoNetwork):
            raise ModelError(f"{self.name} brings its own network: pass None in its place")
        if not isinstance(problem.inputs, dict) or "target_x" not in problem.inputs:
            raise DataError(
                f"{self.name} learns from tasks: pass doxa.data.Tasks([(x, y), ...]), or a "
                "doxa.data.TaskSampler; on the command line, --task COLUMN"
            )
        with drawing("network"):  # torch's default generator does not move
            net = self.network(problem.inputs["target_x"][-1], problem.targets[-1])
        return problem.add_modules(net=net)

    def init(self, run: Run) -> State:
        given = run.likelihood
        if not isinstance(given, Gaussian) or given != Gaussian():
            raise MethodError(
                f"{self.name} predicts the noise of every point; {given!r} would not be used: "
                "leave the likelihood out (min_std= is the least noise)"
            )
        return run.init_modules(given=not run.settings.fresh)

    def parameters(self, run: Run, state: State) -> Tensor:
        return state["net"]

    def stages(self, run: Run) -> Iterable[Stage]:
        x = run.rows.x
        fixed = self.fixed(*spanned(x["target_x"], x["context"]))

        def objective(run: Run, params: State, batch: Batch, clock: Clock) -> tuple[Tensor, State]:
            return run.total(self.bound_of(run, params, batch, clock, fixed), batch), {}

        yield optimise(objective, run.steps, over=("net",), source="tasks")

    def bound_of(
        self, run: Run, params: State, batch: Batch, clock: Clock | None, fixed: tuple[Any, ...]
    ) -> Tensor:
        """The objective of each task, [M, B]; without a clock, the score for early stopping."""
        f = self.called(run, params, batch, *fixed)
        if clock is None:
            return self.at_points(f, batch)
        return self.per_point(f, batch, self.counted(batch))

    @property
    def autoregressive(self) -> bool:
        """Whether functions are drawn point by point, each given those before it."""
        return False

    def counted(self, batch: Batch) -> Tensor:
        """The points that count in training: the targets, and with `reconstruct` those of the
        context."""
        assert batch.points is not None
        if self.settings().get("reconstruct", False):
            return batch.x["context"] + batch.points
        return batch.points

    def called(self, run: Run, params: State, batch: Batch, *more: Any) -> Any:
        """The outputs of the network for a batch; tensors in `more` have the member axis."""
        own = None if batch.shared else 0
        dims = (own, *(0 if isinstance(value, Tensor) else None for value in more))
        return run.call("net", params, as_task(batch), *more, dims=dims)

    def at_points(self, f: Tensor, batch: Batch) -> Tensor:
        """The mean log-likelihood of the targets of each task, [M, B]."""
        assert batch.points is not None
        return self.per_point(f, batch, batch.points)

    def per_point(self, f: Tensor, batch: Batch, points: Tensor) -> Tensor:
        """The mean log-likelihood of some points of each task, [M, B]."""
        each = self.likelihood.log_prob(f, members_axis(batch.y, batch), {}, lead=2)
        return (each * points).sum(-1) / points.sum(-1)

    def score(self, run: Run, state: State, batch: Batch) -> Tensor:
        fixed = self.fixed(*spanned(batch.x["target_x"], batch.x["context"] + batch.points))
        return run.total(self.bound_of(run, state, batch, None, fixed), batch)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> NeuralPosterior:
        net = run.problem.modules["net"]
        common = run.common(self)
        inputs = common["inputs"]["target_x"][-1:]
        own = {"likelihood": self.likelihood, "scales": points_scales(common["scales"]),
               "inputs": inputs}  # fmt: skip
        outputs = run.rows.y.shape[-1]
        return NeuralPosterior(
            **common | own, net=net, weights=state["net"].clone(), outputs=outputs
        )


def as_task(batch: Batch) -> dict[str, Tensor]:
    assert batch.points is not None
    return {**batch.x, "targets": batch.points}


def members_axis(t: Tensor, batch: Batch) -> Tensor:
    """[M, B, ...], also if all members have the same rows."""
    return t.expand(len(batch.scale), *t.shape) if batch.shared else t
