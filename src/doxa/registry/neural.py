"""Neural processes: networks that have learned to learn, from tasks."""

from doxa.registry.row import Demo, Row

_NEEDS = "tasks: many small data sets of a kind; no network"
_LEFT_OUT = Demo(left_out="it learns from tasks, and the demo has one data set")
_TINY = {"width": 8, "depth": 1}

ROWS = (
    Row("cnp", "doxa.neural.cnp:CNP", "neural process",
        "Conditional neural process: the mean of an encoded context",
        "Garnelo et al. 2018a", _NEEDS, "own training",
        ("tasks",), gives="a new task in one pass, no training", short=_TINY, demo=_LEFT_OUT,
        docs="neural_processes.md"),
    Row("np", "doxa.neural.np:NeuralProcess", "neural process",
        "Neural process: a latent variable draws whole functions",
        "Garnelo et al. 2018b", _NEEDS, "own training",
        ("tasks",), gives="a new task in one pass, function draws", short=_TINY, demo=_LEFT_OUT,
        docs="neural_processes.md"),
    Row("anp", "doxa.neural.anp:AttentiveNP", "neural process",
        "Attentive neural process: targets attend to the context",
        "Kim et al. 2019", _NEEDS, "own training",
        ("tasks",), gives="the same, closer to the context", short=_TINY | {"heads": 2},
        demo=_LEFT_OUT, docs="neural_processes.md"),
    Row("tnp", "doxa.neural.tnp:TNP", "neural process",
        "Transformer neural process, point by point or autoregressive",
        "Nguyen & Grover 2022", _NEEDS, "own training",
        ("tasks",), gives="the sharpest of them; joint draws",
        short=_TINY | {"heads": 2, "layers": 1}, demo=_LEFT_OUT, docs="neural_processes.md"),
    Row("convcnp", "doxa.neural.convcnp:ConvCNP", "neural process",
        "Convolutional conditional neural process: a CNN on a lattice, one or two inputs",
        "Gordon et al. 2020", _NEEDS, "own training",
        ("tasks",), gives="answers that shift with the data; images",
        short={"width": 8, "layers": 1, "kernel": 3, "density": 4.0}, demo=_LEFT_OUT,
        docs="neural_processes.md"),
)  # fmt: skip
