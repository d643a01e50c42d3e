"""Numbers of neural-tangents for the tests beside it: kernels of architectures, and ensembles of
infinitely wide networks after training.

Writes `peer_numbers.json`.

pip install neural-tangents==0.6.5 jax==0.4.30 jaxlib==0.4.30 "numpy<2" "scipy<1.13"
python tests/function/wide/peer_numbers.py      # in an environment of its own
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

WEIGHT_STD, BIAS_STD = 1.3, 0.4
NOISE_VARIANCE = 0.05


def data() -> dict[str, Any]:
    """Rows of numbers, images with channels first, and a training set."""
    rs = np.random.RandomState(0)
    sizes = {"x": (3, 7), "other": (2, 7), "image": (3, 2, 5, 4), "other_image": (2, 2, 5, 4)}
    sizes |= {"train": (6, 7), "y": (6, 1)}
    return {name: rs.randn(*size) for name, size in sizes.items()}


def main() -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    from neural_tangents import predict, stax

    relu, erf, gelu = stax.Relu, stax.Erf, stax.Gelu
    norm, flat, pool = stax.LayerNorm, stax.Flatten, stax.GlobalAvgPool

    def dense() -> Any:
        return stax.Dense(1, WEIGHT_STD, BIAS_STD)

    def conv(padding: str = "SAME", size: Any = (3, 3), stride: Any = (1, 1)) -> Any:
        return stax.Conv(1, size, stride, padding, WEIGHT_STD, BIAS_STD)

    def connected(activation: Any, depth: int) -> Any:
        return stax.serial(*[f() for _ in range(depth) for f in (dense, activation)], dense())

    def residual(*block: Any) -> Any:
        both = stax.parallel(stax.serial(*block), stax.Identity())
        return stax.serial(stax.FanOut(2), both, stax.FanInSum())

    rows = {
        "relu": connected(relu, 3),
        "erf": connected(erf, 3),
        "gelu": connected(gelu, 3),
        "leaky": connected(lambda: stax.LeakyRelu(0.2), 2),
        "layer norm": stax.serial(
            dense(), norm(eps=1e-5), relu(), dense(), norm(eps=1e-5), erf(), dense()
        ),
        "residual": stax.serial(
            dense(), residual(relu(), dense(), erf(), dense()), relu(), dense()
        ),
    }
    images = {
        "conv, flattened": stax.serial(
            conv(), relu(), conv("CIRCULAR"), relu(), flat(), dense()
        ),
        "conv, strided": stax.serial(
            conv("VALID", (3, 2), (2, 1)), gelu(), flat(), dense(), relu(), dense()
        ),
        "conv, pooled": stax.serial(conv(), relu(), conv(), relu(), pool(), dense()),
        "conv, pooled twice": stax.serial(
            conv("CIRCULAR"), erf(), stax.AvgPool((2, 2), (2, 2)), conv("VALID", (2, 2)), relu(),
            pool(), dense(), relu(), dense(),
        ),
        "conv, residual": stax.serial(
            conv(), residual(relu(), conv(), gelu(), conv()), relu(), pool(), dense()
        ),
        "conv, layer norm": stax.serial(
            conv(), norm(axis=(1, 2, 3), eps=1e-5), relu(), conv(), norm(axis=(3,), eps=1e-5),
            relu(), pool(), dense(),
        ),
    }  # fmt: skip
    given, found = data(), {}
    last = {name: given[name].transpose(0, 2, 3, 1) for name in ("image", "other_image")}
    for nets, pair in (
        (rows, (given["x"], given["other"])), (images, (last["image"], last["other_image"]))
    ):  # fmt: skip
        for name, (_, _, kernel) in nets.items():
            both = kernel(*pair, ("nngp", "ntk"))
            found[name] = {"nngp": both.nngp.tolist(), "ntk": both.ntk.tolist()}
    _, _, kernel = connected(erf, 2)
    trained = predict.gradient_descent_mse_ensemble(
        kernel, given["train"], given["y"], 1.0, NOISE_VARIANCE, diag_reg_absolute_scale=True
    )
    for name, time, kind in (
        ("after 0.7", 0.7, "ntk"), ("after 20", 20.0, "ntk"), ("at the end", None, "ntk"),
        ("posterior", None, "nngp"),
    ):  # fmt: skip
        at = trained(t=time, x_test=given["x"], get=kind, compute_cov=True)
        found[name] = {"mean": at.mean.tolist(), "covariance": at.covariance.tolist()}
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
