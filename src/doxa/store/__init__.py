"""Storage on disk: safetensors and JSON in directories, atomic, durable, and with checksums.

`write_artefact` and `read_artefact` store one object under one path. `Checkpoints` stores the
latest states of a run, and `DrawsFile` stores the draws of samplers. `exclusive` locks a folder, so
that only one fit at a time writes to it; `claims.py` divides the blocks of a fit among processes,
and `process_log.py` has the log of each process.
`encode` and `decode` convert registered dataclasses to JSON and back. Nothing is ever
unpickled, and a file can refer only to classes that are registered in code.
"""

from doxa.store.artefact import decoding, is_artefact, read_artefact, write_artefact, write_text
from doxa.store.checkpoints import Checkpoint, Checkpoints, copy_newest
from doxa.store.claims import join
from doxa.store.codec import decode, encode, register, register_lazily
from doxa.store.draws import DrawsFile
from doxa.store.lock import exclusive
from doxa.store.parquet import parquet

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "DrawsFile",
    "copy_newest",
    "decode",
    "decoding",
    "encode",
    "exclusive",
    "is_artefact",
    "join",
    "parquet",
    "read_artefact",
    "register",
    "register_lazily",
    "write_artefact",
    "write_text",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
