"""Point estimates and ensembles of them: MAP, SWA, deep ensembles, SVGD."""
