"""Networks of infinite width: their kernels, Gaussian processes and ensembles.

`Architecture` and `read` give the kernels of a network's layers. `NNGP` and `NTK` are methods that
use them; NTK also takes any network of finite width, linear around its start. `empirical_ntk` is
the kernel of a network at its weights.
"""

from doxa.function.wide.architecture import Architecture
from doxa.function.wide.empirical import empirical_ntk, ntk_product
from doxa.function.wide.reading import Erf, Skip, finite_network, read

__all__ = [
    "Architecture", "Erf", "Skip", "empirical_ntk", "finite_network", "ntk_product", "read",
]  # fmt: skip
