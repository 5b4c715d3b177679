"""Random checkpoints load, and all that they say greedily is text."""

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_greedy_output_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    monkeypatch.setitem(random_checkpoint.SIZES, "tiny", (architecture, TINY))
    random_checkpoint.write_random_checkpoint("tiny", tmp_path)
    llm = LLM(str(tmp_path), max_model_len=256, num_gpu_blocks_override=40)
    prompts = [[5, 6, 7], list(range(300, 320))]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for output in llm.generate(prompts, params, use_tqdm=False):
        (completion,) = output.outputs
        assert len(completion.token_ids) == 40
        assert "\N{REPLACEMENT CHARACTER}" not in completion.text
        assert len(completion.text) >= 40


def test_sizes_are_what_they_say() -> None:
    for name, (_, fields) in random_checkpoint.SIZES.items():
        hidden, layers = fields["hidden_size"], fields["num_hidden_layers"]
        kv = fields["num_key_value_heads"] * hidden // fields["num_attention_heads"]
        layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * fields["intermediate_size"]
        billions = (layers * layer + 32000 * hidden) / 1e9  # as if input and output were tied
        assert f"{billions:.1f}b" == name.removesuffix("-tied")
