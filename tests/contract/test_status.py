"""A posterior says whether it can be trusted, and why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import doxa


def test_a_hopeless_run_says_so(case: Any) -> None:
    """A rate of a million, or a handful of draws without burn-in."""
    if case.row.family == "exact":
        pytest.skip("a closed form cannot fail to converge")
    fast = case.fast
    posterior = case.fit(settings=fast.hopeless, **fast.hopeless_options)
    assert posterior.status != "ok"
    assert len(posterior.status.reason) > 20
    assert posterior.status.reason in repr(posterior)
    p = posterior.predict(case.data()[0])
    assert torch.isfinite(p.mean).all()


@pytest.mark.by_family
def test_a_good_run_is_ok_and_learns(case: Any) -> None:
    """Better than the best constant: the mean and spread of y, or the class frequencies."""
    if case.row.family == "mcmc":
        pytest.skip("so few draws have not converged, and say so; the anchors hold chains to more")
    x, y = case.data()
    posterior = case.fit(steps=300)
    assert posterior.status == "ok"
    assert posterior.status.reason == ""
    score = float(posterior.predict(x).log_prob(y).mean())
    if case.regression:
        constant = torch.distributions.Normal(y.mean(), y.std()).log_prob(y).mean()
    else:
        shares = torch.bincount(y).double() / len(y)
        constant = shares[y].log().mean()
    assert score > float(constant) + 0.1


@pytest.mark.by_family
def test_a_callback_may_stop_a_run(trained: Any) -> None:
    """A posterior still comes out, and says that it was stopped."""
    seen: list[int] = []

    def callback(step: int, info: dict[str, Any]) -> bool:
        seen.append(step)
        assert all(len(values) == 2 for values in info.values())
        return step >= 10

    posterior = trained.fit(callbacks=[callback], members=2, steps=200)
    assert posterior.status != "ok"
    assert len(posterior.status.reason) > 20
    assert seen[-1] < 60
    assert torch.isfinite(posterior.predict(trained.data()[0]).mean).all()


@pytest.mark.by_family
def test_one_runs_divergence_is_its_own(trained: Any, assert_close: Callable[..., None]) -> None:
    """Of two runs one has a hopeless rate at first: the other is as good as alone, and it is not
    taken up again because the other goes on."""
    if trained.row.family == "mcmc":
        pytest.skip("its steps have no rate")
    if trained.name == "snapshot":
        pytest.skip("its schedule is its own")
    options = {
        "dtype": torch.float64, "steps": 60, "schedule": lambda done: 1e200 if done < 0.1 else 1.0,
    }  # fmt: skip
    rates = [1e-202, 1e-2]
    sweep = trained.fit(runs=doxa.Runs(grid={"lr": rates}), **options)
    good, bad = (posterior.status for posterior in sweep)
    assert good == "ok" or (trained.cls.shrinks and good == "prior-collapse")  # in so few steps
    assert bad == "diverged"
    reason = sweep[1].status.reason  # a method that clips its steps goes far, but stays finite
    assert "non-finite" in reason or "the loss rose" in reason
    for posterior, rate in zip(sweep, rates, strict=True):
        alone = trained.fit(lr=rate, **options)
        assert alone.status == posterior.status
        assert_close(posterior.tensors(), alone.tensors(), 1e-8)


NO_EVIDENCE = {"nngp-classification"}  # it regresses on classes: that of numbers is another one's


def test_evidence_and_bounds_are_what_the_row_says(case: Any) -> None:
    posterior = case.posterior()
    for value, has in (
        (posterior.log_evidence, case.row.evidence and case.method_and_task not in NO_EVIDENCE),
        (posterior.elbo, case.row.elbo),
    ):
        if has:
            assert type(value) is float
            assert abs(value) < 1e6
        else:
            assert value is None


def test_a_tempered_posterior_has_no_evidence(case: Any) -> None:
    if "temperature" not in case.method().settings():
        pytest.skip("has no temperature")
    posterior = case.fit(settings={"temperature": 0.5}, steps=5)
    assert posterior.log_evidence is None
    assert posterior.elbo is None


def test_the_record_names_engine_and_cost(case: Any) -> None:
    diagnostics = case.posterior().diagnostics
    assert diagnostics["engine"] in ("stack", "loop")
    assert diagnostics["engine_reason"]
    assert diagnostics["seconds"] > 0
    assert diagnostics["rows"] == len(case.data()[1])
