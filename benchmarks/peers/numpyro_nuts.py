"""NumPyro's NUTS, chains vectorised. Run by an interpreter that has NumPyro: see `samplers.py`.

Its kernel is scanned over inside functions that are compiled beforehand, so that compilation and
sampling can be timed separately: `MCMC.run` mixes the two.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
import jax
import jax.numpy as jnp
import numpyro
import problem

settings, arrays, folder = problem.load()
jax.config.update("jax_enable_x64", settings["double"])
data = {k: jnp.asarray(v) for k, v in arrays.items()}
density = problem.DENSITIES[settings["problem"]]
kernel = numpyro.infer.NUTS(
    potential_fn=lambda u: -density(u, data, jnp), dense_mass=settings["mass"] == "dense",
    target_accept_prob=settings["target_accept"], max_tree_depth=settings["max_depth"],
)  # fmt: skip


def timed(call):
    began = problem.clock()
    out = jax.block_until_ready(call())
    return out, problem.clock() - began


def scan(length):
    def step(state, _):
        state = kernel.sample(state, (), {})
        return state, (state.z, state.num_steps)

    return jax.jit(lambda state: jax.lax.scan(step, state, None, length=length))


keys = jax.random.split(jax.random.PRNGKey(settings["seed"]), len(arrays["start"]))
state, started = timed(
    lambda: kernel.init(keys, settings["burn_in"], data["start"], model_args=(), model_kwargs={})
)
warm, compiling = timed(lambda: scan(settings["burn_in"]).lower(state).compile())
(state, _), burn_in = timed(lambda: warm(state))
draw, more = timed(lambda: scan(settings["draws"]).lower(state).compile())
(_, (draws, steps)), sampling = timed(lambda: draw(state))
problem.report(
    folder, draws.swapaxes(0, 1), package=f"numpyro {numpyro.__version__}",
    compile=started + compiling + more, burn_in=burn_in, sampling=sampling,
    gradients=int(steps.max(1).sum()), chains_gradients=int(steps.sum()),
)  # fmt: skip
