"""Can it be trusted? Everything here consumes a `Predictive` (or a `Posterior`) and what came true.

Scores of a predictive, calibration, selective prediction, out-of-distribution behaviour, and
closeness of two predictives.
"""

from doxa.evaluate.calibration import Reliability, ece, reliability
from doxa.evaluate.calibration_interval import EceInterval, ece_interval
from doxa.evaluate.classification import (
    BrierParts,
    accuracy,
    brier,
    brier_decomposition,
    confusion,
    top_k_accuracy,
)
from doxa.evaluate.closeness import agreement, closeness, total_variation, wasserstein2
from doxa.evaluate.conformal import conformal
from doxa.evaluate.density import FeatureDensity
from doxa.evaluate.ood import ood_scores
from doxa.evaluate.pixels import Segmentation, segmentation
from doxa.evaluate.ranked import crps, crps_draws
from doxa.evaluate.ranking import aupr, auroc, fpr95, ood_metrics
from doxa.evaluate.recalibrate import recalibrate
from doxa.evaluate.regression import (
    CoverageCurve,
    coverage,
    coverage_curve,
    interval_score,
    mae,
    pinball,
    rmse,
    width,
)
from doxa.evaluate.scores import log_likelihood, nll, sharpness
from doxa.evaluate.selective import RiskCoverage, risk_coverage
from doxa.evaluate.shifts import corrupted, shifted
from doxa.evaluate.streaming import Streaming, metrics
from doxa.evaluate.sweep import sweep
from doxa.evaluate.uniformity import (
    PitHistogram,
    QuantileReliability,
    pit,
    pit_histogram,
    quantile_reliability,
)

__all__ = [
    "BrierParts", "CoverageCurve", "EceInterval", "FeatureDensity", "PitHistogram",
    "QuantileReliability", "Reliability", "RiskCoverage", "Segmentation", "Streaming",
    "accuracy", "agreement", "aupr", "auroc", "brier", "brier_decomposition", "closeness",
    "conformal", "confusion", "corrupted", "coverage", "coverage_curve", "crps", "crps_draws",
    "ece", "ece_interval", "fpr95", "interval_score", "log_likelihood", "mae", "metrics", "nll",
    "ood_metrics", "ood_scores", "pinball", "pit", "pit_histogram", "quantile_reliability",
    "recalibrate", "reliability", "risk_coverage", "rmse", "segmentation", "sharpness",
    "shifted", "sweep", "top_k_accuracy", "total_variation", "wasserstein2", "width",
]  # fmt: skip
