"""Warm-up launches all kernels that steps use: no request waits for compilation on a GPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine import LLM, SamplingParams
from kernels import device
from tests.factories.families import FAMILIES
from tests.factories.greedy import GreedyCheckpoint
from tests.factories.quantized import write_quantized
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.kernels.kernel_forms import Form, launched_kernels, recorded_forms
from tests.kernels.support import DEVICE

pytestmark = pytest.mark.usefixtures("small_gpu")

UNUSED = {"layer_norm._kernel"}  # by all models that are supported
DETERMINISTIC = {"matmul._kernel"}  # launched with this setting alone
EXPERTS = {name for name in launched_kernels() if name.startswith("experts.")}  # not of a Llama
RANKS = {name for name in launched_kernels() if name.startswith("collectives.")}  # of several
STATES = {name for name in launched_kernels() if name.startswith("state.")}
QUANTIZED = {name for name in launched_kernels() if name.startswith("quantized.")}

MAX_TOKENS = 3
SETTINGS: dict[str, Any] = {
    "dtype": "float16",  # in float32 all prefill tiles are equal
    "block_size": 16,
    "max_model_len": 160,
    "max_num_seqs": 18,
    "max_num_batched_tokens": 160,
    "swap_space": 2**-6,
}
MIXTURE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 32,
    "num_experts": 2,
    "num_experts_per_tok": 2,
}
# What changes the numbers and shapes that a kernel gets.
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 32, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1, "n": 2},
    {"temperature": 1.0, "typical_p": 0.7},
    {"temperature": 1.0, "top_n_sigma": 1.5, "top_k": 5, "logprobs": 1},
    {"logprobs": 0},
    {"logprobs": 1},
    {"logprobs": 16},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"prompt_logprobs": 20},
    {"return_embedding": True},
    {"logprobs": 20, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3, "max_tokens": 20},
    {"frequency_penalty": 0.3, "logit_bias": {3: 1.0}},
    {"logit_bias": dict.fromkeys(range(300), 1.0)},
    {"allowed_token_ids": (5,)},
    {"allowed_token_ids": tuple(range(300)), "logprobs": 2},
    {"bad_words": ["e", "the"]},
    {"min_tokens": 2, "stop_token_ids": (7, 8)},
    {"stop_token_ids": tuple(range(40, 80))},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GreedyCheckpoint:
    return GreedyCheckpoint(
        tmp_path_factory.mktemp("llama"),
        "LlamaForCausalLM",
        lengths=(130, 2, 33, 1, 15, 14),
        max_tokens=1,
        num_hidden_layers=1,
        head_dim=32,
        max_position_embeddings=256,
    )


def start(checkpoint: GreedyCheckpoint, settings: dict[str, Any], *, captured: bool) -> LLM:
    """Return an engine that has done all that one on a GPU does before it serves."""
    llm = checkpoint.llm(DEVICE, **settings, enforce_eager=not captured)
    if device.INTERPRETED:
        runner = llm._core._runner
        runner.warm_up()
        if captured:
            runner.capture_graphs(ReplayingCapturer(), lambda done, total: None)
    return llm


def params(each: dict[str, Any]) -> SamplingParams:
    return SamplingParams.parse(
        {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **each}
    )


def test_no_request_needs_a_kernel_in_another_form(checkpoint: GreedyCheckpoint) -> None:
    with recorded_forms() as warm:
        llm = start(checkpoint, SETTINGS, captured=False)
    # A new kernel that models may launch must be launched by the warm-up too.
    others = UNUSED | DETERMINISTIC | EXPERTS | STATES | QUANTIZED | RANKS
    assert names(warm) == launched_kernels() - others
    draw = random.Random(0)
    with recorded_forms() as found:
        # A long prompt alone, then each of the parameters alone, then many at once.
        llm.generate(checkpoint.prompts[:1], params({}), use_tqdm=False)
        for each in SAMPLING:
            alone = params({**each, "max_tokens": 1, "min_tokens": 0})
            llm.generate(checkpoint.prompts[1:2], alone, use_tqdm=False)
        prompts = draw.choices(checkpoint.prompts[1:], k=18)
        llm.generate(prompts, [params(draw.choice(SAMPLING)) for _ in prompts], use_tqdm=False)
    check_forms(found, warm)


def test_nor_do_captured_steps_chunks_and_swaps(checkpoint: GreedyCheckpoint) -> None:
    settings = {
        **SETTINGS,
        "max_model_len": 48,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 1 + 4,
        "long_prefill_token_threshold": 8,
        "max_logprobs": 1,
    }
    with recorded_forms() as warm:
        llm = start(checkpoint, settings, captured=True)
    with recorded_forms() as found:
        prompts = checkpoint.prompts[-2:]
        longer = [params({"max_tokens": 20, **each}) for each in (SAMPLING[8], SAMPLING[3])]
        outputs = llm.generate(prompts, longer, use_tqdm=False)
    check_forms(found, warm)
    assert any(output.metrics.num_preemptions for output in outputs)


def test_nor_in_the_deterministic_mode(checkpoint: GreedyCheckpoint) -> None:
    settings = {
        **SETTINGS,
        "max_model_len": 48,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 24,
        "deterministic": True,
        "max_logprobs": 1,
    }
    with recorded_forms() as warm:
        llm = start(checkpoint, settings, captured=False)
    assert names(warm) >= DETERMINISTIC
    with recorded_forms() as found:
        llm.generate(checkpoint.prompts[1:4], params({"logprobs": 1}), use_tqdm=False)
    check_forms(found, warm)


@pytest.mark.parametrize("stored", [False, True], ids=["floats", "awq"])
def test_nor_in_a_mixture_of_experts(stored: bool, tmp_path: Path) -> None:
    """Whose blocks of rows depend on the number of tokens."""
    mixture = GreedyCheckpoint(
        tmp_path / "floats",
        "Qwen3MoeForCausalLM",
        lengths=(58, 2),
        max_tokens=1,
        **MIXTURE,
    )
    settings = {
        **SETTINGS,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "max_logprobs": 0,
        "enforce_eager": True,  # graphs launch nothing
    }
    folder = mixture.path
    if stored:
        _, folder = write_quantized(
            "awq", tmp_path, "Qwen3MoeForCausalLM", vocab_size=400, **MIXTURE
        )
        byte_level_tokenizer().save_pretrained(folder)
    with recorded_forms() as warm:
        llm = LLM(str(folder), device=DEVICE.type, **settings)
        if device.INTERPRETED:
            llm._core._runner.warm_up()
    # Stored experts are multiplied as they are for few tokens, and written out for many.
    kernels = {"experts.grouped_gemm.grouped_gemm_kernel"}
    if stored:
        kernels |= {"experts.grouped_gemm.wna16_grouped_gemm_kernel"}
        kernels |= {"quantized.dequantize._kernel"}
    assert names(warm) >= kernels
    with recorded_forms() as found:
        llm.generate(mixture.prompts, params({"max_tokens": 2}), use_tqdm=False)
    check_forms(found, warm)
    rows = [text for text in found.values() if "grouped_gemm_kernel" in text]
    assert len(rows) == 4, "small and large blocks of both products"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("awq", {}, id="awq"),
        pytest.param(None, {"quantization": "fp8"}, marks=pytest.mark.large, id="fp8"),
    ],
)
def test_nor_with_quantised_weights(
    name: str | None, settings: dict[str, Any], checkpoint: GreedyCheckpoint, tmp_path: Path
) -> None:
    """Whose products have forms for numbers of tokens."""
    folder = checkpoint.path
    if name is not None:
        _, folder = write_quantized(name, tmp_path, num_hidden_layers=1, head_dim=32)
        byte_level_tokenizer().save_pretrained(folder)
    fewer = {
        "hf_overrides": {"max_position_embeddings": 300},
        "max_model_len": 300,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 300,
        "max_logprobs": 0,
        "swap_space": 0,
        "enforce_eager": True,
    }
    with recorded_forms() as warm:
        llm = LLM(str(folder), device=DEVICE.type, **{**SETTINGS, **fewer, **settings})
        if device.INTERPRETED:
            llm._core._runner.warm_up()
    products = "wna16_gemm" if name is not None else "fp8_gemm"
    assert any(products in each for each in names(warm))
    with recorded_forms() as found:
        for length in (290, 70, 17, 1):
            prompt = [5 + (length + each) % 150 for each in range(length)]  # no hit
            llm.generate([prompt], params({"max_tokens": 1}), use_tqdm=False)
    check_forms(found, warm)
    assert any("dequantize" in each for each in names(found)) == (name is not None)
    rows = {text for text in found.values() if products in text}
    assert len(rows) >= 3, "few, some and many tokens"


@pytest.mark.large
@pytest.mark.parametrize(
    ("family", "mixer", "kernels"),
    [
        ("lfm2", "conv", ("short_conv._token_kernel", "short_conv._sub_chunk_kernel")),
        (
            *("qwen3.5", "linear_attention"),
            ("delta_decode._kernel", "delta_chunks._states_kernel", "rings._rings_kernel"),
        ),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_nor_in_a_model_that_keeps_states(
    family: str, mixer: str, kernels: tuple[str, ...], deterministic: bool, tmp_path: Path
) -> None:
    architecture, fields = FAMILIES[family]
    fields = {
        **fields,
        "num_hidden_layers": 2,
        "layer_types": [mixer, "full_attention"],
        "head_dim": 32,
    }
    hybrid = GreedyCheckpoint(tmp_path, architecture, lengths=(58, 2), max_tokens=1, **fields)
    settings = {
        **SETTINGS,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "max_logprobs": 0,
        "deterministic": deterministic,
    }
    with recorded_forms() as warm:
        llm = start(hybrid, settings, captured=False)
    found_kernels = {name for name in kernels if not (deterministic and "delta_chunks" in name)}
    assert names(warm) >= {f"state.{name}" for name in found_kernels}
    with recorded_forms() as found:
        llm.generate(hybrid.prompts, params({"max_tokens": 2}), use_tqdm=False)
        llm.generate(hybrid.prompts[1:], params({"max_tokens": 2}), use_tqdm=False)
    check_forms(found, warm)


def names(forms: dict[Form, str]) -> set[str]:
    return {name for name, *_ in forms}


def check_forms(found: dict[Form, str], warm: dict[Form, str]) -> None:
    """Assert that all forms of `found` are in `warm`."""
    new = [text for form, text in found.items() if form not in warm]
    assert not new, "\n".join(new)
