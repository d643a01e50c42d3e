"""What a posterior says about itself, and what `save` does to an artefact that is there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import doxa
from doxa.errors import StoreError, did_you_mean


@pytest.fixture(scope="module")
def fitted() -> doxa.Posterior:
    x = torch.linspace(-1, 1, 30)[:, None]
    return doxa.fit(doxa.nets.mlp(1, 1, (4,)), (x, x[:, 0]), "map", steps=3, validation=None)


def test_reason_is_that_of_the_status(fitted: doxa.Posterior) -> None:
    assert fitted.reason == fitted.status.reason
    x = torch.linspace(-1, 1, 30)[:, None]
    blown = doxa.fit(doxa.nets.mlp(1, 1, (4,)), (x, 1e3 * x), "map", steps=5, lr=1e9)
    assert blown.status != "ok" and len(blown.reason) > 20


def test_a_posterior_without_evidence_says_so(fitted: doxa.Posterior) -> None:
    assert fitted.log_evidence is None
    assert "none: map gives neither evidence nor a bound; laplace" in repr(fitted)
    x = torch.linspace(-1, 1, 30)[:, None]
    exact = doxa.fit(None, (x, x[:, 0] + 0.1 * torch.randn(30)), "linear")
    assert exact.log_evidence is not None and "none: linear" not in repr(exact)


def test_save_never_replaces_silently(
    fitted: doxa.Posterior, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    fitted.save(run)
    assert not caplog.records
    before = (run / "meta.json").read_bytes()
    with pytest.raises(StoreError, match="holds an artefact already"):
        fitted.save(run, overwrite=False)
    assert (run / "meta.json").read_bytes() == before
    with caplog.at_level(logging.WARNING, "doxa"):
        fitted.save(run, overwrite=True)
        assert not caplog.records
        fitted.save(run)
    assert "held an artefact, which is replaced" in caplog.text


def test_near_names_are_typing_mistakes() -> None:
    assert did_you_mean("age", ["target", "town"]) == "; known: target, town"
    assert did_you_mean("taget", ["target", "town"]) == "; did you mean 'target'?"
    assert did_you_mean("mpa", ["map", "swag"]) == "; did you mean 'map'?"
    assert did_you_mean("ren", ["rent"]) == "; did you mean 'rent'?"
