"""One call that looks at a posterior and says in plain words what is wrong and what to try."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from doxa.diagnose import calibration, convergence, inputs, residuals, spread
from doxa.diagnose.data import DiagnosticData, Head
from doxa.diagnose.finding import Diagnosis, Finding, skipped
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


def doctor(
    posterior: Posterior, data: Any, test: Any = None, *, level: float = 0.9, seed: int = 0
) -> Diagnosis:
    """Look at a posterior the way an experienced colleague would.

    Parameters
    ----------
    posterior: any, also loaded from disk or transformed.
    data: the rows it was fitted to, as given to `fit`.
    test: rows it has not seen; without them calibration is judged only as far as is honest.
    level: of the intervals whose coverage is counted.
    seed: of the doctor's own draws (replicas, permutations, strange inputs).

    Returns
    -------
    A `Diagnosis`: printable, with `.verdict`, `.summary`, `.ok`, `.findings` and
    `diagnosis["coverage"]`. A check that cannot be made is "not checked", with the reason.
    """
    if not 0.0 < level < 1.0:
        raise DataError(f"level must lie between 0 and 1, got {level}")
    patient = DiagnosticData(posterior, data, test, level, seed)
    findings = [_look(name, partial(check, patient)) for name, check in WHOLE.items()]
    try:
        heads = patient.heads
    except DataError:
        raise
    except Exception as error:  # a posterior that cannot predict still has a status
        log.debug("doctor: no predictions", exc_info=True)
        reason = f"the posterior does not predict at these rows: {error}"
        findings += [replace(skipped(reason), check=name) for name in EACH_HEAD]
        return Diagnosis(findings, test is not None)
    for head in heads:
        for name, check in EACH_HEAD.items():
            findings.append(_look(name + head.label, partial(check, patient, head)))
    return Diagnosis(findings, test is not None)


def _look(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return replace(check(), check=name)
    except Exception as error:  # whatever a posterior lacks: one check fails, not the visit
        log.debug("doctor: %s", name, exc_info=True)
        return replace(skipped(str(error) or type(error).__name__), check=name)
