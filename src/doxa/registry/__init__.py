"""The table of methods, declared so that listing them imports nothing heavy.

A method joins by a row in the file here that is named as its folder, or from another package
through the entry-point group "doxa.methods", whose entries point at a `Row`. Whatever lists methods
reads it from here: the front page's names, the command line, the demo's panels, the README's table,
the benchmarks and the tests. The order is that of the demo and of the README: exact methods,
processes, neural processes, points and ensembles, variational ones, Laplace, chains.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from doxa import store
from doxa.errors import MissingExtra
from doxa.likelihoods import LIKELIHOODS, Heads, Likelihood
from doxa.priors import PRIORS
from doxa.registry import ensemble, exact, function, laplace, mcmc, neural, vi
from doxa.registry.row import Demo, Row
from doxa.registry.table import MethodTable

__all__ = ["ROWS", "Demo", "MethodTable", "Row", "get_method", "import_all", "methods"]


# Demo panels were chosen by hand on seeds 0 to 4, and their lengths so that all take a few minutes;
# the curve was made easier after a first draw (seeds 11, 12) came out poorly, and other draws are
# shown. An illustration, not a comparison. Wide ReLU networks were tried: their ensembles draw the
# same straight line through the gap (a spread of 0.06, against 0.20 with tanh).
ROWS = (
    *exact.ROWS,
    *function.ROWS,
    *neural.ROWS,
    *ensemble.ROWS,
    *vi.ROWS,
    *laplace.ROWS,
    *mcmc.ROWS,
)


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
    try:
        return getattr(importlib.import_module(row.module), row.class_name)
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


# What may be done to a predictive; so a saved one loads without `doxa.evaluate` being imported.
TRANSFORMS = {
    "recalibrate.temperature": "doxa.evaluate.recalibrate.temperature:Temperature",
    "recalibrate.vector": "doxa.evaluate.recalibrate.linear:Vector",
    "recalibrate.dirichlet": "doxa.evaluate.recalibrate.linear:Dirichlet",
    "recalibrate.isotonic": "doxa.evaluate.recalibrate.isotonic:Isotonic",
    "recalibrate.histogram": "doxa.evaluate.recalibrate.histogram:Histogram",
    "recalibrate.quantile": "doxa.evaluate.recalibrate.quantile:Quantile",
    "recalibrate.variance": "doxa.evaluate.recalibrate.variance:Variance",
    "conformal.interval": "doxa.evaluate.conformal.interval:Interval",
    "conformal.sets": "doxa.evaluate.conformal.sets:Sets",
    "conformal.groups": "doxa.evaluate.conformal.mondrian:Groups",
    "conformal.jackknife+": "doxa.evaluate.conformal.jackknife:JackknifePlus",
}

for _row in ROWS:
    store.register_lazily(_row.name, _row.target)
for _name, _target in TRANSFORMS.items():
    store.register_lazily(_name, _target)
_likelihoods: list[type[Likelihood]] = [*LIKELIHOODS.values(), Heads]
for _likelihood in _likelihoods:
    store.register(f"likelihood.{_likelihood.name}")(_likelihood)
for _prior in PRIORS.values():
    store.register(f"prior.{_prior.name}")(_prior)
