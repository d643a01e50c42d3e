"""posteriors' SGLD and SGHMC: seconds per step. Run by an interpreter that has posteriors, with the
net, the batch size and the number of steps as arguments: see `sg_steps.py`."""

import itertools
import json
import statistics
import sys

import posteriors
import torch
from problem import clock
from torch import nn

torch.set_num_threads(1)
widths, batch, steps = [int(w) for w in sys.argv[1].split("-")], int(sys.argv[2]), int(sys.argv[3])
layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())][:-1]
net = nn.Sequential(*layers)
x = torch.randn(2048, widths[0])
y = x[:, : widths[-1]].clone() if widths[-1] > 1 else x.sum(1, keepdim=True)


def log_posterior(params, rows):
    out = torch.func.functional_call(net, params, (rows[0],))
    fit = -0.5 * (out - rows[1]).square().sum(1).mean() * len(x)
    prior = -0.5 * sum(p.square().sum() for p in params.values())
    return fit + prior, torch.tensor([])


def seconds(transform):
    params = {k: v.detach().clone() for k, v in net.named_parameters()}
    state, marks, part = transform.init(params), [], steps // 10
    for t, index in enumerate(torch.randint(len(x), (steps, batch))):
        if t % part == 0:
            marks.append(clock())
        state, _ = transform.update(state, (x[index], y[index]), inplace=True)
    return statistics.median(b - a for a, b in itertools.pairwise(marks)) / part


sgld = posteriors.sgmcmc.sgld.build(log_posterior, lr=1e-9)
sghmc = posteriors.sgmcmc.sghmc.build(log_posterior, lr=1e-9, alpha=0.1)
print(json.dumps({"posteriors sgld": seconds(sgld), "posteriors sghmc": seconds(sghmc)}))
