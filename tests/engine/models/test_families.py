"""Logits of every family are as near to exact ones as transformers', however they are computed."""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from engine.models import registry
from kernels.cpu import linear as panels
from tests.factories.checkpoints import write_checkpoint
from tests.factories.exact import ExactModel, assert_as_accurate, decoded_logits
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel

LENGTH = 60  # beyond every window


def _tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(160) for _ in range(count)]


class Pair:
    """A family's model of ours and of transformers, in float32 and in float64."""

    def __init__(self, path: Path, theirs: PreTrainedModel) -> None:
        self.path = path
        self.ours = PagedModel(path, max_model_len=96)
        self.theirs = theirs
        self.exact = ExactModel(theirs)

    def check(self, logits: Tensor, token_ids: list[int]) -> None:
        assert logits.dtype == torch.float32
        theirs = decoded_logits(self.theirs, token_ids, None)
        assert_as_accurate(logits, theirs, self.exact.logits(token_ids, None))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    architecture, fields = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("checkpoint")
    return Pair(path, write_checkpoint(path, architecture, **fields))


def test_prefill(pair: Pair) -> None:
    for length in (1, 17, LENGTH):
        token_ids = _tokens(length, seed=length)
        pair.check(pair.ours.logits(token_ids), token_ids)


def test_chunked_prefill_and_decode_in_shared_steps(pair: Pair) -> None:
    """Sequences of all lengths advance by random amounts."""
    draw = random.Random(3)
    running = [pair.ours.start(_tokens(length, seed=length)) for length in (3, 31, LENGTH)]
    while live := [sequence for sequence in running if sequence.remaining]:
        chosen = draw.sample(live, draw.randint(1, len(live)))
        pair.ours.step([(s, min(s.remaining, draw.choice((1, 1, 5, 20)))) for s in chosen])
    for sequence in running:
        pair.check(torch.cat(sequence.logits), sequence.token_ids)
        pair.ours.end(sequence)


def test_the_deterministic_forms(pair: Pair) -> None:
    """Those of a CPU, in float32: as accurate, and the same bits in any chunks."""
    if not panels.runs(torch.empty(8, 8), torch.device("cpu")):
        pytest.skip("the products in panels are not built, or not for this CPU")
    model = PagedModel(pair.path, max_model_len=96, deterministic=True)
    token_ids = _tokens(LENGTH)
    logits = model.logits(token_ids)
    pair.check(logits, token_ids)
    assert torch.equal(model.logits(token_ids, [29, 1, 1, LENGTH - 31]), logits)


def test_every_architecture_is_tested_and_has_a_family() -> None:
    tested = {architecture for architecture, _ in FAMILIES.values()}
    assert set(registry.FAMILIES) == tested
    for family in registry.FAMILIES.values():
        assert callable(import_module(f"engine.models.families.{family}").parse)


def test_longrope_beyond_the_original_length(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["phi3-longrope"]
    theirs = write_checkpoint(tmp_path, architecture, **fields)
    token_ids = _tokens(120)
    logits = PagedModel(tmp_path, max_model_len=128).logits(token_ids, [70, 50])
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)


def test_limits_of_time_steps(tmp_path: Path) -> None:
    """In whole passes: transformers does not limit those of tokens that it decodes."""
    architecture, fields = FAMILIES["granite4-mamba"]
    fields = {**fields, "time_step_limit": [0.3, 0.9]}
    pair = Pair(tmp_path, write_checkpoint(tmp_path, architecture, **fields))
    token_ids = _tokens(LENGTH)
    logits = pair.ours.logits(token_ids, [20, 1, 1, LENGTH - 22])
    pair.check(logits, token_ids)
    config = tmp_path / "config.json"
    changed = {**json.loads(config.read_text(encoding="utf-8")), "time_step_limit": None}
    config.write_text(json.dumps(changed), encoding="utf-8")
    without = PagedModel(tmp_path, max_model_len=96).logits(token_ids)
    assert (without - logits).abs().max() > 0.05


def test_layers_for_speculative_decoding_are_left_out(tmp_path: Path) -> None:
    architecture, fields = FAMILIES["glm-moe"]
    write_checkpoint(tmp_path, architecture, **fields)
    path, behind = tmp_path / "model.safetensors", "model.layers.3.enorm.weight"
    save_file({**load_file(path), behind: torch.ones(64)}, path)
    PagedModel(tmp_path, max_model_len=96).logits(_tokens(3))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cohere": ({"use_qk_norm": True}, "use_qk_norm: true is not supported; only false"),
    "gemma2": ({"use_bidirectional_attention": True}, "use_bidirectional_attention: true"),
    "glm-moe": ({"n_group": 2}, "n_group: 2 is not supported; only 1"),
    "gpt2": ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "ministral3": (
        {"rope_parameters": {"factor": 2.0, "rope_type": "yarn"}},
        "original_max_position_embeddings: is missing",
    ),
    "granite4": (
        {"layer_types": ["mamba", "attention", "conv"]},
        "layer_types: must give one of mamba, linear_attention, attention",
    ),
    "llava": (
        {"text_config": {"model_type": "phi"}},
        "text_config: model_type: 'phi' is not supported; supported: llama, mistral, qwen2",
    ),
    "olmo": ({"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported; only null"),
    "olmoe": ({"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported; only null"),
    "opt": ({"do_layer_norm_before": False}, "do_layer_norm_before: false"),
    "exaone4": (
        {"layer_types": None, "sliding_window_pattern": "LLX"},
        "sliding_window_pattern: must be a number, or letters L and G",
    ),
    "falcon": ({"alibi": True}, "alibi: true is not supported; only false"),
    "phi": ({"qk_layernorm": True}, "qk_layernorm"),
    "smollm3": ({"no_rope_layers": [1, 2, 0]}, "no_rope_layers: must give 0 or 1 for each of 3"),
    "qwen3-moe": ({"use_sliding_window": True}, "use_sliding_window: true is not supported"),
    "smollm3-windows": (
        {"layer_types": ["sliding_attention"] * 3},
        "layer_types: is not supported",
    ),
    "phi3-longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor: is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_output_is_not_ignored(name: str, tmp_path: Path) -> None:
    architecture, fields = FAMILIES[name.removesuffix("-windows")]
    changed, message = REFUSED[name]
    write_checkpoint(tmp_path, architecture, **fields)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **changed}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        registry.read_model_spec(tmp_path)
