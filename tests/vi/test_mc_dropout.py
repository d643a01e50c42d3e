"""MC dropout's objective against standard dropout with weight decay, and its masks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import doxa
from doxa.errors import MethodError, ModelError
from doxa.fit import fit
from doxa.method import Clock
from doxa.model.layers import mask

STD = 0.7


def _net(p: float) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 1)).double()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=g, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def test_the_step_is_standard_dropout_with_weight_decay() -> None:
    """−∇objective/n = ∇(mean loss under the same mask) + weights / (s² n (1 − p)) for the masked
    layer, weights / (s² n) for the rest: the lecture's λ with masks scaled in training."""
    p, net, (x, y) = 0.25, _net(0.25), _data()
    seen: dict[str, torch.Tensor] = {}

    draw = Clock.rows

    def record(name: str):  # type: ignore[no-untyped-def]
        def uniform(self: Clock, kind: str, *shape: int) -> torch.Tensor:
            u = draw(self, kind, *shape)
            if shape[0] == len(x):  # a trial of the engine sees fewer rows
                seen.setdefault(name, u)  # the step's; the final objective draws its own
            return u

        return uniform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "rows", record("u"))
        posterior = fit(
            net, (x, y), doxa.MCDropout(), likelihood=doxa.Gaussian(1.0), prior=doxa.Normal(STD),
            init="given", steps=1, batch_size=40, lr=0.1, schedule="constant",
            optimizer=doxa.optim.SGD(momentum=0.0), engine="loop",
        )  # fmt: skip
        mask = (seen["u"][0] > p).double() / (1 - p)
    after = posterior.layout.unflatten(posterior.theta[0])
    order = doxa.data.Batches(posterior_data(x, y), [0], ["0/0"], 40, "optimise").index(0, 1)[0, 0]
    hidden = torch.tanh(net[0](x[order])) * mask
    loss = 0.5 * (net[3](hidden) - y[order]).square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    decay = {"3.weight": 1 / (1 - p)}
    for (name, weight), gradient in zip(net.named_parameters(), gradients, strict=True):
        step = gradient + weight * decay.get(name, 1.0) / (STD**2 * len(x))
        torch.testing.assert_close(after[name], weight - 0.1 * step, rtol=1e-10, atol=1e-12)


def posterior_data(x: torch.Tensor, y: torch.Tensor) -> doxa.data.Data:
    rows = [torch.arange(len(x))]
    scales = [doxa.data.Standardisation()]
    return doxa.data.Data(x, y, rows, scales, x.device, x.dtype, len(x))


def test_the_objective_counts_the_entropy_of_the_masks() -> None:
    """With all weights zero the fit and the KL do not depend on p: two rates differ by Q·ΔH(p)."""
    x, y = _data()
    objectives = {}
    for p in (0.1, 0.4):
        net = _net(p)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        posterior = fit(
            net, (x, 0 * y), doxa.MCDropout(), likelihood=doxa.Gaussian(1.0), init="given",
            steps=1, lr=1e-30,
        )  # fmt: skip
        objectives[p] = posterior.objective
    entropy = {p: -(p * math.log(p) + (1 - p) * math.log(1 - p)) for p in objectives}
    expected = 8 * (entropy[0.4] - entropy[0.1])  # eight masked inputs, all weights zero
    assert objectives[0.4] - objectives[0.1] == pytest.approx(expected, rel=1e-10)


def test_the_objective_is_its_expectation_within_its_error(tmp_path: Path) -> None:
    """The masks feed the last layer, so that E[(y − f)²] = (y − E f)² + Σ_j (w_j h_j)² p/(1 − p).
    Within 5 standard errors (chance 6e-7), which are a fifth of the 46 nats of one mask a row."""
    p, noise = 0.4, 0.5
    net, (x, y) = _net(p), _data()
    x, y = x[:30], y[:30]
    with torch.no_grad():
        net[3].weight.mul_(3.0)
    posterior = fit(
        net, (x, y), doxa.MCDropout(), likelihood=doxa.Gaussian(noise), prior=doxa.Normal(STD),
        init="given", steps=300, lr=1e-30, validation=None,
    )  # fmt: skip
    with torch.no_grad():
        hidden = torch.tanh(net[0](x))
        square = (y - net[3](hidden)).square() + (hidden * net[3].weight).square().sum(
            1, keepdim=True
        ) * p / (1 - p)
        weights = {name: float(w.square().sum()) for name, w in net.named_parameters()}
        single = torch.stack([
            (y - net[3](hidden * (torch.rand(hidden.shape) > p) / (1 - p))).square().sum()
            for _ in range(200)
        ])  # fmt: skip
    fitted = -0.5 * float(square.sum()) / noise**2 - 30 * math.log(noise * math.sqrt(2 * math.pi))
    decay = sum(v / (1 - p) if name == "3.weight" else v for name, v in weights.items())
    entropy = -8 * (p * math.log(p) + (1 - p) * math.log(1 - p))
    exact = fitted - 0.5 * decay / STD**2 + entropy
    error = posterior.objective_error
    expected = float(single.std()) / (2 * noise**2) / math.sqrt(30)  # of 30 passes over 30 rows
    assert error == pytest.approx(expected, rel=0.4)
    assert abs(posterior.objective - exact) < 5 * error
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net)
    assert (again.objective, again.objective_error) == (posterior.objective, error)


def test_layers_are_inserted_under_the_same_names() -> None:
    x, y = _data()
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    hidden = fit(plain, (x, y), doxa.MCDropout(p=0.2), steps=5)
    everywhere = fit(plain, (x, y), doxa.MCDropout(p=0.2, insert="all"), steps=5)
    assert list(hidden.values) == ["2.dropout.p"]
    assert list(everywhere.values) == ["0.dropout.p", "2.dropout.p"]
    assert hidden.layout.names[:4] == ("0.weight", "0.bias", "2.weight", "2.bias")
    draws = hidden.functions(x, n=50)
    assert draws.std(0).min() > 0


def test_masks_drop_with_probability_p() -> None:
    """The share of dropped units over 400 masks of 8: within 4 standard errors (1 in 16,000)."""
    posterior = fit(_net(0.3), _data(), doxa.MCDropout(), steps=2)
    buffers = posterior.groups(400, 0)[0].buffers
    masks = mask(buffers["2.uniform"], buffers["2.p"][:, None, None])
    dropped = float((masks == 0).double().mean())
    assert abs(dropped - 0.3) < 4 * math.sqrt(0.3 * 0.7 / masks.numel())
    assert torch.allclose(masks[masks > 0], torch.tensor(1 / 0.7, dtype=masks.dtype))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(MethodError, match="0 < p < 1"):
        doxa.MCDropout(p=1.0)
    single = nn.Linear(3, 1).double()
    with pytest.raises(ModelError, match="no dropout layer"):
        fit(single, _data(), doxa.MCDropout(), steps=1)
