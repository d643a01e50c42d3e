"""Several processes on one GPU at the same time, by NVIDIA's multi-process service.

A client that faults, or is killed while its kernels run, takes the others with it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile


def start() -> tuple[dict[str, str], str]:
    """Start the service; the environment of its clients, or ours where a trial with it fails, and
    what happened."""
    folder = tempfile.mkdtemp()
    places = {f"CUDA_MPS_{kind}_DIRECTORY": folder for kind in ("PIPE", "LOG")}
    environment = dict(os.environ) | places
    trial = [sys.executable, "-c", "import torch; print(torch.ones(2, device='cuda').sum().item())"]
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=30,
                       capture_output=True)  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return dict(os.environ), f"no multi-process service: {error}"
    try:
        subprocess.run(trial, env=environment, check=True, timeout=60, capture_output=True)
    except subprocess.SubprocessError as error:
        stop(environment)
        return dict(os.environ), f"the multi-process service does not serve: {error}"
    return environment, "processes share the GPU by the multi-process service"


def stop(environment: dict[str, str]) -> None:
    """End the service that `start` began, where it did: not one that was there before."""
    name = "CUDA_MPS_PIPE_DIRECTORY"
    if environment.get(name) != os.environ.get(name):
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for its clients
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=30,
                           env=environment, check=False, capture_output=True)  # fmt: skip
