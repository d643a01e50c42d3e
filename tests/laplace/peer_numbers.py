"""Numbers of laplace-torch for `test_peer.py`, on a fixed small net at fixed weights.

pip install laplace-torch==0.3  # in an environment of its own, beside torch 2.13.0
python tests/laplace/peer_numbers.py
"""

import sys

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


def inputs(rows: int) -> Tensor:
    place = torch.arange(rows, dtype=torch.float64)
    return torch.stack([torch.sin(0.9 * place), torch.cos(0.4 * place)], 1)


def regression(rows: int = 12) -> tuple[Tensor, Tensor]:
    x = inputs(rows)
    return x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)


def classification(rows: int = 12) -> tuple[Tensor, Tensor]:
    return inputs(rows), torch.arange(rows) % 3


def main() -> None:
    from laplace.curvature import BackPackGGN
    from torch.utils.data import DataLoader, TensorDataset

    from laplace import Laplace

    for task, data, outputs in (
        ("regression", regression(), 2),
        ("classification", classification(), 3),
    ):
        for structure in ("full", "diag"):
            fitted = Laplace(
                net(outputs),
                task,
                subset_of_weights="all",
                hessian_structure=structure,
                sigma_noise=NOISE if task == "regression" else 1.0,
                prior_precision=PRIOR_PRECISION,
                backend=BackPackGGN,
            )
            fitted.fit(DataLoader(TensorDataset(*data), batch_size=5))
            mean, covariance = fitted._glm_predictive_distribution(inputs(3)[1:])
            evidence = float(fitted.log_marginal_likelihood())
            rows = [evidence, mean.tolist(), covariance.tolist()]
            sys.stdout.write(f'    ("{task}", "{structure}"): {tuple(rows)},\n')
            if (task, structure) == ("classification", "full"):
                for link in ("probit", "bridge"):
                    probs = fitted(inputs(3)[1:], pred_type="glm", link_approx=link)
                    sys.stdout.write(f'    "{link}": {probs.tolist()},\n')


if __name__ == "__main__":
    main()
