"""The whole engine on an fp8 KV cache equals transformers with keys and values rounded to fp8.

Keys and values of the current step are read from the cache too, so all are rounded alike, however
prompts are chunked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from engine import LLM, SamplingParams
from engine.execution.memory.kv_caches import distinct_caches
from engine.weights import SINGLE
from tests.factories.checkpoints import write_checkpoint
from tests.factories.exact import cached_logits
from tests.factories.tokenizers import byte_level_tokenizer
from tests.kernels.support import DEVICE

pytestmark = pytest.mark.usefixtures("small_gpu")

VOCAB = 400
LENGTHS = (1, 33)
MAX_TOKENS = 3
# Tolerance of log-probabilities. Decode multiplies in float16, which rounds queries and weights by
# a relative 2^-11; eight such errors may add up.
TOLERANCE = 2.0**-8
# Scales of the two heads. Not powers of two, which would leave the rounding unchanged; keys of the
# first head saturate beyond 2.2.
SCALES = {"k_scale": torch.tensor([0.005, 0.3]), "v_scale": torch.tensor([0.07, 0.011])}

Scales = Mapping[str, Tensor]


class Float8Cache(DynamicCache):
    """transformers' cache, with keys and values rounded to fp8."""

    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        key = _rounded(key_states, self._scales["k_scale"])
        value = _rounded(value_states, self._scales["v_scale"])
        return super().update(key, value, layer_idx, *args, **kwargs)


def _rounded(states: Tensor, scale: Tensor) -> Tensor:
    """Return [1, heads, T, dim] rounded to float8 e4m3, with a scale per head."""
    scale = scale.view(1, -1, 1, 1)
    return (states / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@torch.inference_mode()
def _generate(
    model: PreTrainedModel, prompt: list[int], scales: Scales | None
) -> tuple[list[int], list[float]]:
    """Return the greedy continuation, and its log-probabilities; `scales` None: not rounded."""
    ids, logprobs = list(prompt), []
    for _ in range(MAX_TOKENS):
        cache = DynamicCache() if scales is None else Float8Cache(scales)
        logits = cached_logits(model, torch.tensor([ids]), cache)[0, -1]
        logprob, token = torch.log_softmax(logits.float(), dim=-1).max(dim=-1)
        ids.append(int(token))
        logprobs.append(float(logprob))
    return ids[len(prompt) :], logprobs


class Checkpoint:
    """A random model, optionally with KV scales.

    It has one layer: in a second one, the smallest difference would change the rounding of some
    keys.
    """

    def __init__(self, path: Path, *, has_scales: bool) -> None:
        self.path = path
        self.model = write_checkpoint(
            path, "LlamaForCausalLM", vocab_size=VOCAB, num_hidden_layers=1, head_dim=32
        )
        byte_level_tokenizer().save_pretrained(path)
        self.scales: Scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
        if has_scales:
            self.scales = SCALES
            named = {f"model.layers.0.self_attn.{name}": s for name, s in SCALES.items()}
            save_file({**load_file(path / SINGLE), **named}, path / SINGLE)
        rng = random.Random(0)
        common = [rng.randrange(3, VOCAB) for _ in range(33)]
        self.prompts = [common[-length:] if length < 17 else common for length in LENGTHS]

    def llm(self, **settings: Any) -> LLM:
        defaults = {"block_size": 16, "max_model_len": 48, "max_num_seqs": 8}
        return LLM(
            str(self.path),
            dtype="float32",
            kv_cache_dtype="fp8",
            device=DEVICE.type,
            **{**defaults, **settings},
        )


@pytest.fixture(scope="module", params=[False, True], ids=["unscaled", "scaled"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("float8"), has_scales=request.param)


def test_chunks_prefix_hits_and_copies(checkpoint: Checkpoint) -> None:
    llm = checkpoint.llm(max_num_batched_tokens=12)
    # Two samples share a prompt's blocks until they write: the last block is copied on write.
    params = SamplingParams(temperature=0, n=2, max_tokens=MAX_TOKENS, logprobs=0, ignore_eos=True)
    prompts = [*checkpoint.prompts, checkpoint.prompts[-1]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert outputs[-1].metrics.num_cached_tokens > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        token_ids, logprobs = _generate(checkpoint.model, prompt, checkpoint.scales)
        for completion in output.outputs:
            assert completion.token_ids == token_ids
            assert completion.logprobs is not None
            found = [
                entry[i].logprob for entry, i in zip(completion.logprobs, token_ids, strict=True)
            ]
            assert found == pytest.approx(logprobs, abs=TOLERANCE)
        # Without rounding the answer differs, so the tolerance does not hide it.
        exact = _generate(checkpoint.model, prompt, None)[1]
        assert found != pytest.approx(exact, abs=4 * TOLERANCE)
    llm.check_integrity()


def test_the_cache_takes_a_quarter_of_float32s(checkpoint: Checkpoint) -> None:
    per_block = 16 * 2 * 2 * 32  # K and V of two heads, one byte per value
    llm = checkpoint.llm(kv_cache_memory_bytes=9 * per_block)
    assert llm.num_blocks == 9 - 1
    caches = distinct_caches(llm._core._runner._kv_cache)
    assert sum(cache.nbytes for cache in caches) == 9 * per_block
    assert "MiB of float8_e4m3fn)" in llm._core.ready.description
