"""The certificate of a run: what evaluated it, with intervals, and a checksum."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import doxa
from doxa.driver.validation import evaluate_rows
from doxa.errors import CorruptedArtefact
from doxa.posterior import Certificate
from doxa.posterior.certificate import clopper_pearson


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=source)
    return x, x[:, 0] + 0.5 * torch.randn(n, generator=source)


@pytest.fixture(scope="module")
def fitted() -> Any:
    net = doxa.nets.mlp(2, 1, (8,))
    return doxa.fit(net, rows(200), "deep-ensemble", steps=100, standardize=True)


@pytest.mark.parametrize(("k", "n"), [(0, 12), (1, 12), (12, 12), (90, 100), (3600, 4000)])
def test_the_interval_of_a_share_is_that_of_the_beta_distribution(k: int, n: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    low = 0.0 if k == 0 else stats.beta.ppf(0.025, k, n - k + 1)
    high = 1.0 if k == n else stats.beta.ppf(0.975, k + 1, n - k)
    assert clopper_pearson(k, n) == pytest.approx((low, high), abs=1e-9)


def test_shares_that_are_not_whole_are_rounded_outwards() -> None:
    low, high = clopper_pearson(10.4, 20.6)
    assert (low, high) == (clopper_pearson(10, 20)[0], clopper_pearson(11, 20)[1])


def test_the_low_quantile_is_an_order_statistic() -> None:
    """F of the 5th smallest of 100 scores is Beta(5, 96): its upper quantile bounds the share."""
    stats = pytest.importorskip("scipy.stats")
    scores = torch.randperm(100, generator=torch.Generator().manual_seed(0)).double()
    found = Certificate.of("rows", {"log_prob": scores})
    assert found.low_score == 4.0
    assert found.low_share is not None and found.low_share.value == 0.04
    assert found.low_share.high == pytest.approx(stats.beta.ppf(0.975, 5, 96), abs=1e-9)
    weighted = Certificate.of("rows", {"log_prob": scores}, torch.ones(100) * 3)
    assert weighted.low_share == found.low_share


def test_who_evaluated_is_known(fitted: Any, tmp_path: Path) -> None:
    found = fitted.certificate
    assert found.evaluated_by == "held-out parts of each member"
    assert found.rows == fitted.diagnostics.held_out["rows"] == 100
    assert found.coverage.value == fitted.diagnostics.held_out["coverage"]
    assert found.log_prob.value == pytest.approx(fitted.diagnostics.held_out["log_prob"])
    fitted.save(tmp_path / "run")
    assert doxa.load(tmp_path / "run").certificate == found
    few = doxa.fit(doxa.nets.mlp(2, 1, (8,)), rows(30), "map", steps=50)
    assert few.certificate.evaluated_by == "cross-fitted parts"
    none = doxa.fit(None, rows(30), "linear")
    assert (none.certificate.evaluated_by, none.certificate.coverage) == ("none", None)
    assert none.certificate.data != few.certificate.data or few.fitted_rows is not None
    evaluate_rows(none, *rows(300, 1), "rows of new.csv")
    found = none.certificate
    assert (found.evaluated_by, found.rows) == ("rows of new.csv", 300)
    p, y = none.predict(rows(300, 1)[0]), rows(300, 1)[1]
    low, high = p.interval(0.9)
    assert found.coverage.value == float(((y >= low) & (y <= high)).double().mean())
    conformal = doxa.evaluate.conformal(none, rows(300, 1), 0.9)
    assert conformal.certificate.evaluated_by == "none"  # it predicts other intervals
    assert conformal.certificate.data == found.data
    assert none.certificate == found


def test_a_changed_certificate_does_not_load(fitted: Any, tmp_path: Path) -> None:
    """Also where the checksums of the files were made anew."""
    fitted.save(tmp_path / "run")
    file = tmp_path / "run" / "meta.json"
    document = json.loads(file.read_text())

    def load(certificate: dict[str, Any]) -> Any:
        document["meta"]["certificate"] = certificate
        file.write_text(json.dumps(document))
        sums = tmp_path / "run" / "checksums.sha256"
        lines = [line for line in sums.read_text().splitlines() if not line.endswith("meta.json")]
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        sums.write_text("\n".join([*lines, f"{digest}  meta.json"]) + "\n")
        return doxa.load(tmp_path / "run")

    saved = document["meta"]["certificate"]
    assert load(saved).certificate == fitted.certificate
    with pytest.raises(CorruptedArtefact, match="certificate of the run does not match"):
        load(saved | {"rows": 100_000})
    other = doxa.fit(None, rows(30), "linear").certificate.to_json()
    with pytest.raises(CorruptedArtefact, match="of another run: its entry 'data'"):
        load(other)


def test_yardsticks_of_a_fit_are_part_of_the_record(tmp_path: Path) -> None:
    posterior = doxa.fit(None, rows(30), "linear")
    posterior.record.diagnostics["yardsticks"] = {"best": "gp", "gain": float("nan"), "n": (3, 4)}
    posterior.save(tmp_path / "run")
    found = doxa.load(tmp_path / "run").certificate.yardsticks
    assert found == {"best": "gp", "gain": None, "n": [3, 4]}


def test_the_rows_of_a_group_count_as_one() -> None:
    """Ten groups of six rows each, and the same rows once: the same certificate, but for rows."""
    source = torch.Generator().manual_seed(0)
    score, inside = torch.randn(10, generator=source).double(), torch.ones(10).double()
    inside[3] = 0.0
    single = Certificate.of("rows", {"log_prob": score, "gain": score - 1, "coverage": inside})
    six = {name: v.repeat(6) for name, v in (("log_prob", score), ("coverage", inside))}
    grouped = Certificate.of(
        "rows", six | {"gain": six["log_prob"] - 1}, groups=torch.arange(10).repeat(6)
    )
    assert (grouped.rows, grouped.effective_rows, grouped.assumed) == (60, 10, "grouped")
    for name in ("coverage", "log_prob", "gain", "low_score", "low_share"):
        assert getattr(grouped, name) == pytest.approx(getattr(single, name))
