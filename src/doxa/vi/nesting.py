"""Which networks may draw several times in one pass, and how often each layer does: a rule about
the work.

S draws of all weights are S passes through the network. In one pass (`doxa.model.nested`) a layer's
products are taken once for each draw of its input: with n draws of the first layer's outputs, S of
all others', and c_l multiplications a row in the l-th layer, a gradient has some

    4 c_1 + 6 n c_2 + 6 S Σ_{l>2} c_l      where a point estimate's has   2 c_1 + 3 Σ_{l>1} c_l

(means and variances; forward, by the weights and by the input, which the first has not). Layers
are often narrow at the end. With n < S draws share their first layer's noise, and have more
variance than if each had its own: so n is as large as the budget pays for, half of what draws of
the weights would take or five point estimates' gradients if that is more, and two at least, which
are a pair ±ε. Later layers share none: where several do, the gradient by μ has more variance than
that of as many draws of the weights.
"""

from __future__ import annotations

from torch import nn

from doxa.model import Model
from doxa.vi.layer_noise import alone, under

_LEAST = 5.0  # the budget where draws are few, in point estimates' gradients
_Path = list[tuple[str, int, bool]]  # linear layers as they run: name, weights, whether uncertain


def all_draws(net: Model, samples: int) -> dict[str, int] | None:
    """{layer: draws of its outputs}, none shared. None where local noise on outputs, drawn several
    times in a pass, is no draw of the weights: all uncertain weights must lie in linear layers that
    see each row once, one after the other."""
    path = _path(net)
    if samples < 2 or path is None:
        return None
    return {name: samples for name, _, noisy in path if noisy}


def nested_draws(net: Model, samples: int) -> dict[str, int] | None:
    """The same with as many of the first layer as the budget pays for; None also where it would be
    more work than draws of the weights."""
    path, draws = _path(net), all_draws(net, samples)
    if path is None or draws is None:
        return None
    point = _work([(name, size, False) for name, size, _ in path], {})
    first, *others = draws
    least = next(d for d in range(2, samples + 1) if samples % d == 0)
    budget = min(samples, max(_LEAST, samples / 2)) * point
    if others:
        counts = [n for n in range(samples, least, -1) if samples % n == 0 and n % least == 0]
        fits = (n for n in counts if _work(path, draws | {first: n}) <= budget)
        draws[first] = next(fits, least)
    return draws if _work(path, draws) <= samples * point else None


def _path(net: Model) -> _Path | None:
    """None where the network is no path, or where not all uncertain weights are on it."""
    if net.plan is None or not net.plan.is_path:
        return None
    layers, rest = dict(net.net.named_modules()), set(net.subset_names)
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
            rest -= {under(name, "weight"), under(name, "bias")}
    return path if path and not rest else None


def _work(path: _Path, draws: dict[str, int]) -> int:
    """Multiplications a row of a gradient."""
    total, before = 0, 1  # draws of a layer's input
    for i, (name, size, noisy) in enumerate(path):
        total += (2 if noisy else 1) * (3 if i else 2) * size * before
        before = draws[name] if noisy else before
    return total
