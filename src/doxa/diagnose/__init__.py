"""Can it be trusted? One call that looks at a posterior and says in plain words what is wrong."""

from doxa.diagnose.doctor import doctor
from doxa.diagnose.finding import Diagnosis, Finding
from doxa.posterior.chains import ebfmi, ess_bulk, ess_tail, rhat

__all__ = ["Diagnosis", "Finding", "doctor", "ebfmi", "ess_bulk", "ess_tail", "rhat"]
