"""Tied embeddings: whether a checkpoint's head is its embedding, by its tensors, not its config."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.tensor_files.elements import hold_equal_values
from engine.checkpoint.tensor_files.headers import read_headers
from engine.models.pooling import task_of
from engine.models.spec import ModelSpec
from engine.models.tensor_names import EMBEDDING, HEAD
from engine.weights.matching import require_float

log = logging.getLogger("trident.engine")


def with_stored_head(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return `spec`, untied where the checkpoint in folder `path` has a head of its own.

    Configurations may tie a head that differs from the embedding: transformers 5 writes so of every
    model with a vision part, and uses both tensors too. A decoder that is stored alone, to embed
    texts, has no head: it is tied, whatever is said.

    Raises:
        CheckpointError: a file is missing or broken, or one of both is not of floats.
    """
    if not spec.tie_word_embeddings and task_of(path, spec.architecture).generates:
        return spec
    stored, names = read_headers(path), spec.tensor_names
    prefix = names.find_prefix(stored)
    if not spec.tie_word_embeddings:
        is_alone = prefix == "" and names.of(HEAD, prefix) not in stored
        return replace(spec, tie_word_embeddings=True) if is_alone else spec
    embedding, head = (stored.get(names.of(name, prefix)) for name in (EMBEDDING, HEAD))
    if embedding is None or head is None:
        return spec
    for tensor in (embedding, head):
        require_float(tensor)
    if hold_equal_values(embedding, head):
        return spec
    log.warning(
        "%s differs from %s, although config.json ties them (tie_word_embeddings); both are used",
        *(head.name, embedding.name),
    )
    return replace(spec, tie_word_embeddings=False)
