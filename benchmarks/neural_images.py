"""MNIST's pixels as tasks: trainings and scores of `neural_processes.py`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

import doxa
from doxa.data import TaskSampler
from doxa.data.tasks import pixel_tasks, places

PIXELS = 400  # of an image that are looked at in a step
CONTEXTS = (10, 50, 300)
STEP = 14.0  # pixels a unit of x: the points of convcnp's lattice


def mnist_job(name: str, args: argparse.Namespace) -> tuple[Any, TaskSampler]:
    with np.load(args.data / "mnist.npz") as file:
        images = torch.tensor(file["x_train"]).reshape(-1, 28, 28) / 255
    draw = pixel_tasks(images, PIXELS, (3, 300), 1 / STEP)
    settings = {"density": STEP, "kernel": 5} if name == "convcnp" else {}
    return doxa.get_method(name)(**settings), TaskSampler(draw, look=64)


def mnist_scores(posterior: Any, name: str, args: argparse.Namespace) -> dict[str, float]:
    """The log-likelihood of the pixels outside the context, of 512 test images; and a figure."""
    with np.load(args.data / "mnist.npz") as file:
        images = torch.tensor(file["x_test"][:512]).reshape(-1, 784).float() / 255
    count = min(512, args.tasks)
    images = images[:count].to(args.device)
    g = torch.Generator().manual_seed(0)
    order = torch.rand(count, 784, generator=g).argsort(1).argsort(1).to(args.device)
    x = places(28, 28, 1 / STEP).to(args.device).expand(count, -1, -1)
    found, shown = {}, {}
    for size in CONTEXTS:
        mask = (order < size).float()
        seen = mask.unsqueeze(2)
        given = {"context_x": x * seen, "context_y": images.unsqueeze(2) * seen,
                 "context": mask, "target_x": x}  # fmt: skip
        total = 0.0
        for a in range(0, count, 16):
            part = {key: value[a : a + 16] for key, value in given.items()}
            p = posterior.predict(part, n=20)
            logs = p.log_prob(images[a : a + 16].reshape(-1, 1)).reshape(-1, 784)
            out = 1 - mask[a : a + 16]
            total += float(((logs * out).sum(1) / out.sum(1)).sum())
            if a == 0:
                draws = posterior.functions(part, 3) if name == "anp" else p.sample(3)
                spread = p.variance.sqrt()
                shown[size] = [t.reshape(-1, 16, 784).cpu()
                               for t in (mask[:16], p.mean, draws, spread)]  # fmt: skip
        found[str(size)] = total / count
    torch.save({"images": images[:16].cpu(), "shown": shown}, args.out / f"{args.job}.pt")
    return found
