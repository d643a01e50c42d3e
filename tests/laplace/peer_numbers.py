"""Numbers of laplace-torch for `test_peer.py`, on fixed small nets at fixed weights.

Writes `peer_numbers.json`: the log marginal likelihood; mean and covariance of f at two rows; of
Kronecker factors, `fingerprint`s in the order of the weights.

pip install laplace-torch==0.3  # in an environment of its own, beside torch 2.13.0
python tests/laplace/peer_numbers.py
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

PRIOR_PRECISION = 2.0
NOISE = 0.4


def net(outputs: int) -> nn.Module:
    """2-4-outputs, tanh, with weights from a formula: nothing random, nothing trained."""
    made = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            place = torch.arange(p.numel(), dtype=torch.float64)
            p.copy_((0.7 * torch.sin(1.3 * place + i)).reshape(p.shape))
    return made


def image_net() -> nn.Module:
    """A strided, padded convolution and a linear layer: 2 × 9 + 2 + 3 × 18 + 3 weights."""
    made = nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)
    ).double()
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            place = torch.arange(p.numel(), dtype=torch.float64)
            p.copy_((0.7 * torch.sin(1.3 * place + i)).reshape(p.shape))
    return made


def images(rows: int = 12) -> Tensor:
    place = torch.arange(rows * 25, dtype=torch.float64)
    return torch.sin(0.37 * place + 0.01 * place.square()).reshape(rows, 1, 5, 5)


def fingerprint(factor: Tensor) -> tuple[float, float]:
    """Two numbers that know every entry of a symmetric matrix: its trace, and uᵀFu."""
    u = torch.cos(torch.arange(len(factor), dtype=torch.float64))
    return float(factor.trace()), float(u @ factor @ u)


def inputs(rows: int) -> Tensor:
    place = torch.arange(rows, dtype=torch.float64)
    return torch.stack([torch.sin(0.9 * place), torch.cos(0.4 * place)], 1)


def regression(rows: int = 12) -> tuple[Tensor, Tensor]:
    x = inputs(rows)
    return x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)


def classification(rows: int = 12) -> tuple[Tensor, Tensor]:
    return inputs(rows), torch.arange(rows) % 3


def main() -> None:
    from laplace.curvature import BackPackGGN, CurvlinopsEF, CurvlinopsGGN
    from torch.utils.data import DataLoader, TensorDataset

    from laplace import Laplace

    table: dict[str, list[object]] = {}
    small = (
        ("regression", net(2), regression(), inputs(3)[1:]),
        ("classification", net(3), classification(), inputs(3)[1:]),
    )
    picture = ("classification", image_net(), (images(), torch.arange(12) % 3), images(3)[1:])

    def tell(name, structure, backend, task, model, data, x):  # type: ignore[no-untyped-def]
        fitted = Laplace(
            model,
            task,
            subset_of_weights="all",
            hessian_structure=structure,
            sigma_noise=NOISE if task == "regression" else 1.0,
            prior_precision=PRIOR_PRECISION,
            backend=backend,
        )
        fitted.fit(DataLoader(TensorDataset(*data), batch_size=5))
        mean, covariance = fitted._glm_predictive_distribution(x)
        found = [float(fitted.log_marginal_likelihood()), mean.tolist(), covariance.tolist()]
        if structure == "kron":
            found.append([[fingerprint(f) for f in block] for block in fitted.H_facs.kfacs])
        kind = "fisher" if backend is CurvlinopsEF else "ggn"
        table[f"{name} {structure} {kind}"] = found
        if (name, structure, kind) == ("classification", "full", "ggn"):
            for link in ("probit", "bridge"):
                table[link] = fitted(x, pred_type="glm", link_approx=link).tolist()

    for case in small:
        for structure, backend in (("full", BackPackGGN), ("diag", BackPackGGN)):
            tell(case[0], structure, backend, *case)
        for structure, backend in (
            ("kron", CurvlinopsGGN), ("full", CurvlinopsEF), ("kron", CurvlinopsEF),
        ):  # fmt: skip
            # of Gaussian noise, its empirical Fisher is that of scores times 2σ²
            if backend is CurvlinopsGGN or case[0] == "classification":
                tell(case[0], structure, backend, *case)
    for structure in ("full", "kron"):
        tell("images", structure, CurvlinopsGGN, *picture)
    lines = [f"{json.dumps(case)}: {json.dumps(found)}" for case, found in table.items()]
    Path(__file__).with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
