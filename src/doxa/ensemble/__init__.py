"""Points and sets of points: MAP, SWA, deep ensembles, SVGD."""
