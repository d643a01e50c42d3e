"""The no-U-turn sampler: Hamiltonian Monte Carlo that chooses the length of each trajectory.

    grow the trajectory by doubling, forwards or backwards at random, until it turns back;
    take one of its points z with probability proportional to exp(−H(z))

Hoffman & Gelman (2014), with multinomial draws and the generalised U-turn of Betancourt (2017), as
in Stan. All chains advance together, and each transition takes as long as its longest tree: no
trajectory length has to be chosen, but chains wait for each other. Burn-in adapts the step size and
the mass as in `doxa.mcmc.hamiltonian`. Gradients use all rows; dropout is off and BatchNorm is
frozen. A transition is not a fixed sequence of operations, so only parts of it are recorded or
compiled.

**Doubling.** A doubling adds a branch of 2^d leapfrog steps, called leaves, at one end of the
trajectory. Its points have the weights exp(H₀ − H). One of them is drawn with these weights, leaf
by leaf. It replaces the point drawn from the tree with probability min(1, w_branch / w_tree), which
favours points far from the start.

**Turning.** Consider a segment that begins with momentum p and ends with p', where ρ is the sum of
all its momenta. It turns back if p·ρ ≤ 0 or p'·ρ ≤ 0 (in the coordinates of the leapfrog, the mass
is 1). This is checked for every balanced subtree (Betancourt, 2017). As in Stan, it is also checked
for each half together with the first point of the other half, which detects turns that the end
points alone would miss.

**Without recursion.** Leaf i ends as many subtrees as the binary form of i has trailing ones. The
start of each subtree is stored when it begins; the storage has one place per level of a branch
(Phan, Pradhan & Jankowiak, 2019). All chains are at the same leaf of the same doubling. Chains that
have finished wait for the others.

`init_tree`, `new_leaf`, `check_turning` and `merge` are fixed sequences of tensor operations, which
can be recorded or compiled. They map dicts of tensors to dicts of tensors. `grow` is the loop that
calls them. In names, "end" is the outermost point of a branch, "taken" is the point drawn from the
tree, and "drawn" is the point drawn from the branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.engine.execute import Part, Recorded
from doxa.mcmc.hamiltonian import KINDS, Hamiltonian
from doxa.mcmc.kernel import DIVERGENT, Move, Point, ValueAndGrad, acceptance, leapfrog
from doxa.method import Clock, Info, Run, State
from doxa.method.method import between, one_of, positive, whole
from doxa.method.trace import Tree

_AHEAD = 5  # number of doublings whose random numbers are drawn at the start of a transition

_PLACE = ("theta", "momentum", "grad")  # stored for an end, where the trajectory may continue
_TAKEN = ("theta", "grad", "log_density", "energy")  # stored for a point that is drawn
_TALLY = ("accept", "leapfrogs", "divergent")


class Parts(NamedTuple):
    """The fixed sequences of operations, as functions that may be recorded or compiled."""

    init_tree: Part
    leaf: Part
    check_turning: Part
    merge: Part


def grow(
    parts: Parts,
    start: Point,
    metric: Tensor,
    step: Tensor,
    clock: Clock,
    max_depth: int,
    limit: int | None = None,
) -> State:
    """Make one transition.

    Parameters
    ----------
    parts : Parts
        The operations, made for trees of depth `max_depth`.
    start : Point
        The current draw with a new momentum.
    metric : Tensor
        F, [M, P] or [M, P, P].
    step : Tensor of shape [M]
        The step size.
    clock : Clock
        The source of random numbers.
    max_depth : int
        The largest number of doublings.
    limit : int, optional
        A smaller number of doublings, after which the transition ends.

    Returns
    -------
    State
        The point that is taken, and the statistics of the transition.
    """
    uniform = clock.uniform(2 * max_depth + 2**_AHEAD - 1)
    seed = parts.init_tree({
        "momentum": start.momentum, "log_density": start.log_density, "step": step,
        "uniform": uniform,
    })  # fmt: skip
    forward, luck = seed["forward"].unbind(0), seed["luck"].unbind(0)
    zero = seed["zero"]
    fixed = {"metric": metric, "start": seed["start"]}
    branch = {name: seed[f"branch.{name}"] for name in ("weight", "sum")}
    here = {name: getattr(start, name) for name in _PLACE}
    tree = {f"{side}.{name}": here[name] for side in ("left", "right") for name in _PLACE}
    tree |= {"weight": zero, "sum": start.momentum, "depth": zero}
    tree |= {f"taken.{name}": getattr(start, name) for name in _TAKEN[:3]}
    tree["taken.energy"] = seed["start"]
    now = {"active": seed["active"], "step": seed["step"], **here, **dict.fromkeys(_TALLY, zero)}
    leaves: list[_Leaf] | None = None if clock.trace is None else []
    for level in range(min(max_depth, limit or max_depth)):
        count = 2**level
        if level < _AHEAD:
            lucks = seed["lucks"][count - 1 : 2 * count - 1]  # [count, M]
        else:
            lucks = clock.uniform(count).log().T.contiguous()
        held = {f"taken.{name}": tree[f"taken.{name}"] for name in _TAKEN}
        end, first = _branch(parts, {**now, **branch, **fixed, **held}, lucks.unbind(0), leaves)
        after = min(level + 1, max_depth - 1)
        tree = parts.merge({
            **tree, **{f"end.{name}": end[name] for name in (*_PLACE, "weight", "sum")},
            **{f"drawn.{name}": end[f"taken.{name}"] for name in _TAKEN},
            "first": first, "active": end["active"], "luck": luck[level], "size": seed["size"],
            "forward": forward[level], "next": forward[after],
        })  # fmt: skip
        now = {name: tree.pop(name) for name in ("active", "step", *_PLACE)}
        now |= {name: end[name] for name in _TALLY}
        if not bool(now["active"].any()):
            break
    if clock.trace is not None and leaves is not None:
        clock.trace.append(_tree_of(start, leaves, seed["forward"], tree["taken.theta"]))
    tally = {name: now[name] for name in _TALLY}
    return {
        **{name: tree[f"taken.{name}"] for name in _TAKEN}, **tally, "depth": tree["depth"],
        "saturated": now["active"].to(zero.dtype),
        "accept": tally["accept"] / tally["leapfrogs"].clamp(min=1),
    }  # fmt: skip


_Leaf = tuple[Tensor, Tensor, Tensor, int]  # θ, momentum, whether it was reached, and its branch


def _tree_of(start: Point, leaves: list[_Leaf], forward: Tensor, taken: Tensor) -> Tree:
    """The record of a tree; its energies are computed by `NUTS`."""
    root = (start.theta, start.momentum, torch.isfinite(start.energy), 0)
    theta, momentum, reached, size = zip(root, *leaves, strict=True)
    positions = torch.stack(theta)
    doubling = torch.tensor([s.bit_length() for s in size])  # that of 2^d leaves is number d + 1
    same = (positions == taken).all(2) & torch.stack(reached)
    return Tree(
        positions, torch.stack(momentum), start.energy.expand(len(positions), -1), doubling,
        forward[: int(doubling.max()), :, 0], torch.stack(reached), same.long().argmax(0),
    )  # fmt: skip


def _branch(
    parts: Parts, branch: State, lucks: tuple[Tensor, ...], leaves: list[_Leaf] | None = None
) -> tuple[State, Tensor]:
    """Build a branch with one leaf per entry of `lucks`, each of which has uniform numbers [M].
    Returns the branch and the momentum of its first leaf. Chains that turn back or diverge become
    inactive."""
    noted: list[tuple[Tensor, Tensor, Tensor]] = []  # starts of subtrees, outermost first
    first = branch["momentum"]
    for i, luck in enumerate(lucks):
        before, behind = branch["momentum"], branch["sum"]
        branch = parts.leaf({**branch, "luck": luck})
        if leaves is not None:  # a recording overwrites its values
            theta, momentum, reached = (branch[k].clone() for k in ("theta", "momentum", "active"))
            leaves.append((theta, momentum, reached, len(lucks)))
        note = branch["momentum"], behind, before
        if i == 0:
            first = note[0]
        if i % 2 == 0:
            noted[(i >> 1).bit_count() :] = [note]
            continue
        for level in range(1, (~i & (i + 1)).bit_length()):  # as many as i has trailing ones
            outer = noted[((i + 1 - 2**level) >> 1).bit_count()]
            branch |= parts.check_turning({
                "active": branch["active"], "last": branch["momentum"], "total": branch["sum"],
                "begin": outer[0], "behind": outer[1],
                "middle": note[0], "half": note[1], "before": note[2],
            })  # fmt: skip
            note = outer
        if i + 1 < len(lucks) and not bool(branch["active"].any()):
            break
    return branch, first


def init_tree(at: State, max_depth: int) -> State:
    """Start a tree of one point, and draw the direction of its first branch. The random numbers
    `uniform` decide all directions and which points are taken."""
    momentum = at["momentum"]
    energy = Point(momentum, momentum, at["log_density"], momentum).energy
    zero = torch.zeros_like(energy)
    size = at["step"].unsqueeze(1)
    forward = (at["uniform"][:, :max_depth] < 0.5).T.unsqueeze(2).contiguous()  # [depth, M, 1]
    lucks = at["uniform"][:, max_depth:].log().T.contiguous()
    return {
        "start": energy, "active": torch.isfinite(energy), "zero": zero,
        "size": size, "step": torch.where(forward[0], size, -size), "forward": forward,
        "luck": lucks[:max_depth], "lucks": lucks[max_depth:],
        "branch.weight": zero - torch.inf, "branch.sum": torch.zeros_like(momentum),
    }  # fmt: skip


def new_leaf(density: ValueAndGrad, branch: State) -> State:
    """Add one leaf to a branch: a leapfrog step, its weight, and whether its point is drawn."""
    active = branch["active"]
    theta, momentum, grad = (branch[name] for name in _PLACE)
    here = Point(theta, momentum, branch["start"], grad)  # `leapfrog` does not read its density
    there = leapfrog(density, here, branch["metric"], branch["step"])
    energy = there.energy
    error = energy - branch["start"]
    fine = active & (error < DIVERGENT)
    count = active.to(error.dtype)
    weight = torch.where(fine, -error, -torch.inf)
    total = torch.logaddexp(branch["weight"], weight)
    take = fine & (branch["luck"] < weight - total)
    moved = {name: _pick(fine, getattr(there, name), branch[name]) for name in _PLACE}
    new = {"theta": there.theta, "grad": there.grad, "log_density": there.log_density,
           "energy": energy}  # fmt: skip
    return {
        **branch, **moved, "active": fine, "weight": total,
        "sum": branch["sum"] + moved["momentum"],
        **{f"taken.{k}": _pick(take, v, branch[f"taken.{k}"]) for k, v in new.items()},
        "accept": branch["accept"] + count * acceptance(-error),
        "leapfrogs": branch["leapfrogs"] + count,
        "divergent": branch["divergent"] + (active & ~fine).to(error.dtype),
    }  # fmt: skip


def check_turning(at: State) -> State:
    """Find the chains that have not turned back at the end of a subtree.

    The subtree began with the momentum `begin`, when the sum of momenta was `behind`. Its right
    half began with `middle`, when the sum was `half`; the momentum before that was `before`. In a
    subtree of two leaves the halves are single points, and the three checks are the same.
    """
    total, behind, half = at["total"], at["behind"], at["half"]
    turned = _turns(at["begin"], at["last"], total - behind)
    turned = turned | _turns(at["begin"], at["middle"], half - behind + at["middle"])
    turned = turned | _turns(at["before"], at["last"], total - half + at["before"])
    return {"active": at["active"] & ~turned}


def merge(at: State) -> State:
    """Add a branch to the tree, and prepare the start of the next branch."""
    forward, active = at["forward"], at["active"]  # [M, 1], [M]
    left, right = at["left.momentum"], at["right.momentum"]
    far, near = torch.where(forward, left, right), torch.where(forward, right, left)
    end, first, total = at["end.momentum"], at["first"], at["sum"] + at["end.sum"]
    turned = _turns(far, end, total)
    turned = turned | _turns(far, first, at["sum"] + first)
    turned = turned | _turns(near, end, at["end.sum"] + near)
    take = active & (at["luck"] < at["end.weight"] - at["weight"])
    grown = active.unsqueeze(1)
    ends = {}
    for name in _PLACE:
        for side, moves in (("right", grown & forward), ("left", grown & ~forward)):
            ends[f"{side}.{name}"] = torch.where(moves, at[f"end.{name}"], at[f"{side}.{name}"])
    ahead = {n: torch.where(at["next"], ends[f"right.{n}"], ends[f"left.{n}"]) for n in _PLACE}
    weight = torch.logaddexp(at["weight"], at["end.weight"])
    return {
        **ends, **ahead, "step": torch.where(at["next"], at["size"], -at["size"]),
        **{f"taken.{n}": _pick(take, at[f"drawn.{n}"], at[f"taken.{n}"]) for n in _TAKEN},
        "weight": _pick(active, weight, at["weight"]), "sum": _pick(active, total, at["sum"]),
        "depth": at["depth"] + active.to(weight.dtype), "active": active & ~turned,
    }  # fmt: skip


def _turns(p: Tensor, q: Tensor, total: Tensor) -> Tensor:
    return ((p * total).sum(1) <= 0) | ((q * total).sum(1) <= 0)


def _pick(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask if yes.ndim == 1 else mask.unsqueeze(1), yes, no)


_EARLY = 7  # largest depth until a mass is estimated, when longer trees would have no benefit


@store.register("nuts")
@dataclass(frozen=True)
class NUTS(Hamiltonian):
    """Multinomial no-U-turn sampler.

    Parameters
    ----------
    draws, burn_in : int
        Transitions that are kept from each chain (after `thin`), and transitions before them.
    target_accept : float
        The acceptance rate to which the step size is adapted. Set it nearer to 1 if transitions
        diverge.
    max_depth : int
        The largest number of doublings. A transition has at most 2^max_depth − 1 leapfrog steps,
        and at most 2^7 − 1 until burn-in has estimated the first mass.
    mass : str
        "diagonal" (one scale per parameter) or "full" (a covariance matrix, for at most a few
        hundred parameters).
    thin : int
        Keep every `thin`-th draw.
    temperature : float
        T.
    """

    name: ClassVar[str] = "nuts"
    renamed_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mass": {"dense": "full"}}
    default_members: ClassVar[int] = 4
    tallied: ClassVar[tuple[str, ...]] = (*Hamiltonian.tallied, "depth", "saturated")

    draws: int = whole(500, least=1)
    burn_in: int = whole(500, least=0)
    target_accept: float = between(0.8, 0, 1, "()", per_run=True)
    max_depth: int = whole(10, least=1, most=20)
    mass: str = one_of(*KINDS)
    thin: int = whole(1, least=1)
    temperature: float = positive(1.0, per_run=True)

    @property
    def gradients(self) -> tuple[int, int]:
        """The numbers of gradients if all trees turn back at once, and if none turns back."""
        return self.transitions, self.transitions * (2**self.max_depth - 1)

    def captures(self, run: Run) -> bool:
        return False

    def move(self, run: Run) -> tuple[Move, Recorded | None]:
        def leaf(state: State, batch: Batch, branch: State) -> State:
            return new_leaf(self.density(run, state, batch), branch)

        recorded = Recorded(run, leaf, self.transitions * 2 ** min(self.max_depth, 4))
        plants, closes, joins = (
            recorded.part(each) for each in (self._plant, check_turning, merge)
        )

        def move(state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            leaves = lambda branch: recorded(state, batch, clock, branch)  # noqa: E731
            parts = Parts(plants, leaves, closes, joins)
            found = self._transition(state, clock, parts)
            recorded.end_transition()
            self._trace_energies(run, state, batch, clock)
            return found

        return move, recorded

    def transition(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        density = self.density(run, state, batch)
        leaf = lambda branch: new_leaf(density, branch)  # noqa: E731
        found = self._transition(state, clock, Parts(self._plant, leaf, check_turning, merge))
        self._trace_energies(run, state, batch, clock)
        return found

    def _trace_energies(self, run: Run, state: State, batch: Batch, clock: Clock) -> None:
        """The energies of the nodes of a traced tree, which no step needs afterwards."""
        if clock.trace is None:
            return
        density, tree = self.density(run, state, batch), clock.trace.pop()
        points = [
            Point(theta, momentum, *density(theta))
            for theta, momentum in zip(tree.positions, tree.momenta, strict=True)
        ]
        energies = torch.stack([point.energy for point in points])
        clock.trace.append(replace(tree, energies=energies))

    def _plant(self, values: State) -> State:
        return init_tree(values, self.max_depth)

    def _transition(self, state: State, clock: Clock, parts: Parts) -> tuple[State, Info]:
        start = self.depart(state, clock)
        early = _EARLY if bool(state["early"].any()) else None
        found = grow(parts, start, state["metric"], state["step"], clock, self.max_depth, early)
        new = {**state, **{name: found.pop(name) for name in ("theta", "grad", "log_density")}}
        return new, {**found, "step_size": state["step"]}

    def report(self, state: State) -> dict[str, Any]:
        return {
            **super().report(state),
            "tree_depth": self.share(state, "depth").tolist(),
            "saturated_share": float(self.share(state, "saturated").mean()),
        }
