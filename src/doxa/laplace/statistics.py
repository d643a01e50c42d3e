"""What Laplace adds up over the data, and what it re-estimates from it, on stacked states.

One pass gives, for each member, the curvature of the uncertain weights, the log-likelihood at θ*,
and the squared residuals of each group of outputs that has a learned noise level of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import Batch, Pass, batch_rows
from doxa.laplace.curvature import output_size
from doxa.laplace.evidence import BOUNDS, reestimate
from doxa.laplace.forms import Form
from doxa.laplace.outputs import Averaged, Outputs
from doxa.laplace.scales import Scales, precision, prior_curvature
from doxa.likelihoods import Gaussian
from doxa.linalg import Embedded, Structure
from doxa.method import Run, State
from doxa.model import likelihood_parameters

NOISE = "likelihood.log_noise"
ROUNDS = 2000  # of the fixed point, where they are cheap


def learns_noise(run: Run) -> bool:
    """A Gaussian noise level that is re-estimated outside the Hessian."""
    return isinstance(run.likelihood, Gaussian) and NOISE in run.layout.slices


def noise_groups(run: Run) -> int:
    """How many groups of outputs have a noise level of their own."""
    return run.layout.select([NOISE]).size if learns_noise(run) else 1


@dataclass(frozen=True)
class Sums:
    """What a pass adds up: curvature of one kind ("ggn", "fisher", "hessian") in one form."""

    form: Form
    kind: str = "ggn"

    def learns_noise(self, run: Run) -> bool:
        """Whether noise is re-estimated. The empirical Fisher does not scale with it as G does, and
        a Hessian is not told apart by outputs."""
        kinds = ("ggn", "hessian") if noise_groups(run) == 1 else ("ggn",)
        return learns_noise(run) and self.kind in kinds

    def groups(self, run: Run) -> int:
        return noise_groups(run) if self.learns_noise(run) else 1

    def empty(self, run: Run) -> State:
        groups = self.groups(run)
        zeros = lambda *s: torch.zeros(run.size, *s, device=run.device, dtype=torch.float64)  # noqa: E731
        slope = zeros(groups, len(run.subset_index))
        return self.form.empty(run, groups) | {"chi": zeros(groups), "fit": zeros(), "slope": slope}

    @property
    def averages(self) -> bool:
        """Whether its curvature can be averaged over outputs."""
        return self.kind == "ggn" and self.form.averages

    def averaged(self, run: Run, state: State, away: Tensor) -> State:
        """The state with the curvature of all rows averaged over outputs f + d, d [M, S, B, O]."""
        bare = {k: v for k, v in state.items() if not k.startswith("curvature")}
        batch = Pass(run.rows, run.split_of).batch(0)
        made = self.add(run, bare | self.empty(run), batch, away)
        sums = {k: v for k, v in made.items() if k.startswith("curvature")}
        return self.form.complete(run, bare | sums | self.form.averaged(run, bare, away))

    def add(self, run: Run, state: State, batch: Batch, away: Tensor | None = None) -> State:
        """The state with some rows' curvature, squared residuals and log-likelihood. The curvature
        may be an average, over outputs f + d, d [M, S, B, O]."""
        new = dict(state)
        theta = likelihood_parameters(run.layout.unflatten(state["theta"])) | run.constants
        groups = self.groups(run)
        source = self.form.source(run, state)
        for rows in source.chunks(batch_rows(batch)):
            part = some_rows(batch, rows)
            outputs = Outputs(run.likelihood, theta, part, run.net.output, self.kind)
            outputs = outputs if away is None else Averaged(outputs, away[:, :, rows])
            sums, flat = self.form.add(source, new, outputs, groups)
            fit = outputs.log_prob(flat).double()
            if part.weight is not None:
                fit = fit * part.weight
            new |= sums
            new["fit"] = new["fit"] + fit.sum(1)
            if self.learns_noise(run):
                new["chi"] = new["chi"] + outputs.squares(flat, groups)
        return new

    def settle(self, run: Run, state: State, scale: bool, most: int = ROUNDS) -> State:
        """Learned noise, and the prior's scale where asked, at their type-II maximum for θ*, or
        after the most rounds that are to be made."""
        state = self.form.complete(run, state)
        prior, quad = prior_curvature(run, state)
        tau, groups, scales = state["tau"], self.groups(run), Scales.of(run, state)
        outputs = output_size(run.net.output) // groups  # in each group
        count = run.n.double()[:, None].expand(-1, groups) * outputs
        noise = self.learns_noise(run)
        ratio, rescale = torch.ones_like(state["chi"]), torch.ones_like(tau)
        if noise or scale:
            found, rounds = self.form.effective(run, state, scales.each(tau) * prior, scales)
            ratio, rescale = reestimate(
                found, min(rounds, most), state["chi"], count, tau * quad, noise=noise, scale=scale
            )
        new = {**state, "tau": (tau * rescale).clamp(*BOUNDS)}  # however often it is re-estimated
        if noise:
            theta = state["theta"].clone()
            theta[:, run.layout.slices[NOISE]] += 0.5 * ratio.log().to(theta.dtype)
            change = count * ratio.log() + state["chi"] * (1 / ratio - 1)
            new |= {
                **self.form.divided(state, ratio),
                "theta": theta,
                "chi": state["chi"] / ratio,
                "slope": state["slope"] / ratio[..., None],
                "fit": state["fit"] - 0.5 * change.sum(1),
            }
        return new

    def determined(self, run: Run, state: State, heat: Tensor) -> float:
        """T γ/n, at noise and a scale of the prior that were found with another form."""
        new, batches = state | self.empty(run), run.passes()
        for t in range(batches.count):
            new = self.add(run, new, batches.batch(t))
        new = self.form.complete(run, new)
        spread = self.form.covariance(run, new, precision(run, state))
        return determined(run, new, spread.scaled(heat.double()), heat)


def some_rows(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch, for all members."""
    at = (rows,) if batch.shared else (slice(None), rows)
    weight = None if batch.weight is None else batch.weight[..., rows]
    pick = lambda tree: tree_map(lambda t: t[at], tree)  # noqa: E731
    return Batch(pick(batch.x), pick(batch.y), batch.scale, weight, batch.shared)


def determined(run: Run, state: State, spread: Structure, heat: Tensor) -> float:
    """T γ/n: how many parameters the data determine, a row, γ = tr(H⁻¹ G) = p − tr(H⁻¹ τΛ).

    `spread` is T H⁻¹, `heat` T [M]; the mean of the members."""
    spread = spread.inner if isinstance(spread, Embedded) else spread
    bound = (precision(run, state) * spread.diagonal().double()).sum(1)
    return float(((heat.double() * spread.size - bound) / run.n.double()).mean())
