"""Exact linear models."""

from doxa.registry.row import Demo, Row

ROWS = (
    Row("linear", "doxa.exact.linear:BayesianLinear", "exact",
        "Bayesian linear regression on features: exact posterior, predictive and evidence",
        "Bishop 2006, ch. 3; MacKay 1992", "features (or none: the inputs)", "≪ 1",
        ("regression",),
        gives="evidence, a posterior over models",
        demo=Demo("50 Fourier features, exact", {"features": "fourier"}),
        docs="methods.md", evidence=True),
)  # fmt: skip
