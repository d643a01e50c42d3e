"""Bad data: a typed error that names the place, or a documented result. Nothing else."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import of_rows
from short import short
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import doxa
from doxa.errors import DataError, DoxaError, MissingExtra, ModelError, ShapeError

N, D = 20, 3


def table(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, D, generator=g)
    return x, x.sum(1, keepdim=True)


def mlp(outputs: int = 1) -> nn.Module:
    return doxa.nets.mlp(D, outputs, hidden=(4,))


def quick(net: nn.Module | None, data: Any, method: Any = "map", **settings: Any) -> Any:
    return doxa.fit(net, data, method, **{"steps": 3, **settings})


def fit_by_name(name: str, data: Any, own: Any = None, **settings: Any) -> Any:
    """Any registered method, at its shortest, on a network if it takes one."""
    try:
        method = replace(short(name), **(own or {}))
    except MissingExtra as error:
        pytest.skip(str(error))
    return quick(mlp() if method.needs_network else None, data, method, **settings)


METHODS = [row.name for row in of_rows()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("standardize", [False, True])
def test_non_finite_inputs_name_row_and_column(bad: float, standardize: bool) -> None:
    x, y = table()
    x[7, 2] = bad
    with pytest.raises(DataError, match=rf"x is {bad} at row 7, column 2"):
        quick(mlp(), (x, y), standardize=standardize)
    with pytest.raises(DataError, match=rf"x is {bad} at row 7, column 2"):
        quick(mlp(), (x.numpy().astype(np.float16), y))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_checks_its_rows(method: str) -> None:
    x, y = table()
    for data, message in (
        ((torch.where(x == x[7, 2], torch.nan, x), y), "x is nan at row 7, column 2"),
        ((x, torch.where(y == y[4], torch.inf, y)), "y is inf at row 4"),
        ((x, y[:-1]), "x has 20 rows and y 19"),
        ((x, y.T), "x has 20 rows and y 1"),
        ((x.numpy().astype(str), y), "x holds <U"),
    ):
        with pytest.raises(DataError, match=message):
            fit_by_name(method, data)
    posterior = fit_by_name(method, (x, y[:, 0]))
    with pytest.raises(DataError, match="x is nan at row 0, column 1"):
        posterior.predict(torch.tensor([[0.0, torch.nan, 0.0]]))
    with pytest.raises(DataError, match="N = 0"):
        posterior.predict(x[:0])
    with pytest.raises(ShapeError):
        posterior.predict(x).log_prob(y.T)
    assert posterior.predict(x).log_prob(y[:, 0]).shape == (N,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_targets_name_row_and_column(bad: float) -> None:
    x, y = table()
    y[11] = bad
    with pytest.raises(DataError, match=rf"y is {bad} at row 11"):
        quick(mlp(), (x, y))
    with pytest.raises(DataError, match=rf"y is {bad} at row 11;"):
        quick(mlp(), (x, y[:, 0]))
    two = torch.cat([torch.zeros_like(y), y], 1)
    with pytest.raises(DataError, match=rf"y is {bad} at row 11, column 1"):
        quick(mlp(2), (x, two))


def test_non_finite_rows_of_a_streamed_dataset_have_their_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = table()
    x[13, 1] = float("nan")
    for name, module in list(sys.modules.items()):
        if name.startswith("doxa.") and hasattr(module, "free_memory"):
            monkeypatch.setattr(module, "free_memory", lambda *_: 64)
    monkeypatch.setattr("doxa.method.method.free_memory", lambda *_: 1 << 30)
    with pytest.raises(DataError, match="x is nan at row 13, column 1"):
        quick(mlp(), TensorDataset(x, y), steps=20)


def test_non_finite_inputs_of_predict_and_validation() -> None:
    x, y = table()
    posterior = quick(mlp(), (x, y))
    bad = x.clone()
    bad[4, 0] = float("nan")
    with pytest.raises(DataError, match="x is nan at row 4, column 0"):
        posterior.predict(bad)
    with pytest.raises(DataError, match="validation x is nan at row 4, column 0"):
        quick(mlp(), (x, y), validation=(bad, y))
    with pytest.raises(DataError, match="row 2"):
        posterior.predict(x).log_prob(torch.where(torch.arange(N)[:, None] == 2, torch.nan, y))


def test_numbers_beyond_the_networks_precision_are_named() -> None:
    x, y = (v.double() for v in table())
    x[3, 1] = 1e200
    with pytest.raises(DataError, match=r"x is 1e\+200 at row 3, column 1; .*float32"):
        quick(mlp(), (x, y))
    posterior = quick(mlp(), table())
    with pytest.raises(DataError, match=r"1e\+200 at row 3"):
        posterior.predict(x)


def test_a_constant_column_gets_scale_one_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    x, y = table()
    x[:, 1] = 1e6 / 3
    with caplog.at_level(logging.WARNING, "doxa"):
        posterior = quick(mlp(), (x, y), standardize=True)
    assert "x: constant column [1] gets scale 1" in caplog.text
    assert float(posterior.scales.x_scale[1]) == 1.0
    assert torch.isfinite(posterior.predict(x).mean).all()


def test_a_constant_target_gets_scale_one_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    x, _ = table()
    with caplog.at_level(logging.WARNING, "doxa"):
        posterior = quick(mlp(), (x, torch.full((N, 1), 7.0)), standardize=True)
    assert "y: constant column" in caplog.text
    p = posterior.predict(x)
    assert torch.isfinite(p.mean).all() and bool((p.variance > 0).all())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_one_class_is_an_error(likelihood: str) -> None:
    x, _ = table()
    y = torch.ones(N, dtype=torch.long)
    net = mlp(3 if likelihood == "categorical" else 1)
    with pytest.raises(DataError, match=r"one class only \(\[1"):
        quick(net, (x, y), likelihood=likelihood)


def test_only_ignored_or_one_class_is_an_error() -> None:
    x, _ = table()
    y = torch.where(torch.arange(N) % 2 == 0, -100, 2)
    with pytest.raises(DataError, match="one class only"):
        quick(mlp(3), (x, y), likelihood=doxa.Categorical(ignore_index=-100))


def test_unknown_classes_name_their_row() -> None:
    x, _ = table()
    y = torch.arange(N) % 3
    y[6] = 3
    with pytest.raises(DataError, match=r"row 6 .*3 outputs.*it is 3"):
        quick(mlp(3), (x, y), likelihood="categorical")
    y[6] = -1
    with pytest.raises(DataError, match="row 6"):
        quick(mlp(3), (x, y), likelihood="categorical")
    with pytest.raises(DataError, match=r"row 0.*whole"):
        quick(mlp(3), (x, y + 0.5), likelihood="categorical")
    with pytest.raises(DataError, match=r"row 2.*neither 0 nor 1"):
        quick(mlp(1), (x, torch.arange(N) % 3), likelihood="bernoulli")
    with pytest.raises(DataError, match="row 1"):
        quick(mlp(1), (x, -(torch.arange(N) % 3)), likelihood="poisson")


@pytest.mark.parametrize("keep", ["samples", "moments"])
def test_an_unseen_class_at_evaluation_names_its_row(keep: str) -> None:
    x, _ = table()
    y = torch.arange(N) % 3
    p = quick(mlp(3), (x, y), likelihood="categorical").predict(x, keep=keep)
    assert p.log_prob(y).shape == (N,)
    y[9] = 3
    with pytest.raises(DataError, match=r"row 9"):
        p.log_prob(y)


@pytest.mark.parametrize("method", METHODS)
def test_no_rows_is_an_error(method: str) -> None:
    x, y = table()
    with pytest.raises(DataError, match="N = 0"):
        fit_by_name(method, (x[:0], y[:0]))


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_one_row_is_enough(method: str, standardize: bool) -> None:
    x, y = table()
    own = {"inducing": 1} if method in ("sparse-gp", "deep-gp") else None  # not more than rows
    posterior = fit_by_name(method, (x[:1], y[:1]), own, standardize=standardize)
    p = posterior.predict(x)
    assert torch.isfinite(p.mean).all()
    assert bool((p.variance > 0).all()) or posterior.status != "ok"  # evidence may have no maximum
    assert posterior.predict(x[:1]).mean.shape == (1, 1)


def test_no_row_to_predict_is_an_error() -> None:
    x, y = table()
    with pytest.raises(DataError, match="N = 0"):
        quick(mlp(), (x, y)).predict(x[:0])


def test_a_vector_of_targets_means_one_column() -> None:
    x, y = table()
    a, b = quick(mlp(), (x, y)), quick(mlp(), (x, y[:, 0]))
    assert torch.equal(a.samples, b.samples)
    p = b.predict(x)
    assert a.predict(x).mean.shape == (N, 1) and p.mean.shape == (N,)
    assert torch.equal(p.log_prob(y), p.log_prob(y[:, 0]))


SHAPES: list[tuple[int, tuple[int, ...]]] = [
    (2, (N, 1)), (2, (N,)), (1, (N, 2)), (1, (1, N)), (1, (N, 1, 1)), (2, (2, N)), (3, (N, 2)),
    (1, ()), (1, (N + 1, 1)), (1, (N - 1,)),
]  # fmt: skip


@pytest.mark.parametrize("outputs, shape", SHAPES, ids=str)
def test_other_target_shapes_are_never_broadcast(outputs: int, shape: tuple[int, ...]) -> None:
    x, _ = table()
    with pytest.raises(ShapeError):
        quick(mlp(outputs), (x, torch.zeros(shape)))


def test_target_shapes_are_checked_at_evaluation_too() -> None:
    x, y = table()
    p = quick(mlp(2), (x, torch.cat([y, y], 1))).predict(x)
    for shape in ((N,), (N, 1), (1, N), (2, N), (N, 3), (1, 2), (N - 1, 2), (N, 2, 1)):
        with pytest.raises(ShapeError):
            p.log_prob(torch.zeros(shape))


def test_class_targets_of_another_shape() -> None:
    x, _ = table()
    y = torch.arange(N) % 3
    for bad in (y[:, None], torch.nn.functional.one_hot(y)):
        with pytest.raises(ShapeError):
            quick(mlp(3), (x, bad), likelihood="categorical")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float_inputs_of_any_width_are_cast(dtype: torch.dtype) -> None:
    x, y = table()
    rounded = x.to(dtype), y.to(dtype)
    posterior = quick(mlp(), rounded, standardize=True)
    assert posterior.dtype == torch.float32
    same = quick(mlp(), (rounded[0].float(), rounded[1].float()), standardize=True)
    torch.testing.assert_close(posterior.samples, same.samples, rtol=1e-5, atol=1e-6)
    assert posterior.predict(rounded[0]).log_prob(rounded[1]).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_integer_targets_are_cast(dtype: torch.dtype) -> None:
    x, _ = table()
    y = (torch.arange(N) % 2).to(dtype)
    expected = quick(mlp(), (x, y.float()), likelihood="gaussian")
    as_numbers = quick(mlp(), (x, y), likelihood="gaussian")
    assert torch.equal(as_numbers.samples, expected.samples)
    classes = quick(mlp(2), (x, y), likelihood="categorical")
    assert torch.isfinite(classes.predict(x).log_prob(y)).all()
    logits = quick(mlp(1), (x, y), likelihood="bernoulli")
    assert torch.isfinite(logits.predict(x).log_prob(y)).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_table_of_whole_numbers_is_used_as_numbers(dtype: torch.dtype) -> None:
    """With the bits of the same numbers as floats; at prediction, too. Images stay integers."""
    x, y = table()
    whole = (3 * x).to(dtype)
    posterior = quick(mlp(), (whole, y))
    expected = quick(mlp(), (whole.float(), y))
    assert torch.equal(posterior.samples, expected.samples)
    assert torch.equal(posterior.predict(whole).mean, expected.predict(whole.float()).mean)
    assert torch.equal(expected.predict(whole).mean, expected.predict(whole.float()).mean)
    assert posterior.count_fitted(whole, y) == len(y)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1))
    with pytest.raises(ModelError, match=r"convert x to floats"):
        quick(net, (torch.ones(len(y), 2, 2, dtype=dtype), y))


def test_integers_that_are_looked_up_stay_integers() -> None:
    """In an embedding, and in a network that looks rows up by itself."""

    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Parameter(torch.randn(5, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not x.is_floating_point()
            return self.rows[x[:, 0]]

    _, y = table()
    x = torch.arange(len(y))[:, None] % 5
    embedding = torch.nn.Sequential(torch.nn.Embedding(5, 1), torch.nn.Flatten())
    for net in (Looks(), embedding):
        assert quick(net, (x, y)).predict(x).mean.shape == y.shape


def test_wide_unsigned_integers_and_other_byte_orders() -> None:
    x, _ = table()
    y = np.arange(N).astype(np.uint32)
    swapped = x.numpy().astype(">f4")
    posterior = quick(mlp(), (swapped, y))
    assert torch.equal(posterior.samples, quick(mlp(), (x, y.astype(np.float32))).samples)


def test_rows_on_the_meta_device_are_an_error() -> None:
    x, y = table()
    with pytest.raises(DataError, match="meta"):
        quick(mlp(), (x.to("meta"), y))
    with pytest.raises(DataError, match="meta"):
        quick(mlp(), (x, y.to("meta")))
    with pytest.raises(DataError, match="meta"):
        quick(mlp(), (x, y)).predict(x.to("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_are_moved_to_the_networks_device() -> None:
    x, y = table()
    for device, other in (("cpu", "cuda"), ("cuda", "cpu")):
        net = mlp().to(device)
        for standardize in (False, True):
            posterior = quick(net, (x.to(other), y.to(other)), standardize=standardize)
            assert posterior.device.type == device
            p = posterior.predict(x.to(other))
            assert p.mean.device.type == device
            assert p.log_prob(y.to(other)).device.type == device


def test_mismatched_lengths() -> None:
    x, y = table()
    with pytest.raises(ShapeError, match=r"x has 20 rows and y 19"):
        quick(mlp(), (x, y[:-1]))
    with pytest.raises(ShapeError, match="different lengths"):
        quick(mlp(), ((x, x[:5]), y))
    with pytest.raises(ShapeError, match="validation"):
        quick(mlp(), (x, y), validation=(x, y[:-1]))
    with pytest.raises(ShapeError, match="validation"):
        quick(mlp(), (x, y), validation=(x[:, :2], y))
    with pytest.raises(ShapeError, match="scalar"):
        quick(mlp(), (torch.tensor(1.0), y))


NOT_NUMBERS: dict[str, Any] = {
    "strings": np.array([["a", "b", "c"]] * N),
    "objects": np.array([[None, 1, 2]] * N, dtype=object),
    "ragged": [[1.0, 2.0], [1.0]] * (N // 2),
    "dates": np.array([["2020-01-01"] * D] * N, dtype="datetime64[D]"),
    "complex": np.ones((N, D), dtype=np.complex64),
    "complex tensor": torch.ones(N, D, dtype=torch.complex64),
    "records": np.zeros(N, dtype=[("a", "f4"), ("b", "i4")]),
    "nothing": None,
    "sparse": torch.eye(N).to_sparse(),
}


@pytest.mark.parametrize("kind", NOT_NUMBERS)
def test_what_is_not_a_table_of_numbers_is_an_error(kind: str) -> None:
    x, y = table()
    with pytest.raises(DataError, match=r"^x "):
        quick(mlp(), (NOT_NUMBERS[kind], y))
    with pytest.raises(DataError, match=r"^y "):
        quick(mlp(), (x, NOT_NUMBERS[kind]))
    with pytest.raises(DataError, match=r"^x "):
        quick(mlp(), (x, y)).predict(NOT_NUMBERS[kind])


@pytest.mark.parametrize("data", [None, 3, "data.csv", (1,), (1, 2, 3), {"x": 1}, ()], ids=repr)
def test_what_is_no_pair_is_an_error(data: Any) -> None:
    with pytest.raises(DataError, match=r"pair \(x, y\)"):
        quick(mlp(), data)


@pytest.mark.parametrize("method", METHODS)
def test_predicting_other_columns_is_an_error(method: str) -> None:
    x, y = table()
    posterior = fit_by_name(method, (x, y))
    for bad in (x[:, :2], torch.cat([x, x], 1), x[:, 0], x[:, :, None], (x, x), {"x": x[:, :2]}):
        with pytest.raises(ShapeError, match=r"\(3,\)"):
            posterior.predict(bad)


def test_predicting_images_of_another_size_is_an_error() -> None:
    x = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    posterior = quick(doxa.nets.lenet5(1, 1, size=12), (x, x.mean((1, 2, 3))))
    with pytest.raises(DoxaError, match=r"\(1, 20, 20\)|\[8, 1, 20, 20\]"):
        posterior.predict(torch.zeros(8, 1, 20, 20))


@pytest.mark.parametrize(
    "weight, error, message",
    [
        (torch.ones(N + 1), ShapeError, r"shape \(21,\), expected \(20,\)"),
        (torch.ones(N, 1), ShapeError, r"shape \(20, 1\)"),
        (1.0, ShapeError, r"shape \(\)"),
        (-torch.ones(N), DataError, r"-1.0 at row 0"),
        (torch.full((N,), float("nan")), DataError, r"nan at row 0"),
        (torch.full((N,), float("inf")), DataError, r"inf at row 0"),
        (torch.zeros(N), DataError, r"zero"),
        (["heavy"] * N, DataError, r"sample_weight holds"),
    ],
)
def test_bad_sample_weights(weight: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quick(mlp(), table(), sample_weight=weight)


def test_a_run_without_any_weight_is_an_error() -> None:
    weight = torch.ones(N)
    weight[:5] = 0.0
    runs = doxa.Runs(rows=[range(N), range(5)])
    with pytest.raises(DataError, match="zero"):
        quick(mlp(), table(), sample_weight=weight, runs=runs)


def test_a_failed_fit_leaves_nothing_behind() -> None:
    x, y = table()
    x[0, 0] = float("nan")
    net = mlp().train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    for data in ((x, y), table()):
        with pytest.raises(DoxaError):
            quick(net, data, validation=1.5)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.training and not any(m._forward_hooks for m in net.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
