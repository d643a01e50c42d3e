"""A Gaussian at the maximum: curvature, evidence, linearised predictive."""
