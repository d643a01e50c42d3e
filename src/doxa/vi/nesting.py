"""How many draws each layer has where several are asked for: a rule about the work.

S draws of all weights are S passes through the network. Nested draws (`doxa.model.nested`) take a
layer's products once for each draw of its input: with n_1 | n_2 | … | n_L = S draws of the layers'
outputs, and c_l multiplications a row in the l-th, a gradient has some

    4 c_1 + Σ_{l>1} 6 c_l n_{l−1}      where a point estimate's has   2 c_1 + Σ_{l>1} 3 c_l

(means and variances; forward, by the weights and by the input, which the first has not). The draws
that share their first layers' noise are what is saved, and have more variance than if each had its
own: so a row has as many in each layer as the budget pays for, the last layers' first, and two at
least, which are a pair ±ε. The budget is half of what draws of the weights would take, or five
point estimates' gradients where that is more.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from doxa.model import Model
from doxa.vi.layer_noise import alone, under

_LEAST = 5.0  # the budget where draws are few, in point estimates' gradients


def nested_draws(net: Model, samples: int, most: float) -> dict[str, int] | None:
    """{layer: draws of its outputs}. None where it would take more than `most` point estimates'
    gradients; or where a draw of the noise on outputs is none of the weights, or of no row's own:
    all uncertain weights must lie in linear layers that see each row once, one after the other."""
    path = _path(net)
    if samples < 2 or path is None:
        return None
    uncertain = [name for name, _, noisy in path if noisy]
    least = next(d for d in range(2, samples + 1) if samples % d == 0)
    draws = [least] * (len(uncertain) - 1) + [samples]
    if _work(path, draws) > most * _point(path):
        return None
    budget = min(most, max(_LEAST, samples / 2)) * _point(path)
    for i in reversed(range(len(draws) - 1)):
        for d in range(draws[i + 1], least, -1):
            tried = [*draws[:i], d, *draws[i + 1 :]]
            if draws[i + 1] % d == 0 and d % least == 0 and _work(path, tried) <= budget:
                draws = tried
                break
    return dict(zip(uncertain, draws, strict=True))


_Path = list[tuple[str, int, bool]]  # linear layers as they run: name, weights, whether uncertain


def _path(net: Model) -> _Path | None:
    """None where the network is no path, or where not all uncertain weights are on it."""
    if net.plan is None or not net.plan.is_path:
        return None
    layers, uncertain = dict(net.net.named_modules()), set(net.subset_names)
    calls = [name for name, _ in net.widths]
    path: _Path = []
    for name, numbers in net.widths:  # what each call of a layer gave for one row
        layer = layers[name]
        if type(layer) is not nn.Linear:
            continue
        noisy = under(name, "weight") in net.subset_names
        once = calls.count(name) == 1 and numbers == layer.out_features and alone(layer, layers)
        if noisy and not once:
            return None
        path.append((name, layer.weight.numel(), noisy))
        if noisy:
            uncertain -= {under(name, "weight"), under(name, "bias")}
    return path if path and not uncertain else None


def _work(path: _Path, draws: Sequence[int]) -> int:
    """Multiplications a row of a gradient."""
    total, before, left = 0, 1, iter(draws)
    for i, (_, size, noisy) in enumerate(path):
        total += (2 if noisy else 1) * (3 if i else 2) * size * before
        before = next(left) if noisy else before
    return total


def _point(path: _Path) -> int:
    return _work([(name, size, False) for name, size, _ in path], ())
