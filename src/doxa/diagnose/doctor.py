"""`diagnose` runs all checks on a posterior and reports what is wrong and what to try.

`WHOLE` lists the checks that run once per posterior, `EACH_HEAD` those that run once per head. A
check that raises an error is reported as "not checked"; the other checks still run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from doxa.diagnose import calibration, convergence, inputs, residuals, spread
from doxa.diagnose.data import DiagnosticData, Head
from doxa.diagnose.finding import Diagnosis, Finding, skipped
from doxa.driver.validation import evaluate_rows
from doxa.errors import DataError
from doxa.posterior import Posterior

log = logging.getLogger("doxa")

WHOLE: dict[str, Callable[[DiagnosticData], Finding]] = {
    "status": convergence.status,
    "training": convergence.training,
    "chains": convergence.chains,
    "weights": convergence.weights,
    "energy": convergence.energy,
    "scaling": inputs.scaling,
    "duplicates": inputs.duplicates,
}
EACH_HEAD: dict[str, Callable[[DiagnosticData, Head], Finding]] = {
    "sample size": inputs.sample_size,
    "skill": spread.skill,
    "overfitting": spread.overfitting,
    "calibration": calibration.calibration,
    "coverage": calibration.coverage,
    "targets": residuals.targets,
    "noise level": residuals.dispersion,
    "noise tails": residuals.tails,
    "noise by input": residuals.evenness,
    "members": spread.members,
    "width": spread.width,
    "far inputs": spread.far,
}


def diagnose(
    posterior: Posterior, data: Any, test: Any = None, *, level: float = 0.9, seed: int = 0
) -> Diagnosis:
    """Check a posterior for common faults of the fit, the data and the likelihood.

    Parameters
    ----------
    posterior : Posterior
        Any posterior. It may be loaded from disk or transformed.
    data : tuple, Dataset or DataFrame
        The training rows, as they were given to `fit`.
    test : tuple, Dataset or DataFrame, optional
        Held-out rows. Without them calibration is evaluated on the training rows, and only as far
        as these allow. The status of the posterior changes from "ok" or "not-evaluated" to what
        these rows show, by the thresholds of `fit` (for example "overconfident").
    level : float, default 0.9
        Level of the intervals whose coverage is counted. It lies between 0 and 1.
    seed : int, default 0
        Seed of the random draws of the checks: replicas, permutations, out-of-distribution inputs.

    Returns
    -------
    Diagnosis
        All findings. It can be printed, and has `.status`, `.summary`, `.ok`, `.findings` and
        `diagnosis["coverage"]`. A check that cannot run has the status "not checked" and gives the
        reason.

    Raises
    ------
    DataError
        If the level is outside (0, 1), or if the data have no rows or values that are not finite.

    Notes
    -----
    `doctor` is an alias of this function.
    """
    if not 0.0 < level < 1.0:
        raise DataError(f"level must lie between 0 and 1, got {level}")
    case = DiagnosticData(posterior, data, test, level, seed)
    _evaluate(case)
    findings = [_run_check(name, partial(check, case)) for name, check in WHOLE.items()]
    try:
        heads = case.heads
    except DataError:
        raise
    except Exception as error:  # a posterior that cannot predict still has a status
        log.debug("diagnose: no predictions", exc_info=True)
        reason = f"the posterior does not predict at these rows: {error}"
        findings += [replace(skipped(reason), check=name) for name in EACH_HEAD]
        return Diagnosis(findings, test is not None)
    for head in heads:
        for name, check in EACH_HEAD.items():
            findings.append(_run_check(name + head.label, partial(check, case, head)))
    return Diagnosis(findings, test is not None)


doctor = diagnose


def _evaluate(case: DiagnosticData) -> None:
    """Evaluate the posterior on the test rows, which may change its status."""
    if case.test is None:
        return
    try:
        evaluate_rows(case.posterior, case.test.x, case.test.y, seen=case.train.y, certify=False)
    except Exception:  # the checks report what does not work
        log.debug("diagnose: the test rows were not evaluated", exc_info=True)


def _run_check(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return replace(check(), check=name)
    except Exception as error:  # a posterior may lack what one check needs; the others still run
        log.debug("diagnose: %s", name, exc_info=True)
        return replace(skipped(str(error) or type(error).__name__), check=name)
