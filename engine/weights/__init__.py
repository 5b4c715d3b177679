"""Loading of a model's parameters: from a safetensors checkpoint, or at random for benchmarks.

All checkpoint errors that the file headers reveal are found before any weight is read, and by
`check_weights` before memory is taken for one. Then several threads read the files in large pieces:
directly into the parameters, in which q, k, v and gate, up are stacked, or into a few buffers from
which the data is cast or copied to the GPU. Pickled files are never opened, since they can execute
code.
"""

from engine.checkpoint.tensor_files.headers import INDEX, SINGLE
from engine.weights.dummy import fill_with_random_weights
from engine.weights.loader import check_weights, initialise_weights, load_weights
from engine.weights.stored_spec import as_stored

__all__ = [
    "INDEX",
    "SINGLE",
    "as_stored",
    "check_weights",
    "fill_with_random_weights",
    "initialise_weights",
    "load_weights",
]
