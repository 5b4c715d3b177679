"""Checkpoints of LFM2 as Liquid AI has published them, and as transformers 5 writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel

TOKENS = [(7 * i + i // 3) % 160 for i in range(30)]


def test_older_fields_give_equal_logits(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["lfm2"]
    write_checkpoint(tmp_path, architecture, **fields)
    expected = PagedModel(tmp_path).logits(TOKENS)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    kinds, rope = config.pop("layer_types"), config.pop("rope_parameters")
    older = {
        "full_attn_idxs": [i for i, kind in enumerate(kinds) if kind == "full_attention"],
        "block_ff_dim": config["intermediate_size"],
        "intermediate_size": 4 * config["intermediate_size"],  # which does not count
        "tie_embedding": config["tie_word_embeddings"],
        "tie_word_embeddings": not config["tie_word_embeddings"],
        "rope_theta": rope["rope_theta"],
    }
    path.write_text(json.dumps({**config, **older}), encoding="utf-8")
    assert torch.equal(PagedModel(tmp_path).logits(TOKENS), expected)
