"""A posterior says whether it can be trusted, and why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

HAS_EVIDENCE = {"linear", "laplace", "gp"}
HAS_BOUND = {"mean-field"}


def test_a_hopeless_run_says_so(case_place: Any) -> None:
    """A rate of a million, or a handful of draws without burn-in."""
    if case_place.row.family == "exact":
        pytest.skip("a closed form cannot fail to converge")
    fast = case_place.fast
    posterior = case_place.fit(settings=fast.hopeless, **fast.hopeless_options)
    assert posterior.status != "ok"
    assert len(posterior.status.reason) > 20
    assert posterior.status.reason in repr(posterior)
    p = posterior.predict(case_place.data()[0])
    assert torch.isfinite(p.mean).all()


def test_a_good_run_is_ok(case: Any) -> None:
    if case.row.family == "mcmc":
        pytest.skip("so few draws have not converged, and say so")
    posterior = case.fit(steps=300)
    assert posterior.status == "ok"
    assert posterior.status.reason == ""


def test_a_good_run_learns(case: Any) -> None:
    """Better than the best constant: the mean and spread of y, or the class frequencies."""
    if case.row.family == "mcmc":
        pytest.skip("the anchors hold chains to more than this")
    x, y = case.data()
    score = float(case.fit(steps=300).predict(x).log_prob(y).mean())
    if case.regression:
        constant = torch.distributions.Normal(y.mean(), y.std()).log_prob(y).mean()
    else:
        shares = torch.bincount(y).double() / len(y)
        constant = shares[y].log().mean()
    assert score > float(constant) + 0.1


def test_a_callback_may_stop_a_run(case: Any) -> None:
    if not case.needs_network:
        pytest.skip("takes no steps that a callback could see")
    seen: list[int] = []

    def callback(step: int, info: dict[str, Any]) -> bool:
        seen.append(step)
        assert all(len(values) == 2 for values in info.values())
        return step >= 20

    posterior = case.fit(callbacks=[callback], members=2)
    assert posterior.status != "ok"
    assert seen[-1] < 40


def test_evidence_and_bounds_are_numbers_or_none(case_place: Any) -> None:
    posterior = case_place.posterior()
    for name, has in (("log_evidence", HAS_EVIDENCE), ("elbo", HAS_BOUND)):
        value = getattr(posterior, name)
        assert value is None or type(value) is float
        if case_place.name in has:
            assert value is not None
            assert abs(value) < 1e6
        elif case_place.name not in HAS_EVIDENCE | HAS_BOUND:
            assert value is None or case_place.row.family in ("variational", "exact", "process")


def test_a_tempered_posterior_has_no_evidence(case: Any) -> None:
    if "temperature" not in case.method().settings():
        pytest.skip("has no temperature")
    posterior = case.fit(settings={"temperature": 0.5}, steps=5)
    assert posterior.log_evidence is None
    assert posterior.elbo is None


def test_the_record_names_engine_and_cost(case_place: Any) -> None:
    diagnostics = case_place.posterior().diagnostics
    assert diagnostics["engine"] in ("stack", "loop")
    assert diagnostics["engine_reason"]
    assert diagnostics["seconds"] > 0
    assert diagnostics["rows"] == len(case_place.data()[1])
