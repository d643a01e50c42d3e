"""What others report on UCI regression: (RMSE, mean test log-likelihood), standard splits.

PBP: Hernández-Lobato & Adams (2015). MC dropout: Gal & Ghahramani (2016), and the grid-searched
figures of their code's readme. Deep ensembles: Lakshminarayanan et al. (2017). SWAG: Maddox et al.
(2019). Deep GP: Salimbeni & Deisenroth (2017), two layers, own splits. DVI: deterministic
variational inference, heteroscedastic, Wu et al. (2019). Concrete dropout: Gal et al. (2017), whose
log-likelihoods do not go with its errors. `BEST_LL` is the best log-likelihood seen anywhere.
"""

from __future__ import annotations

Scores = tuple[float | None, float | None]

COLUMNS: dict[str, dict[str, Scores]] = {
    "boston_housing": {
        "PBP": (3.01, -2.57), "MC dropout": (2.97, -2.46), "MC dropout tuned": (2.90, -2.40),
        "deep ensemble": (3.28, -2.41), "SWAG": (3.52, -2.76), "deep GP": (2.63, -2.41),
        "mean-field": (None, -3.12), "DVI": (None, -2.41),
    },
    "concrete": {
        "PBP": (5.67, -3.16), "MC dropout": (5.23, -3.04), "MC dropout tuned": (4.82, -2.93),
        "deep ensemble": (6.03, -3.06), "SWAG": (5.23, -3.01), "deep GP": (5.96, -3.18),
        "mean-field": (None, -3.22), "DVI": (None, -3.06), "concrete dropout": (4.46, None),
    },
    "energy": {
        "PBP": (1.80, -2.04), "MC dropout": (1.66, -1.99), "MC dropout tuned": (0.54, -1.21),
        "deep ensemble": (2.09, -1.38), "SWAG": (1.59, -1.68), "deep GP": (0.49, -0.72),
        "mean-field": (None, -0.93), "DVI": (None, -1.01),
    },
    "kin8nm": {
        "PBP": (0.10, 0.90), "MC dropout": (0.10, 0.95), "MC dropout tuned": (0.079, 1.14),
        "deep ensemble": (0.09, 1.20), "mean-field": (None, 1.03),
    },
    "naval_propulsion": {
        "PBP": (0.01, 3.73), "MC dropout": (0.01, 3.80), "MC dropout tuned": (0.0007, 4.45),
        "deep ensemble": (0.00, 5.63), "SWAG": (0.001, 6.71), "deep GP": (0.000, 6.75),
        "mean-field": (None, 6.12), "DVI": (None, 6.29),
    },
    "power_plant": {
        "PBP": (4.12, -2.84), "MC dropout": (4.02, -2.80), "MC dropout tuned": (4.01, -2.80),
        "deep ensemble": (4.11, -2.79), "deep GP": (3.93, -2.79), "mean-field": (None, -2.85),
    },
    "protein": {
        "PBP": (4.73, -2.97), "MC dropout": (4.36, -2.89), "MC dropout tuned": (4.27, -2.87),
        "deep ensemble": (4.71, -2.83), "deep GP": (4.17, -2.85), "mean-field": (None, -2.93),
    },
    "wine_quality_red": {
        "PBP": (0.64, -0.97), "MC dropout": (0.62, -0.93), "MC dropout tuned": (0.62, -0.93),
        "deep ensemble": (0.64, -0.94), "deep GP": (0.63, -0.95), "mean-field": (None, -1.00),
    },
    "yacht": {
        "PBP": (1.02, -1.63), "MC dropout": (1.11, -1.55), "MC dropout tuned": (0.67, -1.25),
        "deep ensemble": (1.58, -1.18), "SWAG": (0.97, -0.40), "deep GP": (0.48, -0.46),
        "mean-field": (None, -2.01), "DVI": (None, -0.47),
    },
}  # fmt: skip

BEST_LL = {
    "boston_housing": -2.33, "concrete": -2.93, "energy": -0.72, "kin8nm": 1.28,
    "naval_propulsion": 6.75, "power_plant": -2.75, "protein": -2.77, "wine_quality_red": -0.93,
    "yacht": -0.40,
}  # fmt: skip

# Which published column is the same method as one of ours.
SAME_METHOD = {
    "deep-ensemble": "deep ensemble", "swag": "SWAG", "mc-dropout": "MC dropout tuned",
    "mean-field": "mean-field",
}  # fmt: skip
