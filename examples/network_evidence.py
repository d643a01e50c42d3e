"""Selection of depth, width and prior by evidence and ELBO, compared with held-out rows.

    DOXA_DATA=folder python examples/network_evidence.py [set ...] [--splits 2]

For each UCI set, four networks are compared with four priors and one whose scale is optimised: by
Laplace evidence, ELBO, a validation split, and held-out rows. One table and one figure per set.
"""

from __future__ import annotations

import argparse

import numpy as np

import doxa
from doxa.app.bench import uci
from doxa.selection import Split

HIDDEN = [(), (5,), (20,), (10, 10)]
STDS = [0.1, 0.3, 1.0, 3.0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sets", nargs="*", default=["yacht", "concrete", "boston_housing"])
    parser.add_argument("--splits", type=int, default=2)
    asked = parser.parse_args()
    for name in asked.sets:
        data = uci.load(uci.data_folder(None), name, "standard")
        nets = {
            "×".join(map(str, hidden)) or "linear": doxa.nets.mlp(
                data.x.shape[1], 1, hidden, activation="tanh"
            )
            for hidden in HIDDEN
        }
        found = doxa.evidence(
            nets,
            (data.x, data.y),
            priors=[*STDS, None],
            likelihood="gaussian",
            splits=[
                Split(np.asarray(data.train[k]), np.asarray(data.test[k]))
                for k in range(asked.splits)
            ],
            validation=0.2,
            steps=1000,
            say=print,
        )
        print(found)
        for by in ("evidence", "elbo", "validation"):
            chosen = "; ".join(row.name for row in found.chosen(by))
            print(f"{by}: rank correlation {found.agreement(by):.2f}; chose {chosen}")
        gain, error = found.gain("evidence", "validation")
        print(
            f"{name}: by evidence rather than by validation: {gain:+.3f} ± {error:.3f} nats a row"
        )
        found.figure(f"network_evidence_{name}.png")
        print(f"figure: network_evidence_{name}.png")


if __name__ == "__main__":
    main()
