"""Laplace's approximation."""

from doxa.registry.row import Demo, Row

ROWS = (
    Row("laplace", "doxa.laplace.laplace:Laplace", "laplace",
        "A Gaussian at the MAP from the generalised Gauss–Newton matrix; gives evidence",
        "MacKay 1992; Daxberger et al. 2021; Immer et al. 2021",
        "any network; by default exact up to 2,000 weights or rows, then Kronecker",
        "1 + one pass",
        gives="evidence, uncertainty after training",
        demo=Demo("full, linearised", {"structure": "full"}, {"steps": 2000}),
        docs="methods.md", evidence=True),
)  # fmt: skip
