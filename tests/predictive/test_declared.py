"""What a predictive declares about itself agrees with what it gives: `has_samples`, `splits`,
`classifies` and `heads`, for every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import doxa
from doxa import Predictive
from doxa.predictive import Moments
from doxa.predictive.calibrated import (
    CalibratedClasses,
    ConformalInterval,
    ConformalSet,
    PiecewiseLinear,
    Rescaled,
    Warped,
    log_probs,
)
from doxa.predictive.classes import Averaged, Dirichlets, averaged
from doxa.predictive.form import AffineForm, Form, moments

S, N, C = 40, 5, 3
NOISE = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=NOISE, dtype=torch.float64)


def numbers(**options: Any) -> Predictive:
    return Predictive(randn(S, N, 1), doxa.Gaussian(noise=0.3), **options)


def classes() -> Predictive:
    return Predictive(randn(S, N, C), doxa.Categorical())


def odds() -> Predictive:
    p = classes()
    form = averaged(p.form, doxa.Categorical(), p.form.samples.mean(0, keepdim=True), [S])
    return p.of_form(form)


def streamed(likelihood: Any, f: torch.Tensor) -> Predictive:
    stream = Moments(likelihood)
    stream.update(f)
    return stream.result()


def identity() -> PiecewiseLinear:
    ends = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    return PiecewiseLinear(ends, ends)


def corrected(p: Predictive, kind: type[Form], *more: Any) -> Predictive:
    return p.of_form(kind(p.form, *more))  # type: ignore[call-arg]


def recalibrated(p: Predictive) -> Predictive:
    return corrected(p, CalibratedClasses, log_probs(p.form))


def in_closed_form() -> Predictive:
    return numbers(f_variance=torch.ones(S, N, 1))


def averages() -> Predictive:
    return Predictive.of(Averaged(doxa.Categorical(), randn(2, N, C)))


def dirichlets() -> Predictive:
    return Predictive.of(Dirichlets(doxa.Categorical(), randn(2, N, C).exp()))


def bounds() -> Any:
    return torch.zeros(N, 1), torch.ones(N, 1)


MADE = {
    "numbers": numbers,
    "numbers in closed form": in_closed_form,
    "classes": classes,
    "odds": odds,
    "averages": averages,
    "dirichlets": dirichlets,
    "streamed numbers": lambda: streamed(doxa.Gaussian(noise=0.3), randn(S, N, 1)),
    "streamed classes": lambda: streamed(doxa.Categorical(), randn(S, N, C)),
    "moments of classes": lambda: Predictive.of(moments(classes().form)),
    "one normal": lambda: numbers().moment_matched(),
    "a mixture": lambda: Predictive.mix([numbers(), numbers()]),
    "a mixture, half in closed form": lambda: Predictive.mix([numbers(), in_closed_form()]),
    "a mixture with averages": lambda: Predictive.mix([classes(), averages()]),
    "an interval": lambda: corrected(numbers(), ConformalInterval, 0.9, bounds),
    "an interval of a closed form": lambda: corrected(
        in_closed_form(), ConformalInterval, 0.9, bounds
    ),
    "a set": lambda: corrected(classes(), ConformalSet, 0.9, lambda: torch.ones(N, C) > 0),
    "a set of averages": lambda: corrected(
        averages(), ConformalSet, 0.9, lambda: torch.ones(N, C) > 0
    ),
    "recalibrated": lambda: recalibrated(classes()),
    "recalibrated odds": lambda: recalibrated(odds()),
    "recalibrated averages": lambda: recalibrated(averages()),
    "rescaled": lambda: corrected(numbers(), Rescaled, torch.tensor(2.0)),
    "rescaled closed form": lambda: corrected(in_closed_form(), Rescaled, torch.tensor(2.0)),
    "warped": lambda: corrected(numbers(), Warped, identity()),
    "two heads": lambda: Predictive(
        (randn(S, N, 1), randn(S, N, C)), [doxa.Gaussian(noise=0.3), doxa.Categorical()]
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_declared_is_there_and_nothing_else(name: str) -> None:
    p = MADE[name]()
    assert p.has_samples == hasattr(p, "samples")
    if p.has_samples:
        assert len(p.samples) == len(p.weights)
    parts = ["epistemic", "aleatoric"]
    if p.classifies:
        parts += ["mutual_information", "expected_entropy"]
    assert [hasattr(p, part) for part in parts] == [p.splits] * len(parts)
    assert p.classifies == hasattr(p, "probs")


def test_every_form_is_among_them() -> None:
    def below(kind: type[Form]) -> set[type[Form]]:
        return {kind}.union(*(below(each) for each in kind.__subclasses__()))

    def within(form: Form) -> set[type[Form]]:
        own = set() if form.heads == (form,) else set().union(*map(within, form.heads))
        return {*type(form).__mro__, *own}

    seen = set().union(*(within(made().form) for made in MADE.values()))
    # `AffineForm` is that of a likelihood with its own form: tests/predictive/test_own_form.py
    own = {kind for kind in below(Form) if kind.__module__.startswith("doxa.")} - {AffineForm}
    assert {kind.__name__ for kind in own - seen} == set()


def test_heads_are_always_a_tuple() -> None:
    p = numbers()
    assert p.heads == (p,)
    assert p.for_targets(True).heads[0].mean.shape == (N,)
    two = MADE["two heads"]()
    assert [head.classifies for head in two.heads] == [False, True]
    assert all(head.heads == (head,) for head in two.heads)
