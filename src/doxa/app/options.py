"""Arguments and options that commands share, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataFile = Annotated[Path, typer.Argument(help="A CSV or Parquet file.", show_default=False)]
Target = Annotated[str, typer.Option("--target", "-t", help="The column to predict.")]
Likelihood = Annotated[
    str | None,
    typer.Option(help="What the target is, instead of inferring it: gaussian, poisson, ..."),
]
Index = Annotated[str | None, typer.Option(help="A column that names rows; not an input.")]
Drop = Annotated[list[str] | None, typer.Option(help="A column to leave out; repeatable.")]
Categorical = Annotated[
    list[str] | None, typer.Option(help="A column of numbers that are categories; repeatable.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the method, NAME=VALUE; see doxa methods NAME."),
]
Net = Annotated[
    str | None,
    typer.Option(help="module:builder, called with (inputs, outputs), instead of the default MLP."),
]
Hidden = Annotated[
    str, typer.Option(help="Widths of the default MLP's hidden layers: 50,50; '' for none.")
]
Members = Annotated[int | None, typer.Option(min=1, help="How many members (or chains).")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the data.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps, instead of epochs.")]
Rate = Annotated[float | None, typer.Option(help="Learning rate.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows a step.")]
Validation = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=0.9,
        help="Share of the rows held out to stop training in time; 0 for none. Default: each "
        "member holds out another tenth or so, in methods that overfit without.",
    ),
]
TestFile = Annotated[
    Path | None, typer.Option("--test", help="Held-out rows, to score the fit on.")
]
TestShare = Annotated[
    float | None,
    typer.Option(
        "--split",
        help="Share of the rows to score the fit on, chosen by the seed and not trained on.",
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        help="Correct predictions on rows held out for it. Alone it means auto: temperature for "
        "classes, quantile for numbers. Or vector, dirichlet, isotonic, histogram; variance.",
    ),
]
Conformal = Annotated[
    float | None,
    typer.Option(help="Intervals, or sets of classes, that hold the truth at this level: 0.9."),
]
ConformalKind = Annotated[
    str | None,
    typer.Option(help="split (default) or cqr for numbers, lac (default) or aps for classes."),
]
CalibrationShare = Annotated[
    float | None,
    typer.Option(help="Share of the rows held out for --calibrate and --conformal. Default: 0.2."),
]
Run = Annotated[Path, typer.Argument(help="The folder doxa fit wrote.", show_default=False)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same result.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what the engine does.")]
