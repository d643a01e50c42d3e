"""Can it be trusted? Scores, calibration, out-of-distribution behaviour; consumes predictives."""
