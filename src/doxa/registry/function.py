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
    Row("fbnn", "doxa.function.functional_vi:FunctionalVI", "variational",
        "A network's functions held to a prior over functions, by spectral Stein gradients",
        "Sun, Zhang, Shi & Grosse 2019", "any network; real inputs for a GP prior", "50–100",
        gives="a network that believes in a kernel, or in any sampler of functions",
        short={"samples": 6, "rows": 5, "points": 3, "prior_steps": 2},
        demo=Demo("GP prior, RBF kernel", {"samples": 32}, {"steps": 600, "validation": None}),
        docs="functional.md"),
    Row("vip", "doxa.function.implicit_process:ImplicitProcess", "variational",
        "A Gaussian process moment-matched to a network's prior functions, which are learned",
        "Ma, Li & Hernández-Lobato 2019", "any network; or a sampler of functions", "10–20",
        gives="closed-form predictions from a prior that is learned",
        short={"functions": 4, "samples": 2},
        demo=Demo("20 functions, α = ½", options={"steps": 2000}),
        docs="functional.md"),
)  # fmt: skip
