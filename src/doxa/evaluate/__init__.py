"""Evaluation of a `Predictive` (or a `Posterior`) against observed targets.

Scores, calibration and recalibration, conformal prediction, selective prediction, detection of
out-of-distribution inputs, and the distance of two predictives.
"""

from doxa.evaluate.calibration import (
    EceInterval,
    PitHistogram,
    QuantileReliability,
    Reliability,
    ece,
    ece_interval,
    pit,
    pit_histogram,
    quantile_reliability,
    reliability,
)
from doxa.evaluate.conformal import conformal
from doxa.evaluate.imbalance import (
    RareClass,
    Threshold,
    average_precision,
    least_cost,
    rare_class,
    roc_auc,
    threshold,
)
from doxa.evaluate.ood import FeatureDensity, aupr, auroc, fpr95, ood_metrics, ood_scores
from doxa.evaluate.pixels import Segmentation, segmentation
from doxa.evaluate.recalibrate import recalibrate
from doxa.evaluate.reference_distance import agreement, closeness, total_variation, wasserstein2
from doxa.evaluate.scores import (
    BrierParts,
    CoverageCurve,
    RiskCoverage,
    accuracy,
    brier,
    brier_decomposition,
    confusion,
    coverage,
    coverage_curve,
    crps,
    crps_draws,
    interval_score,
    log_likelihood,
    mae,
    nll,
    pinball,
    risk_coverage,
    rmse,
    sharpness,
    top_k_accuracy,
    width,
)
from doxa.evaluate.shifts import corrupted, shifted, sweep
from doxa.evaluate.streaming import Streaming, metrics
from doxa.evaluate.watch import Alarm, Watch, certify

__all__ = [
    "Alarm", "BrierParts", "CoverageCurve", "EceInterval", "FeatureDensity", "PitHistogram",
    "QuantileReliability", "RareClass", "Reliability", "RiskCoverage", "Segmentation", "Streaming",
    "Threshold", "Watch", "accuracy", "agreement", "aupr", "auroc", "average_precision", "brier",
    "brier_decomposition", "certify", "closeness", "conformal", "confusion", "corrupted",
    "coverage", "coverage_curve", "crps", "crps_draws", "ece", "ece_interval", "fpr95",
    "interval_score", "least_cost", "log_likelihood", "mae", "metrics", "nll", "ood_metrics",
    "ood_scores", "pinball", "pit", "pit_histogram", "quantile_reliability", "rare_class",
    "recalibrate", "reliability", "risk_coverage", "rmse", "roc_auc", "segmentation", "sharpness",
    "shifted", "sweep", "threshold", "top_k_accuracy", "total_variation", "wasserstein2", "width",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
