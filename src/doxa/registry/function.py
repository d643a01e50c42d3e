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
    Row("sparse-gp", "doxa.function.sparse:SparseGP", "process",
        "Gaussian process through inducing points, mini-batches, any likelihood (SVGP)",
        "Titsias 2009; Hensman et al. 2013, 2015", "no network; any number of rows",
        "Z³ + BZ² a step", ("regression", "classification"),
        gives="bound, classes, streams", short={"inducing": 8},
        demo=Demo("RBF kernel, 20 inducing points", {"inducing": 20}, {"steps": 400}),
        docs="sparse.md", elbo=True),
    Row("deep-gp", "doxa.function.deep_gp:DeepGP", "process",
        "Layers of Gaussian processes, doubly stochastic variational inference",
        "Salimbeni & Deisenroth 2017", "no network; any number of rows",
        "L·(Z³ + BZ²) a step", ("regression", "classification"),
        gives="bound, functions that a GP cannot have", short={"inducing": 6},
        demo=Demo("2 layers, 20 inducing points", {"inducing": 20}, {"steps": 800}),
        docs="sparse.md", elbo=True),
)  # fmt: skip
