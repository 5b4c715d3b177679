"""With `deterministic` a request gets the same bytes alone and under any load."""

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM
from engine.protocol.messages import AddRequest, TokenLogprobs
from engine.protocol.token_ids import pack_token_ids
from tests.factories.checkpoints import write_checkpoint
from tests.factories.forms import runs_panels
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not runs_panels(torch.bfloat16),
        reason="this CPU has no products of ours, or the kernels are not built",
    ),
]

VOCAB = 400
MAX_MODEL_LEN = 700
FORMS = [
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "float32"},
]
# Chunks, preemptions (by few blocks of one token), blocks, prefix hits, swaps, the order of steps.
LOADS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 33, "block_size": 1, "num_gpu_blocks_override": 710},
    {"max_num_seqs": 5, "async_scheduling": True, "block_size": 32},
    {"max_num_batched_tokens": 150, "enable_prefix_caching": False, "block_size": 7},
    {
        "long_prefill_token_threshold": 40,
        "block_size": 1,
        "num_gpu_blocks_override": 710,
        "swap_space": 0.01,
    },
    {
        "max_num_seqs": 4,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 6,
            "prompt_lookup_max": 1,
        },
    },
]
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()))


@dataclass(frozen=True)
class Query:
    """What one request asks for; one that is cancelled is part of the load alone."""

    prompt: list[int]
    params: dict[str, Any]
    is_cancelled: bool = False


Answer = dict[int, tuple[list[int], list[TokenLogprobs]]]  # by sequence of the request


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    fields = {"num_hidden_layers": 2, "max_position_embeddings": MAX_MODEL_LEN}
    write_checkpoint(folder, "Qwen3ForCausalLM", vocab_size=VOCAB, eos_token_id=0, **fields)
    return save_tokenizer(byte_level_tokenizer(), folder)


def make_llm(path: Path, form: dict[str, str], **settings: Any) -> LLM:
    fields = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, **form, **settings}
    return LLM(str(path), device="cpu", deterministic=True, **fields)


def queries(rng: random.Random, count: int) -> list[Query]:
    """Draw requests of all lengths, some with a common beginning, with all kinds of sampling."""
    common = rng.choices(range(1, VOCAB), k=MAX_MODEL_LEN)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.0, "seed": 7, "logprobs": 0},
        {"temperature": 1.5, "top_p": 0.9, "top_k": 40, "logprobs": 1},  # the engine's seed
        {"temperature": 0.7, "n": 2, "logprobs": 3, "presence_penalty": 0.5},
        {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 1, "logit_bias": {5: 2.0}},
    ]
    drawn = []
    for i in range(count):
        length = rng.choice([1, 2, rng.randint(3, 63), rng.randint(64, 130), rng.randint(131, 600)])
        shared = rng.choice([0, 0, rng.randint(0, length - 1)])
        prompt = common[:shared] + rng.choices(range(1, VOCAB), k=length - shared)
        params = {**kinds[i % len(kinds)], "max_tokens": rng.randint(1, 50), "ignore_eos": True}
        drawn.append(Query(prompt, params))
    return drawn


def noise(rng: random.Random, count: int) -> list[Query]:
    """Draw requests that outgrow the blocks there are, until they are cancelled."""
    params = {"temperature": 1.0, "max_tokens": 300, "ignore_eos": True}
    lengths = [rng.randint(1, 40) for _ in range(count)]
    return [Query(rng.choices(range(1, VOCAB), k=n), params, is_cancelled=True) for n in lengths]


def serve(llm: LLM, load: list[Query], rng: random.Random, at_once: int) -> list[Answer]:
    """Send `load` while it is served, `at_once` at most; return the answers.

    Those that are cancelled have none.
    """
    core, waiting = llm._core, list(enumerate(load, start=1))
    waiting.reverse()
    answers: dict[int, Answer] = defaultdict(dict)
    running: set[int] = set()
    left: dict[int, int] = defaultdict(int)  # sequences
    while waiting or core.has_unfinished_requests():
        while waiting and len(running) < at_once and (not running or rng.random() < 0.5):
            uid, query = waiting.pop()
            core.add_request(
                AddRequest(
                    uid=uid,
                    prompt_token_ids=pack_token_ids(query.prompt, "input_ids"),
                    sampling_params=query.params,
                    stream=True,
                )
            )
            running.add(uid)
            left[uid] = query.params.get("n", 1)
        begun = [uid for uid in running if load[uid - 1].is_cancelled and uid in answers]
        for uid in [uid for uid in begun if rng.random() < 0.01]:
            core.abort(uid)
            running.remove(uid)
        outputs = core.step()
        assert not outputs.failures
        for output in outputs.rows():
            tokens, logprobs = answers[output.uid].setdefault(output.index, ([], []))
            tokens += output.token_ids
            logprobs += output.logprobs or []
            if output.finish_reason is not None:
                left[output.uid] -= 1
                if not left[output.uid]:
                    running.discard(output.uid)
    llm.check_integrity()
    return [answers[i] for i, query in enumerate(load, start=1) if not query.is_cancelled]


def check(path: Path, form: dict[str, str], count: int, loads: list[dict[str, Any]]) -> None:
    """Assert that `count` requests have the same answers alone and under each of `loads`."""
    rng = random.Random(count)
    wanted_of = queries(rng, count)
    alone = serve(make_llm(path, form, enable_prefix_caching=False), wanted_of, rng, at_once=1)
    for query, answer in zip(wanted_of, alone, strict=True):
        assert len(answer) == query.params.get("n", 1)
        for tokens, logprobs in answer.values():
            assert len(tokens) == len(logprobs) == query.params["max_tokens"]
    for load in loads:
        llm = make_llm(path, form, **load)
        mixed = [(query, None) for query in noise(rng, 10)] + list(
            zip(wanted_of, alone, strict=True)
        )
        rng.shuffle(mixed)
        found = serve(llm, [query for query, _ in mixed], rng, at_once=40)
        assert found == [answer for _, answer in mixed if answer is not None]
        assert llm._core.scheduler.num_preemptions > 0 or "num_gpu_blocks_override" not in load


@each_form
def test_answers_are_the_same_alone_and_under_load(path: Path, form: dict[str, str]) -> None:
    check(path, form, 15, LOADS[:2])


@pytest.mark.large
@pytest.mark.timeout(1800)
@each_form
def test_200_answers_are_the_same_alone_and_under_load(path: Path, form: dict[str, str]) -> None:
    check(path, form, 200, LOADS)


def test_a_request_without_a_seed_gets_the_engines(path: Path) -> None:
    """Otherwise it would draw what depends on how many came before it."""
    llm = make_llm(path, FORMS[0], seed=3)
    query = Query([5, 6, 7], {"temperature": 1.0, "max_tokens": 9, "ignore_eos": True})
    seeded = Query(query.prompt, {**query.params, "seed": 3})
    rng = random.Random(0)
    first, again, third = serve(llm, [query, query, seeded], rng, at_once=3)
    assert first == again == third
