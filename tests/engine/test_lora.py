"""An adapter's folder is served as its base with the adapter merged into it, as PEFT merges it."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.checkpoint.hub import resolve_checkpoint
from engine.errors import CheckpointError
from tests.factories.adapters import write_adapter
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.greedy import VOCAB, GreedyReference, check_answer
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import write_quantized
from tests.factories.thread_ranks import ThreadGroup, ThreadGroups
from tests.factories.tokenizers import byte_level_tokenizer

pytestmark = pytest.mark.slow

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MAX_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0, ignore_eos=True)

# Family, and the adapter.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {"r": 4, "target_modules": ATTENTION}),
    "scales-of-modules": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 2,
            "use_rslora": True,
            "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
            "rank_pattern": {"layers.1.self_attn.o_proj": 2},
            "alpha_pattern": {"up_proj": 7, r"0\.self_attn\.\w+_proj": 1},
        },
    ),
    "dora": ("qwen3", {"r": 4, "use_dora": True, "target_modules": "all-linear"}),
    "head-and-norms": (
        "llama",
        {"r": 2, "target_modules": [*ATTENTION, "lm_head"], "modules_to_save": ["norm"]},
    ),
    "biases-and-embedding": (
        "qwen2",
        {"r": 2, "bias": "all", "target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "transposed": (
        "gpt2",
        {"r": 2, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"]},
    ),
    "transposed-dora": (
        "gpt2-untied",
        {"r": 2, "use_dora": True, "target_modules": ["c_attn", "c_fc", "lm_head"]},
    ),
    "stacked": ("phi3-fused", {"r": 2, "target_modules": ["qkv_proj", "gate_up_proj"]}),
    "beside-vision": ("qwen2.5-vl", {"r": 2, "target_modules": r".*language_model.*_proj"}),
}
# Layers that keep states, which ranks do not have parts of.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "short-convolution": ("lfm2", {"r": 2, "target_modules": ["in_proj", "out_proj", "w1"]}),
    "linear-attention": ("qwen3.5", {"r": 2, "target_modules": ["in_proj_qkv", "in_proj_a"]}),
    "by-key-head": ("qwen3-next", {"r": 2, "target_modules": ["in_proj_qkvz", "in_proj_ba"]}),
}


def write(path: Path, family: str, config: dict[str, Any]) -> Any:
    """Write a base with its adapter into the folder `path`; return the model merged by PEFT."""
    architecture, settings = FAMILIES.get(family, (f"{family.capitalize()}ForCausalLM", {}))
    base = path / "base"
    model = write_checkpoint(base, architecture, vocab_size=VOCAB, **settings)
    byte_level_tokenizer().save_pretrained(base)
    return write_adapter(path / "adapter", model, base, **config)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", CASES | HYBRIDS)
def test_answers_are_those_of_peft(case: str, tmp_path: Path) -> None:
    greedy = GreedyReference(write(tmp_path, *(CASES | HYBRIDS)[case]))
    draw = random.Random(case)
    drawn = [
        greedy.draw(partial(draw.choices, range(3, VOCAB), k=k), MAX_TOKENS) for k in (1, 9, 17)
    ]
    llm = LLM(str(tmp_path / "adapter"), dtype="float32", max_model_len=40)
    outputs = llm.generate([prompt for prompt, _ in drawn], PARAMS, use_tqdm=False)
    for output, (_, answer) in zip(outputs, drawn, strict=True):
        check_answer(output, answer)


@pytest.mark.parametrize("case", CASES)
def test_ranks_merge_an_adapter_as_one_process_does(case: str, tmp_path: Path) -> None:
    write(tmp_path, *CASES[case])
    folder = resolve_checkpoint(str(tmp_path / "adapter"), weights=True)
    draw = random.Random(case)
    token_ids = [draw.randrange(3, VOCAB) for _ in range(20)]
    expected = PagedModel(folder).logits(token_ids)

    def rank(group: ThreadGroup) -> torch.Tensor:
        return PagedModel(folder, group=group).logits(token_ids)

    for num_ranks in (2, 3):
        logits, *_ = ThreadGroups(num_ranks).run(rank)
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


def test_ranks_with_whole_experts_merge_what_is_of_their_own(tmp_path: Path) -> None:
    architecture, settings = FAMILIES["qwen3-moe"]
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_checkpoint(base, architecture, vocab_size=VOCAB, **settings)
    byte_level_tokenizer().save_pretrained(base)
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["gate_proj"]}
    config["base_model_name_or_path"] = str(base)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    stored = load_file(base / "model.safetensors")
    tensors, draw = {}, torch.Generator().manual_seed(0)
    for name, weight in stored.items():
        if name.endswith(".gate_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(2, columns, generator=draw)
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, 2, generator=draw)
    save_file(tensors, adapter / "adapter_model.safetensors")
    folder = resolve_checkpoint(str(adapter), weights=True)
    token_ids = list(range(3, 30))
    expected = PagedModel(folder).logits(token_ids)
    assert not torch.allclose(expected, PagedModel(base).logits(token_ids), atol=0.1)

    def rank(group: ThreadGroup) -> torch.Tensor:
        return PagedModel(folder, group=group, expert_parallel=True).logits(token_ids)

    logits, *_ = ThreadGroups(3).run(rank)
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_of_its_own(tied: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "base", vocab_size=VOCAB, tie_word_embeddings=tied)
    byte_level_tokenizer().save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(VOCAB + 9)
    saved = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    config = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": saved}
    if tied:
        config["ensure_weight_tying"] = True
    write_adapter(tmp_path / "adapter", model, tmp_path / "base", **config)
    greedy, draw = GreedyReference(model), random.Random(0)
    prompt, answer = greedy.draw(partial(draw.choices, range(VOCAB, VOCAB + 9), k=5), MAX_TOKENS)
    llm = LLM(str(tmp_path / "adapter"), dtype="float32", max_model_len=40)
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    check_answer(output, answer)


def test_it_is_merged_before_the_weights_are_quantised(tmp_path: Path) -> None:
    merged = write(tmp_path, *CASES["scales-of-modules"])
    merged.save_pretrained(tmp_path / "merged")
    byte_level_tokenizer().save_pretrained(tmp_path / "merged")
    prompts = [random.Random(i).choices(range(3, VOCAB), k=6) for i in range(4)]

    def answers(folder: str) -> list[list[int]]:
        llm = LLM(str(tmp_path / folder), dtype="float32", quantization="int8", max_model_len=40)
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    assert answers("adapter") == answers("merged") != answers("base")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"hidden_size": 32}, r"q_proj\.lora_A.*of shape \[64, 64\], but the base's .* \[64, 32\]"),
        ({"num_hidden_layers": 2}, "layers.2.*: the base has no model.layers.2.*q_proj.weight"),
    ],
)
def test_of_another_base(settings: dict[str, int], error: str, tmp_path: Path) -> None:
    write(tmp_path, "llama", {"r": 2, "target_modules": ["q_proj"]})
    write_checkpoint(tmp_path / "base", vocab_size=VOCAB, **settings)
    with pytest.raises(CheckpointError, match=error):
        LLM(str(tmp_path / "adapter"))


def test_a_quantised_base(tmp_path: Path) -> None:
    _, base = write_quantized("awq", tmp_path, vocab_size=VOCAB)
    model = write_checkpoint(tmp_path / "floats", "Qwen2ForCausalLM", vocab_size=VOCAB)
    write_adapter(tmp_path / "adapter", model, base, r=2, target_modules=["q_proj"])
    byte_level_tokenizer().save_pretrained(base)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight of floats.*base is quantised"):
        LLM(str(tmp_path / "adapter"))


def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    write(tmp_path, "llama", {"r": 2, "target_modules": ["lm_head"]})
    write_checkpoint(tmp_path / "base", vocab_size=VOCAB, tie_word_embeddings=True)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    pair = {"lora_A": torch.ones(2, 64), "lora_B": torch.ones(VOCAB, 2)}
    save_file(
        {f"base_model.model.lm_head.{name}.weight": tensor for name, tensor in pair.items()},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"the base has no lm_head\.weight"):
        LLM(str(tmp_path / "adapter"))
