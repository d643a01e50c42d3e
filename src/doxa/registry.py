"""The table of methods, declared so that listing them imports nothing heavy.

A method joins by a row here, or from another package through the entry-point group
"doxa.methods", whose entries point at a `Row`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from doxa import store
from doxa.errors import MethodError, MissingExtra
from doxa.likelihoods import LIKELIHOODS, Heads, Likelihood
from doxa.priors import PRIORS
from doxa.suggest import did_you_mean


@dataclass(frozen=True)
class Row:
    """One method: its name, where it lives, and what a person choosing wants to know."""

    name: str
    target: str  # "module:Class"
    family: str
    summary: str
    paper: str
    needs: str
    cost: str  # in multiples of one MAP fit
    tasks: tuple[str, ...] = ("regression", "classification")
    extra: str | None = None


ROWS = (
    Row("linear", "doxa.exact.linear:BayesianLinear", "exact",
        "Bayesian linear regression on features: exact posterior, predictive and evidence",
        "Bishop 2006, ch. 3; MacKay 1992", "features (or none: the inputs)", "≪ 1",
        ("regression",)),
    Row("map", "doxa.point.map:MAP", "point",
        "The maximum of the log joint: regularised training",
        "MacKay 1992", "any network", "1"),
    Row("deep-ensemble", "doxa.ensemble.deep:DeepEnsemble", "ensemble",
        "Several MAP fits from different starts, averaged",
        "Lakshminarayanan et al. 2017", "any network", "members × 1, stacked"),
    Row("mean-field", "doxa.vi.mean_field:MeanField", "variational",
        "A factorised Gaussian over the weights by stochastic ELBO ascent (Bayes by Backprop)",
        "Blundell et al. 2015", "any network", "1.5–2"),
    Row("mc-dropout", "doxa.vi.mc_dropout:MCDropout", "variational",
        "Dropout kept on at prediction, as variational inference",
        "Gal & Ghahramani 2016", "dropout layers, or inserts them", "1"),
    Row("laplace", "doxa.laplace.laplace:Laplace", "laplace",
        "A Gaussian at the MAP from the generalised Gauss–Newton matrix; gives evidence",
        "MacKay 1992; Daxberger et al. 2021", "any network; full: up to ~5,000 weights",
        "1 + one pass"),
    Row("metropolis", "doxa.mcmc.metropolis:Metropolis", "mcmc",
        "Random-walk Metropolis on the full data, its proposal learned in burn-in",
        "Metropolis et al. 1953; Haario et al. 2001", "a few dozen parameters at most",
        "10⁴ evaluations and more"),
    Row("nuts", "doxa.mcmc.nuts:NUTS", "mcmc",
        "The no-U-turn sampler: HMC that finds its own trajectory length",
        "Hoffman & Gelman 2014; Betancourt 2017", "full-batch gradients",
        "10³ gradients and more"),
    Row("hmc", "doxa.mcmc.hmc:HMC", "mcmc",
        "Hamiltonian Monte Carlo on the full data, step size and mass adapted",
        "Neal 2011; Hoffman & Gelman 2014", "full-batch gradients", "10³ gradients and more"),
    Row("sgld", "doxa.mcmc.sgld:SGLD", "mcmc",
        "Stochastic gradient Langevin dynamics: SGD with a falling rate and Gaussian noise",
        "Welling & Teh 2011", "mini-batch gradients", "1–3"),
    Row("psgld", "doxa.mcmc.psgld:PSGLD", "mcmc",
        "Langevin dynamics with RMSprop's step sizes, one a weight",
        "Li et al. 2016", "mini-batch gradients", "1–3"),
    Row("sghmc", "doxa.mcmc.sghmc:SGHMC", "mcmc",
        "Stochastic gradient Hamiltonian Monte Carlo: momentum SGD with friction's noise",
        "Chen, Fox & Guestrin 2014", "mini-batch gradients", "1–3"),
    Row("constant-sgd", "doxa.mcmc.constant_sgd:ConstantSGD", "mcmc",
        "Constant-rate SGD around the optimum, its rate chosen to come closest to the posterior",
        "Mandt, Hoffman & Blei 2017", "mini-batch gradients", "2"),
    Row("cyclical", "doxa.mcmc.cyclical:CyclicalSGMCMC", "mcmc",
        "SGLD or SGHMC under a cyclical step size: several modes with one chain",
        "Zhang et al. 2020", "mini-batch gradients", "2–5"),
    Row("minibatch-mh", "doxa.mcmc.minibatch_mh:MinibatchMH", "mcmc",
        "Metropolis–Hastings with the acceptance on a mini-batch: approximate, biased",
        "Korattikara et al. 2014; Bardenet et al. 2017", "small networks", "5–10"),
    Row("gp", "doxa.function.gp:GP", "process",
        "Exact Gaussian-process regression, hyper-parameters by marginal likelihood",
        "Rasmussen & Williams 2006", "no network; up to ~10,000 rows", "N³",
        ("regression",), "gp"),
)  # fmt: skip


class MethodTable:
    """What `doxa.methods()` gives: iterable rows, and a readable table when printed."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> Row:
        for row in self._rows:
            if row.name == name:
                return row
        names = [row.name for row in self._rows]
        raise MethodError(f"no method named {name!r}{did_you_mean(name, names)}")

    def __repr__(self) -> str:
        columns = [("method", "name"), ("family", "family"), ("what it is", "summary"),
                   ("cost (MAP = 1)", "cost"), ("paper", "paper")]  # fmt: skip
        cells = [[title for title, _ in columns]]
        cells += [[str(getattr(row, key)) for _, key in columns] for row in self]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        return "\n".join(line.rstrip() for line in lines)


@cache
def _rows() -> tuple[Row, ...]:
    from importlib.metadata import entry_points

    plugins = [entry.load() for entry in entry_points(group="doxa.methods")]
    return (*ROWS, *plugins)


def methods() -> MethodTable:
    """The table of methods: name, family, paper, what it needs, what it costs."""
    return MethodTable(list(_rows()))


@cache
def get_method(name: str) -> type[Any]:
    """The class of a method by its name."""
    row = methods()[name]
    module, _, cls = row.target.partition(":")
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        if row.extra is None:
            raise
        raise MissingExtra(
            f"method {name!r} needs the extra {row.extra!r}: pip install 'doxa[{row.extra}]'"
        ) from error


def import_all() -> None:
    """Import every method that can be imported here, so that all kinds of posterior are known."""
    for row in methods():
        try:
            get_method(row.name)
        except MissingExtra:
            continue


for _row in ROWS:
    store.register_lazily(_row.name, _row.target)
_likelihoods: list[type[Likelihood]] = [*LIKELIHOODS.values(), Heads]
for _likelihood in _likelihoods:
    store.register(f"likelihood.{_likelihood.name}")(_likelihood)
for _prior in PRIORS.values():
    store.register(f"prior.{_prior.name}")(_prior)
