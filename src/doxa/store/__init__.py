"""What is kept on disk: safetensors and JSON in directories, atomic, durable, checksummed.

`write_artefact` and `read_artefact` keep one thing under one path; `Checkpoints` keeps the
latest states of a run; `DrawsFile` what samplers draw; `exclusive` lets one fit at a time write
to a folder; `encode` and `decode` turn registered
dataclasses into JSON and back.
Nothing is ever unpickled, and a file can only name classes that were registered in code.
"""

from doxa.store.artefact import decoding, is_artefact, read_artefact, write_artefact, write_text
from doxa.store.checkpoints import Checkpoint, Checkpoints
from doxa.store.codec import decode, encode, register, register_lazily
from doxa.store.draws import DrawsFile
from doxa.store.lock import exclusive
from doxa.store.parquet import parquet

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "DrawsFile",
    "decode",
    "decoding",
    "encode",
    "exclusive",
    "is_artefact",
    "parquet",
    "read_artefact",
    "register",
    "register_lazily",
    "write_artefact",
    "write_text",
]
