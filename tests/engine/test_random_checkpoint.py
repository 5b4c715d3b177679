"""Random checkpoints load, and all that they say greedily is text."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import LLM, SamplingParams
from engine.demo import random_checkpoint

TINY = {
    "vocab_size": 4000,  # more than the demo's tokenizer has
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen2ForCausalLM", {}),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
        ("Qwen3_5ForCausalLM", {"full_attention_interval": 2, "linear_num_value_heads": 16}),
    ],
    ids=str,
)
def test_greedy_output_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setitem(random_checkpoint.SIZES, "tiny", (architecture, {**TINY, **fields}))
    random_checkpoint.write_random_checkpoint("tiny", tmp_path)
    llm = LLM(str(tmp_path), max_model_len=256, num_gpu_blocks_override=40)
    prompts = [[5, 6, 7], list(range(300, 320))]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for output in llm.generate(prompts, params, use_tqdm=False):
        (completion,) = output.outputs
        assert len(completion.token_ids) == 40
        assert "\N{REPLACEMENT CHARACTER}" not in completion.text
        assert len(completion.text) >= 40


@pytest.mark.parametrize("size", random_checkpoint.SIZES)
def test_sizes_are_what_they_say(size: str) -> None:
    architecture, fields = random_checkpoint.SIZES[size]
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**{**random_checkpoint.COMMON, **fields}))
    head = 0 if fields.get("tie_word_embeddings") else model.lm_head.weight.numel()
    experts = [
        parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name
    ]
    idle = 1 - fields["num_experts_per_tok"] / fields["num_experts"] if experts else 0
    used = model.num_parameters() - head - int(idle * sum(experts))
    assert f"{used / 1e9:.1f}b" in size.split("-")
