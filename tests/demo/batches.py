"""Packing of the generated documents into batches of rows of equal length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

import torch
from transformers import PreTrainedTokenizerFast

from tests.demo.corpus.documents import documents

TOKENS_PER_BATCH = 4096
# Long rows train late positions; short rows let many documents begin at position zero.
_ROW_LENGTHS = (128, 256, 256, 512)
_NOT_LEARNED = -100
_DOCUMENTS_PER_CALL = 256

Batch = tuple[torch.Tensor, torch.Tensor]
"""The token ids and the labels of a batch, both of shape [rows, tokens per row]."""


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """An endless stream of batches, determined by the tokenizer and ``seed``.

    Every row begins with a whole document and is filled with the following ones; the part beyond
    its end is dropped.
    """
    encoded = _encoded_documents(tokenizer, seed)
    for length in cycle(_ROW_LENGTHS):
        rows = [_row(encoded, length) for _ in range(TOKENS_PER_BATCH // length)]
        ids, labels = zip(*rows, strict=True)
        yield torch.tensor(ids), torch.tensor(labels)


def _row(
    encoded: Iterator[tuple[list[int], list[int]]], length: int
) -> tuple[list[int], list[int]]:
    ids: list[int] = []
    labels: list[int] = []
    while len(ids) < length:
        document_ids, document_labels = next(encoded)
        ids += document_ids
        labels += document_labels
    return ids[:length], labels[:length]


def _encoded_documents(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[tuple[list[int], list[int]]]:
    """The token ids and labels of each document.

    Segments are encoded one by one, as a prompt is encoded without its answer in serving.
    """
    stream = documents(seed)
    while True:
        chunk = list(islice(stream, _DOCUMENTS_PER_CALL))
        texts = [segment.text for document in chunk for segment in document]
        pieces = iter(tokenizer(texts)["input_ids"])
        for document in chunk:
            ids: list[int] = []
            labels: list[int] = []
            for segment in document:
                piece = next(pieces)
                ids += piece
                labels += piece if segment.learned else [_NOT_LEARNED] * len(piece)
            yield ids, labels
