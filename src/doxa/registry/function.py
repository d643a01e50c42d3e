"""Processes: beliefs about functions themselves."""

from doxa.registry.row import Demo, Row

ROWS = (
    Row("gp", "doxa.function.gp:GP", "process",
        "Exact Gaussian-process regression, hyper-parameters by marginal likelihood",
        "Rasmussen & Williams 2006", "no network; up to ~10,000 rows", "N³",
        ("regression",), "gp",
        gives="evidence, no network",
        demo=Demo("RBF kernel, exact"),
        docs="methods.md", evidence=True),
    Row("nngp", "doxa.function.wide.nngp:NNGP", "process",
        "Exact inference in an infinitely wide network: a GP with the architecture's kernel",
        "Lee et al. 2018", "no network, or one to read off; up to ~10,000 rows", "N³",
        ("regression",),
        gives="evidence, no training; classes with a network",
        short={"depth": 1, "refine": 5},
        docs="infinite_width.md", evidence=True),
    Row("ntk", "doxa.function.wide.ntk:NTK", "process",
        "An ensemble of infinitely wide networks after gradient descent",
        "Lee et al. 2019", "no network, or one to read off; up to ~5,000 rows", "N³",
        ("regression",),
        gives="a deep ensemble's limit; training time t; classes with a network",
        short={"depth": 1, "refine": 5},
        docs="infinite_width.md"),
)  # fmt: skip
