"""The table of methods. Listing them imports none of their modules.

A method is added by a `Row` in the tuple of its family, or from another package through the
entry-point group "doxa.methods", whose entries point at a `Row`. Everything that lists methods
reads this table: the names in `doxa`, the command line, the panels of the demo, the table in the
README, the benchmarks and the tests.

`ROWS` has the order of the demo and of the README:

    EXACT         exact linear models
    FUNCTION      Gaussian processes and other priors over functions
    NEURAL        neural processes, trained on many tasks
    ENSEMBLE      point estimates and ensembles
    VARIATIONAL   variational methods
    LAPLACE       the Laplace approximation
    MCMC          Markov chain Monte Carlo, on all rows or on mini-batches

`MethodTable` is what `doxa.methods()` returns; `get_method` imports the class of a method.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any

from doxa import store
from doxa.errors import MethodError, MissingExtra, did_you_mean
from doxa.likelihoods import LIKELIHOODS, Heads, Likelihood, NoiseScale
from doxa.priors import PRIORS


@dataclass(frozen=True)
class Demo:
    """The panel of a method in the demo.

    Attributes
    ----------
    note : str
        A note beside the name.
    settings : dict
        Arguments of the method.
    options : dict
        Options of `fit`.
    hidden : tuple of int
        Hidden widths of the network, if the network of the demo does not suit the method.
    left_out : str
        Why the method has no panel. Empty if it has one.
    """

    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    hidden: tuple[int, ...] = ()
    left_out: str = ""


@dataclass(frozen=True)
class Row:
    """One method of the table.

    Attributes
    ----------
    name : str
        Registered name.
    target : str
        Where its class is: "module:Class".
    family : str
        Family, as in the tables of the documentation.
    summary : str
        What it is, in one line.
    paper : str
        Authors and year of its papers.
    needs : str
        What it needs: a kind of network, gradients, a number of rows.
    cost : str
        Cost, in multiples of one MAP fit.
    tasks : tuple of str
        "regression", "classification" or "tasks".
    extra : str, optional
        The optional dependency that it needs.
    gives : str
        What one gets from it, in a few words: the last column of the table in the README.
    short : dict
        Settings that make it fast, for tests and first trials. Do not rely on such a posterior.
    demo : Demo
        Its panel in the demo. By default it runs with the defaults of the method.
    docs : str
        The page under docs/ that describes it.
    evidence : bool
        Whether its posterior has a `log_evidence`.
    elbo : bool
        Whether its posterior has a lower bound on the evidence.
    shares : str
        What several processes can divide: "members", "rows", "both" or "none"; as the class says
        (`Method.shares`).
    """

    name: str
    target: str
    family: str
    summary: str
    paper: str
    needs: str
    cost: str
    tasks: tuple[str, ...] = ("regression", "classification")
    extra: str | None = None
    _: KW_ONLY
    gives: str = ""
    short: Mapping[str, Any] = field(default_factory=dict, hash=False)
    demo: Demo = Demo()
    docs: str = ""
    evidence: bool = False
    elbo: bool = False
    shares: str = "members"

    @property
    def streams(self) -> str:
        """How it reads a stream (`doxa.data.Stream`): "batches", "passes" or "", if it does not.
        Imports the class."""
        return get_method(self.name).streams or ""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def class_name(self) -> str:
        return self.target.partition(":")[2]


class MethodTable:
    """The result of `doxa.methods()`: rows to iterate over, and a table when printed."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str | int) -> Row:
        if isinstance(name, int):
            return self._rows[name]
        for row in self._rows:
            if row.name == name:
                return row
        names = [row.name for row in self._rows]
        raise MethodError(
            f"no method named {name!r}{did_you_mean(name, names)}; doxa.methods() and the command "
            "`doxa methods` list all"
        )

    def __repr__(self) -> str:
        columns = [("method", "name"), ("family", "family"), ("what it is", "summary"),
                   ("cost (MAP = 1)", "cost"), ("processes share", "shares"),
                   ("paper", "paper")]  # fmt: skip
        cells = [[title for title, _ in columns]]
        cells += [[str(getattr(row, key)) for _, key in columns] for row in self]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        return "\n".join(line.rstrip() for line in lines)

    def markdown(self) -> str:
        """Return the table of the README, one line per method."""
        lines = ["| method | what it is | cost, one MAP fit = 1 | gives |", "|---|---|---|---|"]
        lines += [f"| `{row.name}` | {row.summary} | {row.cost} | {row.gives} |" for row in self]
        return "\n".join(lines)

    _repr_markdown_ = markdown  # in a notebook


EXACT = (
    Row("linear", "doxa.exact.linear:BayesianLinear", "exact",
        "Bayesian linear regression on features: exact posterior, predictive and evidence",
        "Bishop 2006, ch. 3; MacKay 1992", "features (or none: the inputs)", "≪ 1",
        ("regression",),
        gives="evidence, a posterior over models",
        demo=Demo("50 Fourier features, exact", {"features": "fourier"}),
        docs="methods.md", shares="rows", evidence=True),
)  # fmt: skip


ENSEMBLE = (
    Row("map", "doxa.ensemble.map:MAP", "point",
        "The maximum of the log joint: regularised training",
        "MacKay 1992", "any network", "1",
        gives="a baseline",
        demo=Demo("one point", options={"steps": 2000}),
        docs="methods.md"),
    Row("deep-ensemble", "doxa.ensemble.deep:DeepEnsemble", "ensemble",
        "Several MAP fits from different starts, averaged",
        "Lakshminarayanan et al. 2017", "any network", "members × 1, stacked",
        gives="the strongest simple default",
        demo=Demo("10 members", options={"steps": 1500, "members": 10}),
        docs="methods.md"),
    Row("bootstrap", "doxa.ensemble.bootstrap:BayesianBootstrap", "ensemble",
        "MAP fits under random Dirichlet weights of the rows, averaged",
        "Rubin 1981; Newton & Raftery 1994", "any network", "members × 1, stacked",
        gives="an ensemble with uncertainty about the rows, too",
        demo=Demo("10 members", options={"steps": 1500, "members": 10}),
        docs="methods.md"),
    Row("batch-ensemble", "doxa.ensemble.batch:BatchEnsemble", "ensemble",
        "Networks that share their weights but for rank-one factors in every layer",
        "Wen, Tran & Ba 2020", "linear or convolutional layers", "1–2",
        gives="several networks in the memory of one",
        short={"components": 2},
        demo=Demo("4 components", options={"steps": 4000}),
        docs="methods.md"),
    Row("swa", "doxa.ensemble.swa:SWA", "point",
        "The mean of the points that SGD visits at a constant or cyclic rate",
        "Izmailov et al. 2018", "any network", "1 + one pass",
        gives="a point in a wider optimum than MAP's",
        short={"cycle": 2},
        demo=Demo("one point", options={"steps": 2000}),
        docs="methods.md"),
    Row("swag", "doxa.ensemble.swag:SWAG", "ensemble",
        "A Gaussian around the mean of the points that SGD visits, low rank plus diagonal",
        "Maddox et al. 2019", "any network", "1 + one pass",
        gives="a posterior from training as it is; with members, MultiSWAG",
        short={"cycle": 1, "average": 0.5, "rank": 0, "samples": 3},
        demo=Demo("4 members", options={"steps": 3000, "members": 4}),
        docs="methods.md"),
    Row("snapshot", "doxa.ensemble.snapshot:SnapshotEnsemble", "ensemble",
        "Networks at the ends of the cycles of one training run, averaged",
        "Huang et al. 2017", "any network", "1",
        gives="an ensemble for the price of one network",
        short={"snapshots": 2},
        demo=Demo("5 cycles", options={"steps": 5000}),
        docs="methods.md"),
    Row("svgd", "doxa.ensemble.svgd:SVGD", "ensemble",
        "Particles that climb the posterior and repel each other (Stein variational descent)",
        "Liu & Wang 2016", "any network", "particles × 1, stacked",
        gives="an ensemble whose members repel each other",
        short={"particles": 4},
        demo=Demo("20 particles", options={"steps": 1500}),
        docs="methods.md"),
)  # fmt: skip


VARIATIONAL = (
    Row("mc-dropout", "doxa.vi.mc_dropout:MCDropout", "variational",
        "Dropout kept on at prediction, as variational inference",
        "Gal & Ghahramani 2016", "dropout layers, or inserts them", "1",
        gives="uncertainty from a net you have",
        demo=Demo("p = 0.05", {"p": 0.05}, {"steps": 3000}),
        docs="methods.md"),
    Row("concrete-dropout", "doxa.vi.concrete_dropout:ConcreteDropout", "variational",
        "MC dropout that learns the probability to drop, one per layer",
        "Gal, Hron & Kendall 2017", "dropout layers, or inserts them", "1–2",
        gives="dropout without a grid over p",
        demo=Demo("p learned", options={"steps": 4000}),
        docs="methods.md"),
    # The demo uses a small network: with 2,700 weights and 100 rows the bound leaves nearly all
    # weights at the prior. It holds no rows out, since early stopping would end the fit before the
    # bound is at its maximum. The same holds for low rank.
    Row("mean-field", "doxa.vi.mean_field:MeanField", "variational",
        "A factorised Gaussian over the weights by stochastic ELBO ascent (Bayes by Backprop)",
        "Blundell et al. 2015", "any network", "1.5–2",
        gives="a bound on the evidence (ELBO)",
        demo=Demo("T = 1, only 10 hidden units", options={"validation": None}, hidden=(10,)),
        docs="methods.md", elbo=True),
    Row("low-rank-vi", "doxa.vi.low_rank:LowRankVI", "variational",
        "A Gaussian of low rank plus a diagonal over the weights, by stochastic ELBO ascent",
        "Ong, Nott & Smith 2018", "any network", "4–6",
        gives="mean-field with correlations, and a tighter bound",
        short={"rank": 2, "samples": 1},
        demo=Demo("rank 10, 10 hidden units", options={"validation": None}, hidden=(10,)),
        docs="methods.md", elbo=True),
    Row("last-layer-vi", "doxa.vi.last_layer:LastLayerVI", "variational",
        "A full Gaussian over the last layer, its features learned on the same bound",
        "Snoek et al. 2015; Harrison et al. 2024", "a linear last layer", "1–2",
        gives="an exact last layer, and a bound (ELBO)",
        short={"samples": 1},
        demo=Demo("full covariance", options={"steps": 4000}),
        docs="methods.md", elbo=True),
    Row("flow-vi", "doxa.vi.flow:FlowVI", "variational",
        "A normalising flow over the last layer, or a subset of the weights, by ELBO ascent",
        "Rezende & Mohamed 2015; Durkan et al. 2019", "up to 2,000 weights in the subset", "10–20",
        extra="flows",
        gives="a q of any shape over a few weights, and a bound (ELBO)",
        short={"samples": 1, "flow_length": 1, "flow_width": 4, "elbo_samples": 2},
        demo=Demo("splines on the last layer", options={"steps": 2500}),
        docs="methods.md", elbo=True),
    Row("mnf", "doxa.vi.mnf:MNF", "variational",
        "Gaussian weights whose means a flow's noise multiplies, by stochastic ELBO ascent",
        "Louizos & Welling 2017", "linear and convolutional layers", "10–20",
        gives="mean-field with noise that weights share, and a bound (ELBO)",
        short={"flow_length": 1, "flow_width": 4, "elbo_samples": 2},
        demo=Demo("flows of length 2, 10 hidden units",
                  options={"validation": None, "steps": 2500}, hidden=(10,)),
        docs="methods.md", elbo=True),
    Row("rank1", "doxa.vi.rank1:Rank1", "variational",
        "Point weights, and normal rank-one factors in every layer: a mixture of them",
        "Dusenberry et al. 2020", "linear or convolutional layers", "3–5",
        gives="a batch ensemble whose components are uncertain, too",
        short={"components": 2},
        demo=Demo("4 components", options={"steps": 4000}),
        docs="methods.md", elbo=True),
    Row("ivon", "doxa.vi.ivon:IVON", "variational",
        "A factorised Gaussian over the weights by natural-gradient steps (online Newton)",
        "Shen et al. 2024", "any network; a Gaussian prior", "1.2–1.4",
        gives="mean-field at the price of Adam, and a bound (ELBO)",
        demo=Demo("T = 1, only 10 hidden units", options={"validation": None}, hidden=(10,)),
        docs="methods.md", elbo=True),
)  # fmt: skip


LAPLACE = (
    Row("laplace", "doxa.laplace.laplace:Laplace", "laplace",
        "A Gaussian at the MAP from the generalised Gauss–Newton matrix; gives evidence",
        "MacKay 1992; Daxberger et al. 2021; Immer et al. 2021",
        "any network; by default exact up to 2,000 weights or rows, then Kronecker",
        "1 + one pass",
        gives="evidence, uncertainty after training",
        demo=Demo("full, linearised", {"structure": "full"}, {"steps": 2000}),
        docs="methods.md", shares="both", evidence=True),
)  # fmt: skip


MCMC = (
    Row("hmc", "doxa.mcmc.hmc:HMC", "mcmc",
        "Hamiltonian Monte Carlo on the full data, step size and mass adapted",
        "Neal 2011; Hoffman & Gelman 2014", "full-batch gradients", "10³ gradients and more",
        gives="the reference, for small nets and data",
        short={"draws": 20, "burn_in": 20, "leapfrog": 5},
        demo=Demo("4 chains", {"draws": 200, "burn_in": 300, "leapfrog": 50}, {"members": 4}),
        docs="sampling.md", shares="both"),
    Row("nuts", "doxa.mcmc.nuts:NUTS", "mcmc",
        "The no-U-turn sampler: HMC that finds its own trajectory length",
        "Hoffman & Gelman 2014; Betancourt 2017", "full-batch gradients",
        "10³ gradients and more",
        gives="the reference without tuning",
        short={"draws": 20, "burn_in": 20, "max_depth": 2},
        demo=Demo("4 chains, trees of 2^6", {"draws": 100, "burn_in": 150, "max_depth": 6}),
        docs="sampling.md", shares="both"),
    Row("mala", "doxa.mcmc.mala:MALA", "mcmc",
        "Langevin steps with an acceptance test, step size and mass adapted",
        "Besag 1994; Roberts & Tweedie 1996", "full-batch gradients", "10⁴ gradients and more",
        gives="exact draws by the plainest gradient step",
        short={"draws": 20, "burn_in": 20},
        demo=Demo("4 chains", {"draws": 2000, "burn_in": 2000, "thin": 10}, {"members": 4}),
        docs="sampling.md", shares="both"),
    Row("metropolis", "doxa.mcmc.metropolis:Metropolis", "mcmc",
        "Random-walk Metropolis on the full data, its proposal learned in burn-in",
        "Metropolis et al. 1953; Haario et al. 2001", "a few dozen parameters at most",
        "10⁴ evaluations and more",
        gives="draws of a few parameters, without gradients",
        short={"draws": 20, "burn_in": 20},
        demo=Demo(left_out="a random walk does not get around in 2,700 dimensions"),
        docs="sampling.md", shares="both"),
    Row("sghmc", "doxa.mcmc.sghmc:SGHMC", "mcmc",
        "Stochastic gradient Hamiltonian Monte Carlo: momentum SGD with friction's noise",
        "Chen, Fox & Guestrin 2014", "mini-batch gradients", "1–3",
        gives="draws on large data, with a bias that shrinks with the step",
        short={"draws": 20, "burn_in": 20, "thin": 1, "step_size": 2e-4},
        demo=Demo("4 chains", {"burn_in": 3000, "thin": 20}),
        docs="stochastic_gradients.md"),
    Row("sgnht", "doxa.mcmc.sgnht:SGNHT", "mcmc",
        "Stochastic gradient Nosé–Hoover thermostat: momentum whose friction follows the noise",
        "Ding et al. 2014", "mini-batch gradients", "1–3",
        gives="draws on large data by small batches, whose noise does not heat the chain",
        short={"draws": 20, "burn_in": 20, "thin": 1, "step_size": 2e-4},
        demo=Demo("4 chains", {"burn_in": 3000, "thin": 20}),
        docs="stochastic_gradients.md"),
    Row("sgld", "doxa.mcmc.sgld:SGLD", "mcmc",
        "Stochastic gradient Langevin dynamics: SGD with a falling rate and Gaussian noise",
        "Welling & Teh 2011", "mini-batch gradients", "1–3",
        gives="draws on large data, by the plainest step",
        short={"draws": 20, "burn_in": 20, "thin": 1, "step_size": 2e-4},
        demo=Demo("4 chains", {"burn_in": 6000, "thin": 40}),
        docs="stochastic_gradients.md"),
    Row("psgld", "doxa.mcmc.psgld:PSGLD", "mcmc",
        "Langevin dynamics with RMSprop's step sizes, one per weight",
        "Li et al. 2016", "mini-batch gradients", "1–3",
        gives="draws on large data, where curvatures differ",
        short={"draws": 20, "burn_in": 20, "thin": 1, "step_size": 2e-5},
        demo=Demo("4 chains", {"burn_in": 6000, "thin": 40}),
        docs="stochastic_gradients.md"),
    Row("cyclical", "doxa.mcmc.cyclical:CyclicalSGMCMC", "mcmc",
        "SGLD or SGHMC under a cyclical step size: several modes with one chain",
        "Zhang et al. 2020", "mini-batch gradients", "2–5",
        gives="draws from several modes",
        short={"cycles": 2, "draws": 10, "thin": 1, "exploration": 0.5, "step_size": 2e-4},
        demo=Demo("4 chains, 4 cycles"),
        docs="stochastic_gradients.md"),
    Row("constant-sgd", "doxa.mcmc.constant_sgd:ConstantSGD", "mcmc",
        "Constant-rate SGD around the optimum, its rate chosen to come closest to the posterior",
        "Mandt, Hoffman & Blei 2017", "mini-batch gradients", "2",
        gives="what SGD's own noise is worth as a posterior",
        short={"draws": 20, "burn_in": 10, "thin": 1, "probes": 10},
        demo=Demo("4 chains, B = 16", {"thin": 20}, {"steps": 2000, "batch_size": 16}),
        docs="stochastic_gradients.md"),
    Row("minibatch-mh", "doxa.mcmc.minibatch_mh:MinibatchMH", "mcmc",
        "Metropolis–Hastings with the acceptance on a mini-batch: approximate, biased",
        "Korattikara et al. 2014; Bardenet et al. 2017", "small networks", "5–10",
        gives="a look at the bias of accepting on part of the rows",
        short={"draws": 20, "burn_in": 20, "thin": 1},
        demo=Demo(left_out="a random walk does not get around in 2,700 dimensions"),
        docs="stochastic_gradients.md"),
)  # fmt: skip


FUNCTION = (
    Row("gp", "doxa.function.gp:GP", "process",
        "Exact Gaussian-process regression, hyper-parameters by marginal likelihood",
        "Rasmussen & Williams 2006", "no network; up to ~10,000 rows", "N³",
        ("regression",),
        gives="evidence, no network",
        demo=Demo("RBF kernel, exact"),
        docs="processes.md", shares="none", evidence=True),
    Row("nngp", "doxa.function.wide.nngp:NNGP", "process",
        "Exact inference in an infinitely wide network: a GP with the architecture's kernel",
        "Lee et al. 2018", "no network, or one to read off; up to ~10,000 rows", "N³",
        gives="evidence, nothing is trained",
        short={"depth": 1},
        demo=Demo("2 hidden layers, ReLU"),
        docs="infinite_width.md", shares="none", evidence=True),
    Row("ntk", "doxa.function.wide.ntk:NTK", "process",
        "An ensemble of infinitely wide networks after gradient descent",
        "Lee et al. 2019", "no network, one to read off, or any as it starts; up to ~5,000 rows",
        "N³",
        gives="the limit of a deep ensemble, at any training time",
        short={"depth": 1},
        demo=Demo("2 hidden layers, ReLU"),
        docs="infinite_width.md", shares="none"),
    Row("sparse-gp", "doxa.function.sparse:SparseGP", "process",
        "Gaussian process through inducing points, mini-batches, any likelihood (SVGP)",
        "Titsias 2009; Hensman et al. 2013, 2015", "no network; any number of rows",
        "Z³ + BZ² a step", ("regression", "classification"),
        gives="bound, classes, streams", short={"inducing": 8},
        demo=Demo("RBF kernel, 20 inducing points", {"inducing": 20}, {"steps": 400}),
        docs="sparse.md", shares="rows", elbo=True),
    Row("deep-gp", "doxa.function.deep_gp:DeepGP", "process",
        "Layers of Gaussian processes, doubly stochastic variational inference",
        "Salimbeni & Deisenroth 2017", "no network; any number of rows",
        "L·(Z³ + BZ²) a step", ("regression", "classification"),
        gives="bound, functions that a GP cannot have", short={"inducing": 6},
        demo=Demo("2 layers, 20 inducing points", {"inducing": 20}, {"steps": 800}),
        docs="sparse.md", shares="none", elbo=True),
    Row("fbnn", "doxa.function.functional_vi:FunctionalVI", "variational",
        "A network's functions held to a prior over functions, by spectral Stein gradients",
        "Sun, Zhang, Shi & Grosse 2019", "any network; real inputs for a GP prior", "50–100",
        gives="a network with a kernel, or any sampler of functions, as its prior",
        short={"samples": 6, "measured_rows": 5, "extra_points": 3, "prior_steps": 2},
        demo=Demo("GP prior, RBF kernel", {"samples": 32}, {"steps": 600, "validation": None}),
        docs="functional.md"),
    Row("vip", "doxa.function.implicit_process:ImplicitProcess", "variational",
        "A Gaussian process moment-matched to a network's prior functions, which are learned",
        "Ma, Li & Hernández-Lobato 2019", "any network; or a sampler of functions", "10–20",
        gives="closed-form predictions from a prior that is learned",
        short={"functions": 4, "samples": 2},
        demo=Demo("20 functions, α = ½", options={"steps": 2000}),
        docs="functional.md"),
    Row("functional-prior", "doxa.function.functional_prior:FunctionalPrior", "mcmc",
        "SGHMC under a prior over weights that is tuned to a Gaussian process first",
        "Tran et al. 2022", "mini-batch gradients; x as one array of numbers", "2–5",
        gives="draws under a prior one can argue for: of functions",
        short={"draws": 20, "burn_in": 20, "thin": 1, "step_size": 2e-4, "prior_steps": 3,
               "functions": 8, "points": 6},
        demo=Demo("4 chains, RBF", {"burn_in": 3000, "thin": 20}),
        docs="functional_priors.md", shares="none"),
)  # fmt: skip


_NEEDS = "tasks: many small data sets of a kind; no network"
_LEFT_OUT = Demo(left_out="it learns from tasks, and the demo has one data set")
_TINY = {"width": 8, "depth": 1}

NEURAL = (
    Row("cnp", "doxa.neural.cnp:CNP", "neural process",
        "Conditional neural process: the mean of an encoded context",
        "Garnelo et al. 2018a", _NEEDS, "own training",
        ("tasks",), gives="a new task in one pass, no training", short=_TINY, demo=_LEFT_OUT,
        docs="neural_processes.md", shares="none"),
    Row("np", "doxa.neural.np:NeuralProcess", "neural process",
        "Neural process: a latent variable draws whole functions",
        "Garnelo et al. 2018b", _NEEDS, "own training",
        ("tasks",), gives="a new task in one pass, function draws", short=_TINY, demo=_LEFT_OUT,
        docs="neural_processes.md", shares="none"),
    Row("anp", "doxa.neural.anp:AttentiveNP", "neural process",
        "Attentive neural process: targets attend to the context",
        "Kim et al. 2019", _NEEDS, "own training",
        ("tasks",), gives="the same, closer to the context", short=_TINY | {"heads": 2},
        demo=_LEFT_OUT, docs="neural_processes.md", shares="none"),
    Row("tnp", "doxa.neural.tnp:TNP", "neural process",
        "Transformer neural process, point by point or autoregressive",
        "Nguyen & Grover 2022", _NEEDS, "own training",
        ("tasks",), gives="the sharpest of them; joint draws",
        short=_TINY | {"heads": 2, "layers": 1}, demo=_LEFT_OUT, docs="neural_processes.md",
        shares="none"),
    Row("convcnp", "doxa.neural.convcnp:ConvCNP", "neural process",
        "Convolutional conditional neural process: a CNN on a lattice, one or two inputs",
        "Gordon et al. 2020", _NEEDS, "own training",
        ("tasks",), gives="answers that shift with the data; images",
        short={"width": 8, "layers": 1, "kernel_size": 3, "density": 4.0}, demo=_LEFT_OUT,
        docs="neural_processes.md", shares="none"),
)  # fmt: skip


__all__ = ["ROWS", "Demo", "MethodTable", "Row", "get_method", "import_all", "methods"]


# The demo panels were chosen by hand on seeds 0 to 4, with lengths such that all of them together
# take a few minutes. The curve was made easier after poor results on the first draw (seeds 11, 12),
# and other draws are shown. The demo is an illustration, not a comparison. Wide ReLU networks were
# tried: the members of their ensembles are the same straight line in the gap (a spread of 0.06,
# against 0.20 with tanh).
ROWS = (
    *EXACT,
    *FUNCTION,
    *NEURAL,
    *ENSEMBLE,
    *VARIATIONAL,
    *LAPLACE,
    *MCMC,
)


@cache
def _rows() -> tuple[Row, ...]:
    from importlib.metadata import entry_points

    plugins = [entry.load() for entry in entry_points(group="doxa.methods")]
    return (*ROWS, *plugins)


def methods() -> MethodTable:
    """Return the table of methods: name, family, paper, needs and cost.

    Returns
    -------
    MethodTable
        Rows to iterate over or to look up by name.
    """
    return MethodTable(list(_rows()))


@cache
def get_method(name: str) -> type[Any]:
    """Return the class of a method by its name.

    Parameters
    ----------
    name : str
        Registered name of the method.

    Returns
    -------
    type
        The class.

    Raises
    ------
    MethodError
        If no method has this name.
    MissingExtra
        If the method needs an optional dependency that is not installed.
    """
    row = methods()[name]
    try:
        return getattr(importlib.import_module(row.module), row.class_name)
    except ImportError as error:
        if row.extra is None:
            raise
        raise MissingExtra(
            f"method {name!r} needs the extra {row.extra!r}: pip install 'doxa[{row.extra}]'"
        ) from error


def import_all() -> None:
    """Import every method that can be imported, so that all kinds of posterior are registered."""
    for row in methods():
        try:
            get_method(row.name)
        except MissingExtra:
            continue


# Transforms of a predictive, registered by name: a saved one loads before `doxa.evaluate` is
# imported.
TRANSFORMS = {
    "recalibrate.temperature": "doxa.evaluate.recalibrate:Temperature",
    "recalibrate.vector": "doxa.evaluate.recalibrate:Vector",
    "recalibrate.dirichlet": "doxa.evaluate.recalibrate:Dirichlet",
    "recalibrate.isotonic": "doxa.evaluate.recalibrate:Isotonic",
    "recalibrate.histogram": "doxa.evaluate.recalibrate:Histogram",
    "recalibrate.quantile": "doxa.evaluate.recalibrate:Quantile",
    "recalibrate.variance": "doxa.evaluate.recalibrate:Variance",
    "conformal.interval": "doxa.evaluate.conformal:Interval",
    "conformal.sets": "doxa.evaluate.conformal:Sets",
    "conformal.groups": "doxa.evaluate.conformal:Groups",
    "conformal.jackknife+": "doxa.evaluate.conformal:JackknifePlus",
}

for _row in ROWS:
    store.register_lazily(_row.name, _row.target)
for _name, _target in TRANSFORMS.items():
    store.register_lazily(_name, _target)
_likelihoods: list[type[Likelihood]] = [*LIKELIHOODS.values(), Heads]
for _likelihood in _likelihoods:
    store.register(f"likelihood.{_likelihood.name}")(_likelihood)
store.register("noise-scale")(NoiseScale)
for _prior in PRIORS.values():
    store.register(f"prior.{_prior.name}")(_prior)
