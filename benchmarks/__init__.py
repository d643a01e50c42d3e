"""The measurements in the docs of doxa: one module per table or figure, results in `results/`.

    python -m benchmarks.NAME --help        # in the root of the repository

The docstring of every module describes its measurement and its command. The tables that `doxa
bench` computes are a part of the library (`doxa.app.bench`); those of images are `python -m
benchmarks.images`.
"""
