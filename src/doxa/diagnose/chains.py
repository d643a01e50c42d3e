"""What chains are worth: see `doxa.posterior.chains`, which methods and their judges share."""

from doxa.posterior.chains import LEAST_DRAWS, ebfmi, ess_bulk, ess_tail, rhat, split

__all__ = ["LEAST_DRAWS", "ebfmi", "ess_bulk", "ess_tail", "rhat", "split"]
