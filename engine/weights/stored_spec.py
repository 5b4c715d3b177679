"""The spec of a checkpoint by its tensors: what `config.json` leaves open, or has wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.tensor_files.elements import hold_equal_values
from engine.checkpoint.tensor_files.headers import read_headers
from engine.checkpoint.tensor_files.stored import StoredTensor
from engine.models.pooling import task_of
from engine.models.spec import ModelSpec
from engine.models.tensor_names import EMBEDDING, HEAD
from engine.weights.matching import require_float

log = logging.getLogger("trident.engine")


def as_stored(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return `spec` as the tensors of the checkpoint in folder `path` have it.

    It is untied where the checkpoint has a head of its own. Configurations may tie a head that
    differs from the embedding: transformers 5 writes so of every model with a vision part, and uses
    both tensors too. A decoder that is stored alone, to embed texts, has no head: it is tied,
    whatever the configuration has.

    Experts that may be stored in several ways are named as they are in this checkpoint.

    Raises:
        CheckpointError: a file is missing or broken, or one of both is not of floats.
    """
    generates = task_of(path, spec.architecture).generates
    if spec.tensor_names.experts is not None and generates and not spec.tie_word_embeddings:
        return spec
    stored = read_headers(path)
    spec = replace(spec, tensor_names=spec.tensor_names.with_experts_of(stored))
    if spec.tie_word_embeddings or not generates:
        return _with_stored_head(spec, stored)
    return spec


def _with_stored_head(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> ModelSpec:
    names = spec.tensor_names
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
