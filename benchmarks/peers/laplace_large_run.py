"""One row of `laplace_large.py` with laplace-torch, in a process of its own.

    python laplace_large_run.py ROW {exact,sampled} {CurvlinopsGGN,AsdlGGN} [DEVICE]

Prints the seconds of the curvature and of the log marginal likelihood at prior precision 1.
"sampled" is its `stochastic=True`, one draw of the labels. CurvlinopsGGN is its default. Of whole
networks, neither has Kronecker factors where there are normalisation layers or embeddings.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from laplace_large import ROWS, trained  # type: ignore[import-not-found]


def main() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    from laplace import Laplace  # type: ignore[import-not-found]
    from laplace import curvature as backends  # type: ignore[import-not-found]

    name, curvature, backend = sys.argv[1:4]
    device = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    row = ROWS[name]
    net, x, y = row.make()
    net = trained(net.to(device), x.to(device), y.to(device), row)
    options: dict[str, Any] = {"stochastic": curvature == "sampled"}
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    fitted = Laplace(
        net, "classification", prior_precision=1.0,
        backend=getattr(backends, backend), backend_kwargs=options,
        subset_of_weights="last_layer" if row.subset == "last_layer" else "all",
        hessian_structure={"kronecker": "kron", "diagonal": "diag"}[row.structure],
    )  # fmt: skip
    fitted.fit(DataLoader(TensorDataset(x.to(device), y.to(device)), batch_size=64))
    evidence = float(fitted.log_marginal_likelihood())
    sys.stdout.write(json.dumps({"seconds": clock() - began, "evidence": evidence}) + "\n")


if __name__ == "__main__":
    main()
