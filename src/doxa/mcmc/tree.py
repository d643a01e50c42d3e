"""The trajectory of a NUTS transition, grown by doubling until it turns back.

A doubling adds a branch of 2^d leapfrog steps at one end. Its points weigh exp(H₀ − H); one of them
is drawn, leaf by leaf (multinomial within the branch), and replaces the tree's with probability
min(1, w_branch / w_tree), which favours the far end. A stretch from momentum p to p' with sum ρ
turns back when p·ρ ≤ 0 or p'·ρ ≤ 0 (in the leapfrog's coordinates the mass is 1). That is asked of
every balanced subtree, and of either half with the first point of the other: Betancourt (2017),
and Stan's extra checks, which see what the ends alone would miss.

Subtrees are not built recursively. Leaf i closes as many of them as i has trailing ones in binary;
where each began was noted when it did, in as many places as a branch has levels (Phan, Pradhan &
Jankowiak, 2019). All chains are at the same leaf of the same doubling: those that are done wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from doxa.mcmc.kernel import acceptance
from doxa.mcmc.leapfrog import DIVERGENT, Density, Point, leapfrog
from doxa.run import Clock, State

Leaf = Callable[[State], State]

_POINT = ("theta", "momentum", "log_density", "grad")


def grow(
    leaf: Leaf, start: Point, metric: Tensor, step: Tensor, clock: Clock, max_depth: int
) -> State:
    """A whole transition from `start`: the point taken, and what people want to know of it."""
    zero = torch.zeros_like(start.log_density)
    energy = start.energy
    left = right = start
    taken = {"theta": start.theta, "grad": start.grad, "log_density": start.log_density,
             "energy": energy}  # fmt: skip
    tree: State = {"weight": zero, "sum": start.momentum}
    active = torch.isfinite(energy)
    tally = {name: zero.clone() for name in ("accept", "leapfrogs", "divergent")}
    depth = zero
    for level in range(max_depth):
        forward = clock.uniform(1) < 0.5  # [M, 1]
        near, far = _where(forward, right, left), _where(forward, left, right)
        reach = torch.where(forward, step, -step)
        branch = _branch(leaf, near, metric, reach, energy, active, tally, clock, level)
        active = branch["active"]
        tally = {name: branch[name] for name in tally}
        depth = depth + active.to(depth.dtype)
        luck = clock.uniform(1).squeeze(1).log()
        take = active & (luck < branch["weight"] - tree["weight"])
        taken = {name: _pick(take, branch[f"taken.{name}"], taken[name]) for name in taken}
        end = Point(*(branch[name] for name in _POINT))
        turned = _turns(far.momentum, end.momentum, tree["sum"] + branch["sum"])
        turned |= _turns(far.momentum, branch["first"], tree["sum"] + branch["first"])
        turned |= _turns(near.momentum, end.momentum, branch["sum"] + near.momentum)
        grown = active.unsqueeze(1)
        right, left = _where(grown & forward, end, right), _where(grown & ~forward, end, left)
        tree = {
            "weight": _pick(active, torch.logaddexp(tree["weight"], branch["weight"]),
                            tree["weight"]),
            "sum": _pick(active, tree["sum"] + branch["sum"], tree["sum"]),
        }  # fmt: skip
        active = active & ~turned
        if not bool(active.any()):
            break
    return {
        **taken, **tally, "depth": depth, "saturated": active.to(zero.dtype),
        "accept": tally["accept"] / tally["leapfrogs"].clamp(min=1),
    }  # fmt: skip


def _branch(
    leaf: Leaf, near: Point, metric: Tensor, step: Tensor, energy: Tensor, active: Tensor,
    tally: State, clock: Clock, level: int,
) -> State:  # fmt: skip
    """2^level leaves beyond `near`; chains that turn or diverge on the way leave `active`."""
    count = 2**level
    luck = clock.uniform(count).log().T.contiguous()  # [count, M]
    branch: State = {
        **dict(zip(_POINT, near, strict=True)), "metric": metric, "step": step, "start": energy,
        "active": active, "weight": torch.full_like(energy, -torch.inf),
        "sum": torch.zeros_like(near.momentum), "taken.theta": near.theta.clone(),
        "taken.grad": near.grad.clone(), "taken.log_density": near.log_density.clone(),
        "taken.energy": energy.clone(), **tally,
    }  # fmt: skip  # copies, so that a compiled leaf never sees one tensor under two names
    noted: list[tuple[Tensor, Tensor, Tensor]] = []  # of where subtrees began, outermost first
    first = near.momentum
    for i in range(count):
        before, behind = branch["momentum"], branch["sum"]
        branch = leaf({**branch, "luck": luck[i]})
        if i == 0:
            first = branch["momentum"]
        if i % 2 == 0:
            place = (i >> 1).bit_count()
            noted[place:] = [(branch["momentum"], behind, before)]
            if count > 1:
                continue
        else:
            turned = _closed(branch, noted, i)
            branch["active"] = branch["active"] & ~turned
        if i + 1 < count and not bool(branch["active"].any()):
            break
    return {**branch, "first": first}


def _closed(branch: State, noted: list[tuple[Tensor, Tensor, Tensor]], i: int) -> Tensor:
    """Whether one of the subtrees that end with leaf i turns back: [M]."""
    last, total = branch["momentum"], branch["sum"]
    turned = torch.zeros_like(branch["active"])
    inner: tuple[Tensor, Tensor, Tensor] | None = None
    levels = (~i & (i + 1)).bit_length() - 1  # trailing ones
    for level in range(1, levels + 1):
        place = ((i + 1 - 2**level) >> 1).bit_count()
        start, behind, _ = noted[place]
        turned = turned | _turns(start, last, total - behind)
        if inner is not None:  # of the right half: its first momentum, the sum and the one before
            middle, half, before = inner
            turned = turned | _turns(start, middle, half - behind + middle)
            turned = turned | _turns(before, last, total - half + before)
        inner = noted[place]
    return turned


def sprout(density: Density, branch: State) -> State:
    """One leaf: a leapfrog step, its weight, and whether it is the one taken. A fixed sequence of
    tensor operations."""
    active, step = branch["active"], branch["step"]
    here = Point(*(branch[name] for name in _POINT))
    there = leapfrog(density, here, branch["metric"], step)
    energy = there.energy
    error = energy - branch["start"]
    fine = active & (error < DIVERGENT)
    count = active.to(error.dtype)
    weight = torch.where(fine, -error, -torch.inf)
    total = torch.logaddexp(branch["weight"], weight)
    take = fine & (branch["luck"] < weight - total)
    wide = take.unsqueeze(1)
    moved = _where(fine.unsqueeze(1), there, here)
    return {
        **branch, **dict(zip(_POINT, moved, strict=True)), "active": fine, "weight": total,
        "sum": branch["sum"] + moved.momentum,
        "taken.theta": torch.where(wide, there.theta, branch["taken.theta"]),
        "taken.grad": torch.where(wide, there.grad, branch["taken.grad"]),
        "taken.log_density": torch.where(take, there.log_density, branch["taken.log_density"]),
        "taken.energy": torch.where(take, energy, branch["taken.energy"]),
        "accept": branch["accept"] + count * acceptance(-error),
        "leapfrogs": branch["leapfrogs"] + count,
        "divergent": branch["divergent"] + (active & ~fine).to(error.dtype),
    }  # fmt: skip


def _turns(p: Tensor, q: Tensor, total: Tensor) -> Tensor:
    return ((p * total).sum(1) <= 0) | ((q * total).sum(1) <= 0)


def _pick(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask if yes.ndim == 1 else mask.unsqueeze(1), yes, no)


def _where(mask: Tensor, yes: Point, no: Point) -> Point:
    """Points of `yes` where the mask [M, 1] holds."""
    flat = mask.squeeze(1)
    return Point(*(torch.where(mask if a.ndim == 2 else flat, a, b)
                   for a, b in zip(yes, no, strict=True)))  # fmt: skip
