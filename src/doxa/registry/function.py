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
    Row("functional-prior", "doxa.function.functional_prior:FunctionalPrior", "mcmc",
        "SGHMC under a prior over weights that is tuned to a Gaussian process first",
        "Tran et al. 2022", "mini-batch gradients; x as one array of numbers", "2–5",
        gives="draws under a prior one can argue for: of functions",
        short={"draws": 20, "burn_in": 20, "thin": 1, "step": 2e-4, "tuning": 3, "functions": 8,
               "points": 6},
        demo=Demo("4 chains, RBF", {"burn_in": 3000, "thin": 20}),
        docs="functional_priors.md"),
)  # fmt: skip
