"""Your own network, classification, several members: entropy and mutual information, save and load.

    python examples/own_network.py

A small convolutional net on scikit-learn's 8 × 8 digits; the classes 8 and 9 are held out
of training and predicted afterwards. There a posterior should be uncertain, and a point estimate
may not be.
"""

from __future__ import annotations

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import doxa


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.dense = nn.Linear(8 * 4 * 4, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.head(torch.relu(self.dense(h.flatten(1))))


def main() -> None:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    known = y < 8
    train, test = known.nonzero().flatten()[:900], known.nonzero().flatten()[900:]
    posterior = doxa.fit(
        Net(), (x[train], y[train]), "deep-ensemble", likelihood="categorical", steps=600, lr=5e-3
    )
    seen, unseen = posterior.predict(x[test]), posterior.predict(x[~known])
    accuracy = (seen.probs.argmax(1) == y[test]).float().mean()
    print(f"accuracy {accuracy:.3f}, log-likelihood {seen.log_prob(y[test]).mean():.3f}")
    print(f"entropy  seen classes {seen.entropy.mean():.3f}   unseen {unseen.entropy.mean():.3f}")
    print(
        f"mutual information  seen {seen.mutual_information.mean():.3f}   "
        f"unseen {unseen.mutual_information.mean():.3f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(f"{folder}/run")
        again = doxa.load(f"{folder}/run", net=Net())  # not a registered builder: pass the network
        assert torch.equal(again.predict(x[test]).probs, seen.probs)


if __name__ == "__main__":
    main()
