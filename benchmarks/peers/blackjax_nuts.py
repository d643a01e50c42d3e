"""BlackJAX's NUTS with window adaptation, chains under vmap. See `samplers.py`."""

import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
import blackjax
import jax
import jax.numpy as jnp
import problem

settings, arrays, folder = problem.load()
jax.config.update("jax_enable_x64", settings["double"])
data = {k: jnp.asarray(v) for k, v in arrays.items()}
density = problem.DENSITIES[settings["problem"]]
depth = settings["max_depth"]
log_density = lambda u: density(u, data, jnp)  # noqa: E731


def warm(key, start):
    adapt = blackjax.window_adaptation(
        blackjax.nuts, log_density, is_mass_matrix_diagonal=settings["mass"] == "diagonal",
        target_acceptance_rate=settings["target_accept"], max_num_doublings=depth,
        adaptation_info_fn=lambda *_: None,
    )  # fmt: skip
    (state, found), _ = adapt.run(key, start, settings["burn_in"])
    return state, {k: found[k] for k in ("step_size", "inverse_mass_matrix")}


def chain(key, state, found):
    kernel = blackjax.nuts(log_density, **found, max_num_doublings=depth)

    def step(state, key):
        state, info = kernel.step(key, state)
        return state, (state.position, info.num_integration_steps)

    return jax.lax.scan(step, state, jax.random.split(key, settings["draws"]))[1]


def timed(call):
    began = problem.clock()
    out = jax.block_until_ready(call())
    return out, problem.clock() - began


chains = len(arrays["start"])
keys = jax.random.split(jax.random.PRNGKey(settings["seed"]), (2, chains))
first = (keys[0], data["start"])
adapt, compiling = timed(lambda: jax.jit(jax.vmap(warm)).lower(*first).compile())
(state, found), burn_in = timed(lambda: adapt(*first))
second = (keys[1], state, found)
draw, more = timed(lambda: jax.jit(jax.vmap(chain)).lower(*second).compile())
(draws, steps), sampling = timed(lambda: draw(*second))
problem.report(
    folder, draws, package=f"blackjax {blackjax.__version__}", compile=compiling + more,
    burn_in=burn_in, sampling=sampling, gradients=int(steps.max(0).sum()),
    chains_gradients=int(steps.sum()),
)  # fmt: skip
