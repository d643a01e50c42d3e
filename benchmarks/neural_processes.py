"""Neural processes on GP tasks, by the protocol of Nguyen & Grover (2022), and on MNIST's pixels.

All are trained on tasks of the RBF kernel and tested on that and on Matérn-5/2, as in the paper's
code: Adam with a cosine, batches of 16 at 5e-4 over 100,000 steps unless --batch, --rate and
--steps say otherwise; the log-likelihood per target, of latent methods over 50 draws. A job is a
process of its own, and all run side by side. --compile compiles a step before it is captured: half
a minute, and a third of the kernels.

    python -m benchmarks.neural_processes --device cuda --minutes 9 --out results/
    python -m benchmarks.neural_processes --device cuda --minutes 9 --out more/ --resume results/

writes a file JOB.tar.xz for each job: its scores, steps and seconds, the posterior, and where it
was stopped by the clock a checkpoint, from which --resume FOLDER goes on. Images take as many steps
as half the minutes allow. --jobs gp-cnp,mnist-anp picks some. --mps lets the processes share the
GPU at the same time, by NVIDIA's multi-process service, where that starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import doxa
from doxa.data import TaskSampler
from doxa.data.simulated import gp_tasks
from doxa.data.tasks import pixel_tasks, places

GP = ("cnp", "np", "anp", "tnp", "tnpa", "convcnp")
IMAGES = ("cnp", "anp", "convcnp")
JOBS = (*(f"gp-{name}" for name in GP), *(f"mnist-{name}" for name in IMAGES))
PIXELS = 400  # of an image that are looked at in a step
CONTEXTS = (10, 50, 300)
STEP = 14.0  # pixels a unit of x: the points of convcnp's lattice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="all in all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--steps", type=int, default=100_000, help="of images: at most")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--tasks", type=int, default=48_000, help="to test on")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DOXA_DATA", "data")))
    parser.add_argument("--mps", action="store_true", help="share the GPU at the same time")
    parser.add_argument("--resume", type=Path, help="folder that an earlier call wrote")
    parser.add_argument("--job", help="run this one job, in this process")
    parser.add_argument("--compile", action="store_true", help="a step, before it is captured")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.job:
        one(args)
        return
    began = time.monotonic()
    command = [sys.executable, __file__, "--device", args.device, "--out", str(args.out),
               "--minutes", str(args.minutes), "--steps", str(args.steps),
               "--tasks", str(args.tasks), "--data", str(args.data), "--batch", str(args.batch),
               "--rate", str(args.rate), *(["--compile"] if args.compile else [])]  # fmt: skip
    environment, what = start_service() if args.mps else (dict(os.environ), "")
    say(what)
    for job in args.jobs.split(","):
        unpack(args.resume, args.out, job)
    jobs = {
        job: subprocess.Popen([*command, "--job", job], env=environment)
        for job in args.jobs.split(",")
        if not (args.out / f"{job}.json").exists()
    }
    for job, process in jobs.items():
        left = 60 * args.minutes - (time.monotonic() - began)
        try:
            say(f"{job} ended with {process.wait(max(1.0, left))}")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it ends between two steps
            say(f"{job} is stopped: out of time")
    stop_service(environment)
    for job in args.jobs.split(","):
        pack(args.out, job)


def unpack(folder: Path | None, out: Path, job: str) -> None:
    """What an earlier call left of a job: its results, or a checkpoint."""
    if folder is None or not (folder / f"{job}.tar.xz").exists():
        return
    with tarfile.open(folder / f"{job}.tar.xz") as archive:
        archive.extractall(out, filter="data")
    found = out / f"{job}.json"
    if found.exists() and goes_on(found):
        found.unlink()


def goes_on(found: Path) -> bool:
    """Whether a training was stopped by the clock."""
    return bool(json.loads(found.read_text())["status"] == "stopped")


def pack(out: Path, job: str) -> None:
    """What a job wrote as one file: scores and posterior, or a checkpoint if it was stopped."""
    found, kept = out / f"{job}.json", out / f"{job}.checkpoint"
    done = found.exists() and not (goes_on(found) and kept.exists())
    if kept.exists() and not done:
        thin(kept)
    with tarfile.open(out / f"{job}.tar.xz", "w:xz") as archive:
        for path in (found, *((out / job, out / f"{job}.pt") if done else (kept,))):
            if path.exists():
                archive.add(path, path.name)
    for path in (found, kept, out / job, out / f"{job}.pt"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def thin(folder: Path) -> None:
    """Leave the newest checkpoint, whose state serves as its last good state, too: a second copy
    takes no room when compressed."""
    checkpoints = doxa.store.Checkpoints(folder)
    found = checkpoints.latest()
    assert found is not None
    state = {k: v for k, v in found.tensors.items() if k.startswith("state.")}
    good = {k.replace("state.", "good.", 1): v for k, v in state.items()}
    checkpoints.save(found.step, found.tensors | good, found.meta)
    for old in sorted(folder.iterdir())[:-1]:
        shutil.rmtree(old)


def say(text: str) -> None:
    sys.stdout.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
    sys.stdout.flush()


def one(args: argparse.Namespace) -> None:
    """One job: train, save, evaluate."""
    began = time.monotonic()
    torch.set_num_threads(1)
    kind, _, name = args.job.partition("-")
    method, data = (gp_job if kind == "gp" else mnist_job)(name, args)
    options: dict[str, Any] = {
        "device": args.device, "dtype": torch.float32, "batch_size": args.batch, "lr": args.rate,
        "progress": False,
    }  # fmt: skip
    if args.compile:
        options["engine"] = "stack:compiled-graph"
    steps, limit = args.steps, began + 60 * args.minutes - 60
    kept = args.out / f"{args.job}.checkpoint" if kind == "gp" else None
    if kept is None:
        seconds = 30 * args.minutes
        each = measured(data, method, options)
        steps = int(min(steps, max(10, (0.78 * seconds - (time.monotonic() - began)) / each)))
        limit = began + 0.84 * seconds
    say(f"{args.job}: {steps} steps")

    def report(step: int, info: dict[str, Any]) -> bool:
        if step % max(1, steps // 20) < max(10, steps // 100):
            say(f"{args.job}: step {step}, loss {info['loss'][0]:.3f}")
        return time.monotonic() > limit

    posterior = doxa.fit(
        None, data, method, steps=steps, callbacks=[report],
        checkpoint=kept, checkpoint_every=10.0, **options,
    )  # fmt: skip
    posterior.save(args.out / args.job)
    scores = (gp_scores if kind == "gp" else mnist_scores)(posterior, name, args)
    taken, mode = posterior.diagnostics["steps"], posterior.diagnostics["mode"]
    result = {"job": args.job, "steps": taken, "asked": steps, "batch": args.batch,
              "rate": args.rate, "mode": mode, "scores": scores,
              "seconds": time.monotonic() - began, "status": str(posterior.status)}  # fmt: skip
    (args.out / f"{args.job}.json").write_text(json.dumps(result, indent=1))
    say(json.dumps(result))


def measured(data: TaskSampler, method: Any, options: dict[str, Any]) -> float:
    """Seconds per step."""
    ends: list[float] = []
    tick = lambda *_: ends.append(time.monotonic())  # noqa: E731
    doxa.fit(None, data, method, steps=400, callbacks=[tick], **options)
    return 2 * (ends[-1] - ends[len(ends) // 2]) / 400  # the first half also loads kernels


def gp_job(name: str, args: argparse.Namespace) -> tuple[Any, TaskSampler]:
    method = doxa.TNP(mode="autoregressive") if name == "tnpa" else doxa.get_method(name)()
    return method, TaskSampler(gp_tasks("rbf"))


def gp_scores(posterior: Any, name: str, args: argparse.Namespace) -> dict[str, float]:
    """The mean log-likelihood of a target: over each task's targets, then over tasks; of an
    autoregressive network given the targets before it."""
    block, found = min(256, args.tasks), {}
    for kernel in ("rbf", "matern"):
        tasks, total, done = TaskSampler(gp_tasks(kernel), seed=1), 0.0, 0
        while done < args.tasks:
            place = torch.device(args.device)
            x, y, context, targets = tasks.drawn(("judged", done), block, place)
            seen = context.unsqueeze(2)
            given = {"context_x": x * seen, "context_y": y * seen, "context": context,
                     "target_x": x, "targets": targets}  # fmt: skip
            if name == "tnpa":
                logs = posterior.joint_log_prob(given, y)
            else:
                p = posterior.predict(given, n=50)
                each = p.log_prob(y.reshape(-1, 1).to(posterior.dtype)).reshape(targets.shape)
                logs = (each * targets).sum(1)
            total += float((logs / targets.sum(1)).sum())
            done += block
        found[kernel] = total / done
    return found


def mnist_job(name: str, args: argparse.Namespace) -> tuple[Any, TaskSampler]:
    with np.load(args.data / "mnist.npz") as file:
        images = torch.tensor(file["x_train"]).reshape(-1, 28, 28) / 255
    draw = pixel_tasks(images, PIXELS, (3, 300), 1 / STEP)
    settings = {"density": STEP, "kernel_size": 5} if name == "convcnp" else {}
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


def start_service() -> tuple[dict[str, str], str]:
    """Start NVIDIA's multi-process service, by which several processes use one GPU at once; the
    environment of its clients, or ours where a trial with it fails, and what happened. A client
    that faults, or is killed while its kernels run, takes the others with it."""
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
        stop_service(environment)
        return dict(os.environ), f"the multi-process service does not serve: {error}"
    return environment, "processes share the GPU by the multi-process service"


def stop_service(environment: dict[str, str]) -> None:
    """End the service that `start_service` began, where it did: not one that was there before."""
    name = "CUDA_MPS_PIPE_DIRECTORY"
    if environment.get(name) != os.environ.get(name):
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for its clients
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=30,
                           env=environment, check=False, capture_output=True)  # fmt: skip


if __name__ == "__main__":
    main()
