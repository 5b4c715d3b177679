"""Filling a model's parameters: from a safetensors checkpoint, or at random for measurements.

Everything that can be wrong with a checkpoint is found from the files' headers, before the first
byte of a weight is read. Then several threads read the files in large pieces: into the parameters
themselves, where q, k, v and gate, up lie stacked, or into a few buffers from which the bytes are
cast or go on to the GPU. Pickled files are never opened: they can execute code.
"""

from engine.weights.dummy import fill_with_random_weights
from engine.weights.headers import INDEX, SINGLE
from engine.weights.loader import initialise_weights, load_weights

__all__ = ["INDEX", "SINGLE", "fill_with_random_weights", "initialise_weights", "load_weights"]
