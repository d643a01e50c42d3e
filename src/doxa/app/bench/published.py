"""What others report on UCI regression: (RMSE, mean test log-likelihood), standard splits.

PBP: Hernández-Lobato & Adams (2015). MC dropout: Gal & Ghahramani (2016), and the grid-searched
figures of their code's readme. Deep ensembles: Lakshminarayanan et al. (2017). SWAG: Maddox et al.
(2019). Deep GP: Salimbeni & Deisenroth (2017), two layers, own splits. DVI: deterministic
variational inference, heteroscedastic, Wu et al. (2019). Concrete dropout: Gal et al. (2017), whose
log-likelihoods do not go with its errors. VIP: Ma et al. (2019), a BNN prior; fBNN: Sun et al.
(2019); both second-hand, on other splits. `BEST_LL` is the best log-likelihood seen anywhere.
"""

from __future__ import annotations

Scores = tuple[float | None, float | None]

COLUMNS: dict[str, dict[str, Scores]] = {
    "boston_housing": {
        "PBP": (3.01, -2.57), "MC dropout": (2.97, -2.46), "MC dropout tuned": (2.90, -2.40),
        "deep ensemble": (3.28, -2.41), "SWAG": (3.52, -2.76), "deep GP": (2.63, -2.41),
        "mean-field": (None, -3.12), "DVI": (None, -2.41),
        "VIP": (2.88, -2.45), "fBNN": (2.38, -2.30),
    },
    "concrete": {
        "PBP": (5.67, -3.16), "MC dropout": (5.23, -3.04), "MC dropout tuned": (4.82, -2.93),
        "deep ensemble": (6.03, -3.06), "SWAG": (5.23, -3.01), "deep GP": (5.96, -3.18),
        "mean-field": (None, -3.22), "DVI": (None, -3.06), "concrete dropout": (4.46, None),
        "VIP": (4.81, -3.02), "fBNN": (4.94, -3.10),
    },
    "energy": {
        "PBP": (1.80, -2.04), "MC dropout": (1.66, -1.99), "MC dropout tuned": (0.54, -1.21),
        "deep ensemble": (2.09, -1.38), "SWAG": (1.59, -1.68), "deep GP": (0.49, -0.72),
        "mean-field": (None, -0.93), "DVI": (None, -1.01),
        "VIP": (0.45, -0.60), "fBNN": (0.41, -0.68),
    },
    "kin8nm": {
        "PBP": (0.10, 0.90), "MC dropout": (0.10, 0.95), "MC dropout tuned": (0.079, 1.14),
        "deep ensemble": (0.09, 1.20), "mean-field": (None, 1.03),
        "VIP": (0.07, 1.12),
    },
    "naval_propulsion": {
        "PBP": (0.01, 3.73), "MC dropout": (0.01, 3.80), "MC dropout tuned": (0.0007, 4.45),
        "deep ensemble": (0.00, 5.63), "SWAG": (0.001, 6.71), "deep GP": (0.000, 6.75),
        "mean-field": (None, 6.12), "DVI": (None, 6.29),
        "VIP": (None, 5.62),
    },
    "power_plant": {
        "PBP": (4.12, -2.84), "MC dropout": (4.02, -2.80), "MC dropout tuned": (4.01, -2.80),
        "deep ensemble": (4.11, -2.79), "deep GP": (3.93, -2.79), "mean-field": (None, -2.85),
        "VIP": (4.11, -2.92),
    },
    "protein": {
        "PBP": (4.73, -2.97), "MC dropout": (4.36, -2.89), "MC dropout tuned": (4.27, -2.87),
        "deep ensemble": (4.71, -2.83), "deep GP": (4.17, -2.85), "mean-field": (None, -2.93),
        "VIP": (4.25, -2.87),
    },
    "wine_quality_red": {
        "PBP": (0.64, -0.97), "MC dropout": (0.62, -0.93), "MC dropout tuned": (0.62, -0.93),
        "deep ensemble": (0.64, -0.94), "deep GP": (0.63, -0.95), "mean-field": (None, -1.00),
        "VIP": (0.64, -0.97), "fBNN": (0.67, -1.04),
    },
    "yacht": {
        "PBP": (1.02, -1.63), "MC dropout": (1.11, -1.55), "MC dropout tuned": (0.67, -1.25),
        "deep ensemble": (1.58, -1.18), "SWAG": (0.97, -0.40), "deep GP": (0.48, -0.46),
        "mean-field": (None, -2.01), "DVI": (None, -0.47),
        "VIP": (0.32, 0.02), "fBNN": (0.61, -1.03),
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
    "mean-field": "mean-field", "vip": "VIP", "vip-deep": "VIP", "fbnn": "fBNN",
    "deep-gp": "deep GP",
}  # fmt: skip
