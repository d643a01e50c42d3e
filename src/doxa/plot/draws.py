"""Pictures of draws: traces, ranks, energies and pairs of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from doxa.density import Draws
from doxa.errors import DataError, Unavailable
from doxa.plot.style import FAINT, GRID, INK, SERIES, Array, axes, cells, legend
from doxa.posterior import Posterior, SamplePosterior
from doxa.posterior.chains import ebfmi, rhat


def _chains(source: Any, names: Sequence[str] | None, most: int) -> dict[str, Array]:
    """{label: [chains, draws]} of single numbers: of `Draws`, of a posterior of chains, or of a
    mapping of draws [chains, draws, *shape]."""
    if isinstance(source, Posterior):
        if not isinstance(source, SamplePosterior):
            raise Unavailable(f"a {source.kind} posterior keeps no chains to draw")
        source = source.layout.unflatten(source.samples)
    if not isinstance(source, Mapping):
        raise DataError(
            f"this picture is of draws, a posterior with chains, or {{name: [chains, draws]}}, not "
            f"of {type(source).__name__}"
        )
    unknown = [name for name in names or () if name.partition("[")[0] not in source]
    if unknown:
        raise DataError(f"no parameter is called {unknown[0]!r}; there are {', '.join(source)}")
    wanted = [*source] if names is None else list(dict.fromkeys(n.partition("[")[0] for n in names))
    found: dict[str, Array] = {}
    for name in wanted:
        values = torch.as_tensor(source[name]).detach().cpu().double()
        if values.ndim < 2 or values.shape[1] < 2:
            raise DataError(f"{name!r} has the shape {list(values.shape)}: it is no chain")
        for place in np.ndindex(*values.shape[2:]):
            label = f"{name}[{','.join(map(str, place))}]" if place else name
            if names is None or label in names or name in names:
                found[label] = values[(slice(None), slice(None), *place)].numpy()
            if len(found) >= most and names is None:
                return found
    if len(found) > most:
        raise DataError(f"{len(found)} numbers are too many for one picture: name at most {most}")
    return found


def trace(draws: Any, names: Sequence[str] | None = None, *, most: int = 4, ax: Any = None) -> Any:
    """The draws of every chain in their order: chains that agree look like one band.

    Parameters
    ----------
    draws : Draws, Posterior or Mapping
        Draws of `doxa.sample`, a posterior of chains, or {name: [chains, draws]}.
    names : sequence of str, optional
        Parameters, or single numbers of them ("mu", "beta[2]"). Default: the first ones.
    most : int, default 4
        The most numbers of one picture.
    ax : Axes, optional
        The axes to draw on. Several numbers are small pictures within them.

    Returns
    -------
    Axes
        The title of each picture has its R-hat.
    """
    found = _chains(draws, names, most)
    ax = axes(ax, "", "draw", "", (6.4, 1.1 + 1.6 * len(found)))
    for small, (label, values) in zip(cells(ax, len(found), 1), found.items(), strict=True):
        for k, chain in enumerate(values):
            small.plot(chain, color=SERIES[k % 4], lw=0.7, alpha=0.8, label=f"chain {k}")
        small.set_title(_with_rhat(label, values), loc="left", fontsize=10, color=INK)
        small.set_xlim(0, values.shape[1] - 1)
    small.set_xlabel("draw", color=FAINT)
    return ax


def _with_rhat(label: str, values: Array) -> str:
    if values.shape[1] < 4:
        return label
    return f"{label}   R-hat {float(rhat(torch.as_tensor(values))):.3f}"


def rank(
    draws: Any, names: Sequence[str] | None = None, *, bins: int = 20, most: int = 4, ax: Any = None
) -> Any:
    """Where the draws of each chain stand among those of all: flat if the chains agree.

    Parameters
    ----------
    draws, names, most
        As in `trace`.
    bins : int, default 20
        Number of bars.
    ax : Axes, optional
        The axes to draw on. Several numbers are small pictures within them.

    Returns
    -------
    Axes
        One line for each chain, and the band of 95 % of bars if the chains agree.
    """
    found = _chains(draws, names, most)
    ax = axes(ax, "", "rank among all draws", "draws", (6.4, 1.1 + 1.6 * len(found)))
    for small, (label, values) in zip(cells(ax, len(found), 1), found.items(), strict=True):
        ranks = values.reshape(-1).argsort(kind="stable").argsort().reshape(values.shape)
        edges = np.linspace(0, values.size, bins + 1)
        each = values.shape[1] / bins
        half = 1.96 * math.sqrt(each * (1 - 1 / bins))
        small.axhspan(max(0.0, each - half), each + half, color=GRID, lw=0)
        for k, own in enumerate(ranks):
            count = np.histogram(own, edges)[0]
            small.stairs(count, edges, color=SERIES[k % 4], lw=1.2, label=f"chain {k}")
        small.set_title(_with_rhat(label, values), loc="left", fontsize=10, color=INK)
        small.set_xlim(0, values.size)
        small.set_ylim(0, None)
    small.set_xlabel("rank among all draws", color=FAINT)
    return ax


def energy(draws: Any, *, bins: int = 40, ax: Any = None) -> Any:
    """Energies of a Hamiltonian sampler, and their changes between draws.

    Where the changes are much narrower than the energies, the momenta reach the tails too slowly
    (E-BFMI below 0.3).

    Parameters
    ----------
    draws : Draws or Posterior
        Of HMC or NUTS.
    bins : int, default 40
        Number of bars.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        Two densities, centred; the title has the smallest E-BFMI of the chains.
    """
    stats = draws.record.stats if isinstance(draws, Draws | Posterior) else {}
    if "energy" not in stats:
        raise Unavailable("these draws have no energies: HMC and NUTS keep them")
    values = stats["energy"].detach().cpu().double()
    worst = float(ebfmi(values).min())
    ax = axes(ax, f"energy (E-BFMI {worst:.2f})", "energy, centred", "density")
    centred = (values - values.mean(1, keepdim=True)).numpy().reshape(-1)
    steps = values.diff(dim=1).numpy().reshape(-1)
    limit = float(np.quantile(np.abs(np.concatenate([centred, steps])), 0.999)) or 1.0
    edges = np.linspace(-limit, limit, bins + 1)
    ax.hist(centred, edges, density=True, color=SERIES[0], alpha=0.45, label="energies")
    ax.hist(steps, edges, density=True, histtype="step", color=SERIES[1], lw=1.6,
            label="changes between draws")  # fmt: skip
    legend(ax)
    return ax


def pairs(draws: Any, names: Sequence[str] | None = None, *, most: int = 4, ax: Any = None) -> Any:
    """Every pair of parameters as points, and each parameter's histogram.

    Parameters
    ----------
    draws, names, most
        As in `trace`.
    ax : Axes, optional
        The axes to draw on; the pictures are within them.

    Returns
    -------
    Axes
        A lower triangle of scatters, with histograms on the diagonal. Divergent transitions of
        `Draws` are marked.
    """
    found = _chains(draws, names, most)
    if len(found) < 2:
        raise DataError("pairs needs two parameters at least; there is one number only")
    count, labels = len(found), list(found)
    ax = axes(ax, "", "", "", (1.9 * count + 1, 1.9 * count + 0.6))
    stats = draws.record.stats if isinstance(draws, Draws | Posterior) else {}
    lost = stats["divergent"].bool().cpu().numpy().reshape(-1) if "divergent" in stats else None
    places = cells(ax, count * count, count)
    flat = [values.reshape(-1) for values in found.values()]
    thin = max(1, len(flat[0]) // 2000)
    for row in range(count):
        for column in range(count):
            small = places[row * count + column]
            if column > row:
                small.set_visible(False)
                continue
            if row == column:
                small.hist(flat[row], 30, color=SERIES[0], alpha=0.7)
                small.set_yticks([])
            else:
                small.plot(flat[column][::thin], flat[row][::thin], ".", color=SERIES[0], ms=2,
                           alpha=0.35)  # fmt: skip
                if lost is not None and lost.any():
                    small.plot(flat[column][lost], flat[row][lost], "x", color=SERIES[1], ms=4,
                               label="divergent")  # fmt: skip
            small.tick_params(labelsize=7)
            if row == count - 1:
                small.set_xlabel(labels[column], fontsize=9, color=FAINT)
            if column == 0 and row:
                small.set_ylabel(labels[row], fontsize=9, color=FAINT)
    return ax
