"""Arguments and options that commands share, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataFile = Annotated[
    Path,
    typer.Argument(help="A CSV (also compressed) or Parquet file.", show_default=False),
]
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
Numeric = Annotated[
    list[str] | None,
    typer.Option(help="A column of numbers to use although it looks like an id; repeatable."),
]
Missing = Annotated[
    str,
    typer.Option(
        help="What to do about missing cells: error names them; impute fills in the median, and "
        "says so in one more input, or the category 'missing'."
    ),
]
Sep = Annotated[
    str | None, typer.Option(help="What separates cells: , ; | or tab. Default: recognised.")
]
Decimal = Annotated[str | None, typer.Option(help="The decimal mark: , or . Default: recognised.")]
Encoding = Annotated[
    str | None, typer.Option(help="utf-8, utf-16, latin-1, ... Default: recognised.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the method, NAME=VALUE; see doxa methods NAME."),
]
Net = Annotated[
    str | None,
    typer.Option(help="module:builder, called with (inputs, outputs), instead of the default MLP."),
]
Hidden = Annotated[str, typer.Option(help="Widths of the default MLP's hidden layers: 50,50.")]
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
        help="Share of the rows held out to stop training in time; 0 for none. Default: 0.1 for "
        "methods that overfit without (map, deep-ensemble, mc-dropout), unless --steps or "
        "--epochs say how long to train.",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Seed = Annotated[int, typer.Option(help="Same seed, same result.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what the engine does.")]
