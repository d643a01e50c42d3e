"""The same training step in JAX: M nets 9-50-1, B=32, Adam, vmapped, 200 steps in one scan.

Run by an interpreter that has JAX; prints seconds per step.
"""

import os
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
import jax
import jax.numpy as jnp

members = int(sys.argv[1])
keys = jax.random.split(jax.random.PRNGKey(0), members)
x = jax.random.normal(jax.random.PRNGKey(1), (455, 9))
y = x.sum(1, keepdims=True)


def init(key):
    a, b = jax.random.split(key)
    return {
        "w1": jax.random.normal(a, (9, 50)) / 3.0, "b1": jnp.zeros(50),
        "w2": jax.random.normal(b, (50, 1)) / 7.0, "b2": jnp.zeros(1),
    }  # fmt: skip


def loss(p, xb, yb):
    f = jnp.maximum(xb @ p["w1"] + p["b1"], 0) @ p["w2"] + p["b2"]
    decay = sum((v * v).sum() for v in p.values()) / (2 * 455)
    return 0.5 * ((f - yb) ** 2).mean() + decay


def step(carry, key):
    p, m, v, t = carry
    index = jax.random.randint(key, (members, 32), 0, 455)
    g = jax.vmap(jax.grad(loss))(p, x[index], y[index])
    t = t + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
    size = 0.005 * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    p = jax.tree.map(lambda p, m, v: p - size * m / (jnp.sqrt(v) + 1e-8), p, m, v)
    return (p, m, v, t), 0.0


@jax.jit
def run(carry, keys):
    return jax.lax.scan(step, carry, keys)[0]


params = jax.vmap(init)(keys)
zeros = jax.tree.map(jnp.zeros_like, params)
carry = (params, zeros, zeros, jnp.zeros(()))
steps = jax.random.split(jax.random.PRNGKey(2), 200)
jax.block_until_ready(run(carry, steps))
times = []
for _ in range(5):
    start = time.perf_counter()
    jax.block_until_ready(run(carry, steps))
    times.append((time.perf_counter() - start) / 200)
print(sorted(times)[2])
