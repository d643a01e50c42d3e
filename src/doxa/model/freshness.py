"""Has a network been trained, so that a fresh start would throw that away?

Each tensor of k weights is compared with one that its layer has newly drawn. For independent draws
of one distribution whose tails are no heavier than a normal's, the log of the ratio of their root
mean squares has a standard deviation of at most 1/√k: six of them are beyond chance, whatever the
number of tensors. What a layer does not draw (a normalisation's scale, a zero bias) must still be
the same number everywhere, and BatchNorm must have counted no batch. A network with an
initialisation of its own may look trained too: a fresh start loses it just the same.
"""

from __future__ import annotations

import logging

from torch import Tensor

from doxa.model.model import Model

log = logging.getLogger("doxa")

_DEVIATIONS = 6.0
_LEAST = 16  # numbers; of fewer, the logarithm's tails are too long


def say_if_trained(model: Model, fresh: Tensor) -> None:
    """Warn where the given weights do not look like new ones, as `fresh` [P] are."""
    found = trained_tensors(model, fresh)
    if found:
        log.warning(
            "the network's weights do not look freshly initialised (%s), and init='fresh' replaces "
            "them: use init='given' to start from them",
            ", ".join(found[:3]) + (", …" if len(found) > 3 else ""),
        )


def trained_tensors(model: Model, fresh: Tensor) -> list[str]:
    """The names of weights and counters that training must have changed."""
    given, new = model.layout.unflatten(model.given()), model.layout.unflatten(fresh)
    found = [
        name for name, value in given.items()
        if not name.startswith("likelihood.") and _moved(value.double(), new[name].double())
    ]  # fmt: skip
    counters = [name for name in model.tracked if name.endswith("num_batches_tracked")]
    return found + [name for name in counters if int(model.fixed[name]) > 0]


def _moved(given: Tensor, fresh: Tensor) -> bool:
    differs = _constant(fresh)
    if not differs and fresh.numel() >= _LEAST:
        size = lambda t: t.square().mean().clamp_min(1e-300).sqrt().log()  # noqa: E731
        gap = (size(given) - size(fresh)).abs() * fresh.numel() ** 0.5
        differs = bool(gap > _DEVIATIONS)
    return differs and not _constant(given)  # training does not leave such


def _constant(values: Tensor) -> bool:
    return bool((values == values.flatten()[0]).all())
