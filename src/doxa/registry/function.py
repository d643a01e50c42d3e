"""Processes: beliefs about functions themselves."""

from doxa.registry.row import Demo, Row

ROWS = (
    Row("gp", "doxa.function.gp:GP", "process",
        "Exact Gaussian-process regression, hyper-parameters by marginal likelihood",
        "Rasmussen & Williams 2006", "no network; up to ~10,000 rows", "N³",
        ("regression",),
        gives="evidence, no network",
        demo=Demo("RBF kernel, exact"),
        docs="processes.md", evidence=True),
)  # fmt: skip
