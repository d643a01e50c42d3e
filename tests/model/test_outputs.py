"""Networks that return a dict, a dataclass or a named tuple, or probabilities for logits."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from model_cases import METHODS, QUICK, numbers, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import doxa
from doxa.errors import ModelError
from doxa.model import checks

X, Y = numbers(12, 3), torch.arange(12) % 3


@dataclass
class Answer:
    """As a transformer answers: what was not asked for is None."""

    logits: Tensor | None = None
    hidden: Tensor | None = None
    loss: Tensor | None = None


class Pair(NamedTuple):
    score: Tensor
    hidden: Tensor


@dataclass
class Two:
    score: Tensor
    hidden: Tensor


class Wrapped(nn.Module):
    """A classifier whose outputs and hidden values come back in some wrapping."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.trunk, self.out = nn.Linear(3, 4), nn.Linear(4, 3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.trunk(x))
        return self.wrap(self.out(h), h)


BARE = seeded(lambda: Wrapped(lambda f, h: f))
WRAPPINGS: dict[str, tuple[Any, str | None]] = {
    "dict": (lambda f, h: {"score": f, "hidden": h}, "score"),
    "ordered dict": (lambda f, h: OrderedDict(hidden=h, score=f), "score"),
    "dataclass": (lambda f, h: Two(f, h), "score"),
    "named tuple": (lambda f, h: Pair(f, h), "score"),
    "plain object": (lambda f, h: SimpleNamespace(score=f, hidden=h), "score"),
    "logits of a dict": (lambda f, h: {"hidden": h, "logits": f}, None),
    "logits of a dataclass": (lambda f, h: Answer(logits=f, hidden=h), None),
    "the only entry": (lambda f, h: {"score": f, "depth": 2}, None),
    "the only field": (lambda f, h: Answer(hidden=f), None),
    "a named one beside logits": (lambda f, h: {"logits": 0 * f, "score": f}, "score"),
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_the_named_output_is_what_is_fitted(name: str, tmp_path: Path) -> None:
    wrap, output = WRAPPINGS[name]
    net = seeded(lambda: Wrapped(wrap))
    net.load_state_dict(BARE.state_dict())
    model = doxa.Model(net, "categorical", output=output).build(X)
    params = {k: v.detach() for k, v in BARE.named_parameters()}
    torch.testing.assert_close(
        model.log_likelihood(params, X, Y), -cross_entropy(BARE(X), Y, reduction="none")
    )
    posterior = doxa.fit(model, (X, Y), "map", members=2, **QUICK)
    plain = doxa.fit(BARE, (X, Y), "map", likelihood="categorical", members=2, **QUICK)
    torch.testing.assert_close(posterior.predict(X).probs, plain.predict(X).probs)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net)
    assert again.model.named == output
    assert torch.equal(again.predict(X).probs, posterior.predict(X).probs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_every_kind_of_method_takes_a_named_output(method: str, engine: str) -> None:
    wrapped = seeded(lambda: Wrapped(lambda f, h: {"hidden": h, "score": f}))
    wrapped.load_state_dict(BARE.state_dict())
    options = {"engine": engine, "members": 2, "dtype": torch.float64, **QUICK, "steps": 2}
    posterior = doxa.fit(
        doxa.Model(wrapped, "categorical", output="score"), (X, Y), METHODS[method], **options
    )
    plain = doxa.fit(BARE, (X, Y), METHODS[method], likelihood="categorical", **options)
    torch.testing.assert_close(posterior.predict(X).probs, plain.predict(X).probs)


def test_labels_are_understood_under_a_name_too() -> None:
    net = seeded(lambda: Wrapped(lambda f, h: Answer(logits=f, hidden=h)))
    posterior = doxa.fit(net, (X, Y), "map", **QUICK)
    assert posterior.likelihood.name == "categorical"


def test_named_heads(tmp_path: Path) -> None:
    net = seeded(lambda: Wrapped(lambda f, h: {"hidden": h, "kind": f, "value": f[:, :1]}))
    model = doxa.Model(net, ("gaussian", "categorical"), output=("value", "kind"))
    y = (numbers(12, 1, seed=1), Y)
    posterior = doxa.fit(model, (X, y), "map", **QUICK)
    heads = posterior.predict(X).heads
    assert [tuple(head.mean.shape) for head in heads] == [(12, 1), (12, 3)]
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net).predict(X).heads
    assert torch.equal(again[1].probs, heads[1].probs)


def test_a_checkpoint_belongs_to_the_output_that_was_named(tmp_path: Path) -> None:
    net = seeded(lambda: Wrapped(lambda f, h: {"one": f, "two": 2 * f}))
    first, second = (doxa.Model(net, "categorical", output=name) for name in ("one", "two"))
    doxa.fit(first, (X, Y), "map", checkpoint=tmp_path, checkpoint_every=0, **QUICK)
    with pytest.raises(doxa.errors.MethodError, match="another fit"):
        doxa.fit(second, (X, Y), "map", checkpoint=tmp_path, **QUICK)


@pytest.mark.parametrize(
    ("wrap", "likelihood", "output", "message"),
    [
        (lambda f, h: {"a": f, "b": h}, "categorical", None, r"'a', 'b'.*output='a'"),
        (lambda f, h: {"a": f, "b": h}, "categorical", "logits", r"'logits'; there are 'a', 'b'"),
        (lambda f, h: {"a": f, "b": h}, ("categorical", "gaussian"), None, r"output=\('a', 'b'\)"),
        (lambda f, h: Answer(hidden=f), "categorical", "logits", "'logits'; there are 'hidden'"),
        (lambda f, h: {}, "categorical", None, "there are none"),
        (lambda f, h: f, "categorical", "logits", "has no named outputs"),
        (lambda f, h: (f, h), "categorical", "logits", "has no named outputs"),
        (lambda f, h: {"a": f, "b": 3}, "categorical", "b", "not int"),
    ],
)
def test_a_name_that_is_missing_or_wrong(
    wrap: Any, likelihood: Any, output: Any, message: str
) -> None:
    net = seeded(lambda: Wrapped(wrap))
    with pytest.raises(ModelError, match=message):
        doxa.fit(doxa.Model(net, likelihood, output=output), (X, Y), "map", **QUICK)


def test_a_name_is_a_string() -> None:
    with pytest.raises(ModelError, match="name of an output"):
        doxa.Model(BARE, output=1)  # type: ignore[arg-type]


class Forward(nn.Module):
    """A linear layer, then any function."""

    def __init__(self, outputs: int, then: Any) -> None:
        super().__init__()
        self.out, self.then = nn.Linear(3, outputs), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.out(x))


def ends_in(*last: nn.Module, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(3, outputs), *last)


YES_NO = torch.arange(12) % 2
NO_LOGITS: dict[str, tuple[nn.Module, str, Tensor, str]] = {
    "softmax": (ends_in(nn.Softmax(1)), "categorical", Y, "sum to 1.*0.58"),
    "softmax in forward": (Forward(3, lambda f: f.softmax(-1)), "categorical", Y, "sum to 1"),
    "softmax by hand": (
        Forward(3, lambda f: f.exp() / f.exp().sum(1, keepdim=True)), "categorical", Y, "sum to 1",
    ),
    "log-softmax": (ends_in(nn.LogSoftmax(1)), "categorical", Y, "log-probabilities"),
    "a map": (
        nn.Sequential(nn.Linear(3, 15), nn.Unflatten(1, (3, 5)), nn.Softmax(1)), "categorical",
        (torch.arange(60) % 3).reshape(12, 5), "sum to 1",
    ),
    "sigmoid": (ends_in(nn.Sigmoid(), outputs=1), "bernoulli", YES_NO, "sigmoid"),
    "sigmoid, squeezed": (
        Forward(1, lambda f: torch.sigmoid(f).squeeze(-1)), "bernoulli", YES_NO, "sigmoid",
    ),
    "sigmoid, viewed": (
        Forward(1, lambda f: f.sigmoid().view(-1)[:, None]), "bernoulli", YES_NO, "sigmoid",
    ),
}  # fmt: skip


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [r.getMessage() for r in caplog.records if r.name == "doxa" and r.levelname == "WARNING"]
    return [line for line in said if "logits" in line]


@pytest.mark.parametrize("name", NO_LOGITS)
def test_probabilities_in_place_of_logits_are_warned_about_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    net, likelihood, y, message = NO_LOGITS[name]
    doxa.fit(net, (X, y), "map", likelihood=likelihood, members=2, **QUICK)
    (line,) = warned(caplog)
    assert re.search(message, line)


LOGITS: dict[str, tuple[nn.Module, str, Tensor]] = {
    "logits": (ends_in(), "categorical", Y),
    "softmax inside": (ends_in(nn.Softmax(1), nn.Linear(3, 3)), "categorical", Y),
    "sigmoid inside": (ends_in(nn.Sigmoid(), nn.Linear(3, 1)), "bernoulli", YES_NO),
    "sigmoid of numbers": (ends_in(nn.Sigmoid(), outputs=1), "gaussian", numbers(12, 1)),
    "softmax of numbers": (ends_in(nn.Softmax(1)), "gaussian", numbers(12, 3)),
    "all zero": (Forward(3, lambda f: 0 * f), "categorical", Y),
    "positive": (ends_in(nn.Softplus()), "categorical", Y),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_not_warned_about(name: str, caplog: pytest.LogCaptureFixture) -> None:
    net, likelihood, y = LOGITS[name]
    doxa.fit(net, (X, y), "map", likelihood=likelihood, **QUICK)
    assert not warned(caplog)


def test_the_largest_probability_after_two_softmaxes() -> None:
    for classes in (2, 3, 10):
        most = torch.eye(classes)[0].softmax(0).max()
        assert checks._most(classes) == pytest.approx(float(most), rel=1e-6)
