"""Greedy tokens and log-probabilities are those of transformers, however requests are batched."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, RequestOutput, SamplingParams
from engine.core.kv.state_saves import prompt_end
from engine.models.kv_groups import group_layers
from engine.models.registry import read_model_spec
from tests.factories.checkpoints import write_checkpoint
from tests.factories.drafts import KnownAnswers
from tests.factories.families import FAMILIES
from tests.factories.greedy import Answer, GreedyReference, check_answer
from tests.factories.tokenizers import byte_level_tokenizer

VOCAB = 400
EOS = 0
NUM_PROMPTS = 14
MAX_TOKENS = 14
BLOCK_SIZE = 4
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
IN_EACH_RUN = (*LLAMA_LIKE, "gemma2", "gpt2", "llama-dynamic", "llama-llama3", "llama-tied")
IN_EACH_RUN += ("mistral-sliding-window", "qwen2-yarn", "lfm2", "qwen3.5")

# Architecture, rope scaling, and what else the configuration sets. Trained positions are few, so
# that the outputs of longer prompts go beyond them, where dynamic scaling begins. (No prompt is of
# exactly that length: transformers then keeps the scaling of whatever it ran before.)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "default", {}),
    "llama-linear": ("LlamaForCausalLM", "linear", {}),
    "llama-dynamic": ("LlamaForCausalLM", "dynamic", {"max_position_embeddings": 24}),
    "llama-yarn": ("LlamaForCausalLM", "yarn", {}),
    "llama-llama3": ("LlamaForCausalLM", "llama3", {}),
    "llama-untied-mha": ("LlamaForCausalLM", "default", {"num_key_value_heads": 4}),
    "llama-tied": ("LlamaForCausalLM", "default", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "default", {}),
    "qwen2-yarn": ("Qwen2ForCausalLM", "yarn", {}),
    "qwen3": ("Qwen3ForCausalLM", "default", {}),
    "qwen3-yarn": ("Qwen3ForCausalLM", "yarn", {}),
    "mistral": ("MistralForCausalLM", "default", {}),
    "mistral-sliding-window": ("MistralForCausalLM", "default", {"sliding_window": 9}),
    **{
        name: (architecture, "default", fields)
        for name, (architecture, fields) in FAMILIES.items()
        if name not in LLAMA_LIKE
    },
}

# What the scheduler does to a sequence is the same for each family: there, a few stand for all.
each_mode = pytest.mark.parametrize(
    "reference",
    [
        name
        if name in ("llama", "qwen3", "mistral-sliding-window", "gemma2", "lfm2", "qwen3.5")
        else pytest.param(name, marks=pytest.mark.large)
        for name in CASES
    ],
    indirect=True,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("checkpoints_at_each_block")]


@dataclass(frozen=True)
class Reference:
    """What transformers answers to each prompt, alone."""

    checkpoint: Path
    prompts: list[list[int]]
    answers: list[Answer]


# The families' logits are compared in tests/engine/models, positions in tests/engine/layers; a few
# of both go through the engine each time.
@pytest.fixture(
    scope="module",
    params=[
        name if name in IN_EACH_RUN else pytest.param(name, marks=pytest.mark.large)
        for name in CASES
    ],
)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    architecture, rope, settings = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(
        path, architecture, rope=rope, vocab_size=VOCAB, eos_token_id=EOS, **settings
    )
    byte_level_tokenizer().save_pretrained(path)
    rng = random.Random(request.param)
    lengths = [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 23, *(rng.randint(1, 23) for _ in range(3))]
    common = [rng.randrange(1, VOCAB) for _ in range(12)]
    greedy = GreedyReference(model)
    drawn = []
    for i, length in enumerate(lengths):
        prefix = common[: length // 2] if i % 2 else []
        rest = partial(rng.choices, range(1, VOCAB), k=length - len(prefix))
        drawn.append(greedy.draw(lambda p=prefix, r=rest: p + r(), MAX_TOKENS, EOS))
    return Reference(path, [prompt for prompt, _ in drawn], [answer for _, answer in drawn])


def make_llm(reference: Reference, **settings: Any) -> LLM:
    return LLM(
        str(reference.checkpoint),
        dtype="float32",
        **{"block_size": BLOCK_SIZE, "max_model_len": 40, "max_num_seqs": 32, **settings},
    )


@pytest.fixture(params=[False, True], ids=["step-by-step", "one-step-ahead"])
def ahead(request: pytest.FixtureRequest) -> dict[str, bool]:
    return {"async_scheduling": request.param}


def tight(reference: Reference) -> int:
    """Return how many blocks the longest sequence alone needs, and the null block."""
    groups = group_layers(read_model_spec(reference.checkpoint).sliding_windows, 40)
    return 1 + len(groups.windows) * 40 // BLOCK_SIZE


def keeps_states(reference: Reference) -> bool:
    return bool(read_model_spec(reference.checkpoint).state_shapes)


def check(reference: Reference, outputs: list[RequestOutput], llm: LLM) -> None:
    for output, answer in zip(outputs, reference.answers, strict=True):
        check_answer(output, answer)
        expected_reason = "stop" if answer.token_ids[-1] == EOS else "length"
        assert output.outputs[0].finish_reason == expected_reason
    assert len(outputs) == NUM_PROMPTS
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks


def test_alone(reference: Reference) -> None:
    llm = make_llm(reference, enable_prefix_caching=False)
    outputs = [llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in reference.prompts]
    check(reference, outputs, llm)


def test_in_a_mixed_batch(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(reference, **ahead, enable_prefix_caching=False)
    check(reference, llm.generate(reference.prompts, PARAMS, use_tqdm=False), llm)


@each_mode
def test_with_chunked_prefill(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(
        reference, enable_prefix_caching=False, max_num_seqs=5, max_num_batched_tokens=6, **ahead
    )
    check(reference, llm.generate(reference.prompts, PARAMS, use_tqdm=False), llm)


@each_mode
def test_with_prefix_hits(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(reference, **ahead)
    check(reference, llm.generate(reference.prompts, PARAMS, use_tqdm=False), llm)
    again = llm.generate(reference.prompts, PARAMS, use_tqdm=False)
    check(reference, again, llm)
    for output in again:
        num_tokens = len(output.prompt_token_ids)
        full_blocks = (num_tokens - 1) // BLOCK_SIZE
        num_cached = output.metrics.num_cached_tokens
        if not keeps_states(reference):
            assert num_cached == full_blocks * BLOCK_SIZE
            continue
        # There is no checkpoint at each block, but one before the generation prompt.
        assert prompt_end(num_tokens, BLOCK_SIZE) <= num_cached <= full_blocks * BLOCK_SIZE


@each_mode
def test_under_preemption(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(reference, **ahead, num_gpu_blocks_override=tight(reference))
    outputs = llm.generate(reference.prompts, PARAMS, use_tqdm=False)
    check(reference, outputs, llm)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 6}, {"tight": True}], ids=str)
def test_with_drafts(reference: Reference, settings: dict[str, Any]) -> None:
    if keeps_states(reference):
        pytest.skip("drafts of models whose layers keep states are refused")
    fields: dict[str, Any] = {"max_num_seqs": 3, **settings}
    if fields.pop("tight", False):
        fields["num_gpu_blocks_override"] = tight(reference) + 12  # some are left for drafts
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    llm = make_llm(reference, speculative_config=ngram, **fields)
    answers = [each.token_ids for each in reference.answers]
    proposer = KnownAnswers(4, zip(reference.prompts, answers, strict=True))
    llm._core.scheduler._spec_decode._proposer = proposer
    outputs = llm.generate(reference.prompts, PARAMS, use_tqdm=False)
    check(reference, outputs, llm)
    stats = llm._core.take_stats()
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8


@pytest.mark.parametrize("reference", ["llama", "mistral-sliding-window", "gemma2"], indirect=True)
def test_with_swap_space(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(
        reference,
        num_gpu_blocks_override=tight(reference),
        swap_space=2**-6,
        enable_prefix_caching=False,
        **ahead,
    )
    outputs = llm.generate(reference.prompts, PARAMS, use_tqdm=False)
    check(reference, outputs, llm)
    num_preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert num_preemptions > 0
    host_pool = llm._core.scheduler.kv_cache.host_pool
    assert host_pool.num_free == host_pool.num_blocks
    # All tokens are computed but the last of each, and none twice. One step ahead, the end of a
    # sequence may be noticed when it has a place in another step; and a token in flight when its
    # sequence is preempted is drawn again, from the last one before it.
    num_tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs)
    num_ended = sum(answer.token_ids[-1] == EOS for answer in reference.answers)
    num_computed = llm._core.take_stats().histograms["iteration_tokens_total"].sum
    num_more = (num_ended + num_preemptions) * ahead["async_scheduling"]
    assert num_tokens <= num_computed <= num_tokens + num_more
