"""Garbage collection in processes that serve."""

from __future__ import annotations

import gc

# Objects with references that are made, and not freed, between two collections of the young ones.
# A step of 1,024 sequences makes thousands, and hardly ever a cycle.
_YOUNG_OBJECTS = 20_000


def spare_startup_objects() -> None:
    """Leave all that exists now out of garbage collection; to be called once, after start-up.

    A full collection takes 0.1 s over the objects of torch and transformers, in which no stream
    gets a token. Objects made later are collected as usual, in larger portions.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
