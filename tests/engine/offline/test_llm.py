"""The offline API on a tiny random model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, RequestOutput, SamplingParams
from engine.errors import CheckpointError, ConfigError, InsufficientMemoryError
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    save_tokenizer,
)

VOCAB = 400
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["step-by-step", "one-step-ahead"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    settings = {"dtype": "float32", "block_size": 4, "max_num_seqs": 16}
    return LLM(str(checkpoint), **settings, async_scheduling=request.param)


@pytest.fixture(autouse=True)
def _nothing_leaks(llm: LLM) -> Iterator[None]:
    yield
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks


def run(llm: LLM, prompts: Any, params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    from_text = run(llm, "The quick brown fox", GREEDY)[0]
    from_ids = run(llm, from_text.prompt_token_ids, GREEDY)[0]
    assert from_text.prompt == "The quick brown fox"
    assert from_ids.prompt is None
    assert from_text.outputs[0].token_ids == from_ids.outputs[0].token_ids
    assert len(from_text.outputs[0].token_ids) == 24
    assert from_text.outputs[0].finish_reason == "length"


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i + 3] * (i % 5 + 1) for i in range(20)]
    params = [GREEDY.model_copy(update={"max_tokens": 20 - i}) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(20, 0, -1))


def test_calls_share_cached_prefixes_only_with_the_same_salt(llm: LLM) -> None:
    prompt = list(range(30, 63))
    cached = []
    for salt in (None, "tenant 1", None, "tenant 1", "tenant 2"):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False, cache_salt=salt)
        cached.append(output.metrics.num_cached_tokens)
    assert cached == [0, 0, 32, 32, 0]


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        ("", "cache_salt: must be a non-empty string"),
        (5, "cache_salt: must be a non-empty string"),
        ("x" * 1025, "cache_salt: has 1025 characters; at most 1024 are allowed"),
        ("\ud800", "cache_salt: is not valid Unicode"),
    ],
)
def test_a_wrong_salt_is_refused_by_name(llm: LLM, salt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        llm.generate([5, 6], GREEDY, use_tqdm=False, cache_salt=salt)


def test_the_output_stops_before_a_stop_string_across_tokens(llm: LLM) -> None:
    full = run(llm, "Où est", GREEDY)[0].outputs[0]
    for start in range(1, len(full.text) - 2):
        stop = full.text[start : start + 3]
        first = full.text.index(stop)
        for include in (False, True):
            params = GREEDY.model_copy(
                update={"stop": (stop,), "include_stop_str_in_output": include}
            )
            stopped = run(llm, "Où est", params)[0].outputs[0]
            assert stopped.text == full.text[: first + (3 if include else 0)]
            assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
            assert full.token_ids[: len(stopped.token_ids)] == stopped.token_ids


def test_a_stop_token_ends_and_leaves_no_text(llm: LLM) -> None:
    full = run(llm, [5, 6, 7], GREEDY)[0].outputs[0]
    stop = full.token_ids[6]
    first = full.token_ids.index(stop)
    params = GREEDY.model_copy(update={"stop_token_ids": (stop,)})
    stopped = run(llm, [5, 6, 7], params)[0].outputs[0]
    assert stopped.token_ids == full.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    shorter = run(llm, [5, 6, 7], GREEDY.model_copy(update={"max_tokens": first}))[0]
    assert stopped.text == shorter.outputs[0].text


def test_min_tokens_delays_the_stop(llm: LLM) -> None:
    full = run(llm, [5, 6, 7], GREEDY)[0].outputs[0]
    params = GREEDY.model_copy(update={"stop_token_ids": (full.token_ids[2],), "min_tokens": 10})
    assert len(run(llm, [5, 6, 7], params)[0].outputs[0].token_ids) > 10


def test_n_samples_differ_and_repeat_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    first, second = run(llm, [[1, 2, 3, 4, 5, 6]] * 2, params)
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in first.outputs}) == 4
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    # A sample is what the same seed gives alone.
    alone = run(llm, [1, 2, 3, 4, 5, 6], params.model_copy(update={"n": 1, "seed": 13}))
    assert alone[0].outputs[0].token_ids == first.outputs[2].token_ids


def test_more_samples_than_may_run_at_once(llm: LLM) -> None:
    params = SamplingParams(n=40, temperature=1.0, max_tokens=5, ignore_eos=True)
    assert len(run(llm, [[9, 8, 7]], params)[0].outputs) == 40


def test_greedy_samples_are_all_equal(llm: LLM) -> None:
    outputs = run(llm, [[4] * 9], GREEDY.model_copy(update={"n": 3}))[0].outputs
    assert len({tuple(output.token_ids) for output in outputs}) == 1


def test_logprobs_name_the_chosen_token_first(llm: LLM) -> None:
    params = GREEDY.model_copy(update={"logprobs": 3, "max_tokens": 4})
    output = run(llm, [7, 8, 9], params)[0].outputs[0]
    assert output.logprobs is not None
    assert [next(iter(position)) for position in output.logprobs] == output.token_ids
    assert all(len(position) == 3 for position in output.logprobs)
    chosen = [next(iter(position.values())) for position in output.logprobs]
    assert [logprob.rank for logprob in chosen] == [1] * 4
    assert output.cumulative_logprob == pytest.approx(sum(c.logprob for c in chosen))


def test_bad_words_do_not_appear(llm: LLM) -> None:
    full = run(llm, [5, 6, 7], GREEDY)[0].outputs[0]
    letter = next(c for c in full.text if c.isascii() and c.isalnum())
    output = run(llm, [5, 6, 7], GREEDY.model_copy(update={"bad_words": (letter,)}))[0].outputs[0]
    assert output.token_ids != full.token_ids
    assert (
        llm.generate(letter, GREEDY, use_tqdm=False)[0].prompt_token_ids[0] not in output.token_ids
    )


def test_chat_applies_the_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)[0]
    expected = byte_level_tokenizer()("<|user|>Hi<|end|><|assistant|>")["input_ids"]
    assert output.prompt_token_ids == expected


def test_without_parameters_the_checkpoint_decides(llm: LLM) -> None:
    output = llm.generate([3, 4], use_tqdm=False)[0].outputs[0]
    again = llm.generate([3, 4], use_tqdm=False)[0].outputs[0]
    assert output.token_ids == again.token_ids  # greedy, as transformers would


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "input_ids: the prompt is empty"),
        ([VOCAB], {}, rf"input_ids\[0\]: token id {VOCAB} is outside the vocabulary \(0 to 399\)"),
        ([-1], {}, r"input_ids\[0\]: token id -1 is outside"),
        ([1] * 128, {}, "input_ids: the prompt has 128 tokens; max_model_len is 128"),
        ([1], {"logprobs": 21}, r"logprobs: must be at most .* 20 \(got 21\)"),
        ([1], {"stop_token_ids": [VOCAB]}, r"stop_token_ids\[0\]: token id 400"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias: token id 400"),
        ([1], {"allowed_token_ids": [5, 999]}, r"allowed_token_ids\[1\]: token id 999"),
    ],
)
def test_a_bad_request_is_refused_and_nothing_has_run(
    llm: LLM, prompt: list[int], fields: dict[str, object], message: str
) -> None:
    params = SamplingParams.parse(fields)
    with pytest.raises(ValueError, match=message):
        llm.generate([[1, 2, 3], prompt], params, use_tqdm=False)
    assert run(llm, [1, 2, 3], GREEDY)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompts", "index"),
    [
        ([1, 2, "x"], 0),
        (["x", 5], 1),
        ([[1, 2], [3, "4"]], 1),
        ([[1.5]], 0),
        ([None], 0),
        ({"prompt": None}, 0),
        ({"prompt": 5}, 0),
        ([{"prompt": "x"}, {"prompt_token_ids": "12"}], 1),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any, index: int) -> None:
    with pytest.raises(ValueError, match=rf"^prompts\.{index}: must be a string, a list of token"):
        run(llm, prompts, GREEDY)


@pytest.mark.parametrize("during", ["add_request", "step"])
def test_a_call_that_is_interrupted_leaves_nothing_to_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    made = getattr(llm._core, during)
    calls = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        result = made(*arguments)
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(llm._core, during, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(llm, [[1, 2, 3]] * 3, GREEDY)
    assert run(llm, [1, 2, 3], GREEDY)[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_model_len": 129}, ConfigError, "max_model_len: must be at most 128"),
        (
            {"num_gpu_blocks_override": 17, "block_size": 4, "max_model_len": 65},
            InsufficientMemoryError,
            "max_model_len: one sequence of 65 tokens needs .* at most 64",
        ),
        ({"bananas": 1}, ConfigError, "bananas: unknown field"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs: .*greater than or equal to 1"),
        ({"dtype": "int3"}, ConfigError, "dtype: "),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
            ConfigError,
            r"max_num_batched_tokens: must be at least max_model_len \(128\)",
        ),
    ],
)
def test_wrong_settings_say_what_to_do(
    checkpoint: Path, settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(checkpoint), **settings)


def test_a_length_that_nobody_asked_for_is_lowered_to_what_fits(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), block_size=4, num_gpu_blocks_override=6)
    with pytest.raises(ValueError, match="max_model_len is 20"):
        llm.generate([1] * 20, GREEDY, use_tqdm=False)
    assert len(run(llm, [1] * 4, GREEDY)[0].outputs[0].token_ids) == 16


def test_a_wrong_tokenizer_setting_is_named(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^tokenizer: there is no folder"):
        LLM(str(checkpoint), tokenizer="./no/such/folder")


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(CheckpointError, match="no/such/folder"):
        LLM("./no/such/folder")


def test_a_sentencepiece_style_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer()
    write_checkpoint(tmp_path, vocab_size=len(tokenizer), eos_token_id=2)
    save_tokenizer(tokenizer, tmp_path)
    llm = LLM(str(tmp_path), dtype="float32")
    prompt = "the stop 你é"
    params = SamplingParams(temperature=2.0, n=8, seed=3, max_tokens=60, ignore_eos=True)
    result = run(llm, prompt, params)[0]
    before = tokenizer.backend_tokenizer.decode(result.prompt_token_ids)
    assert before == prompt
    for output in result.outputs:
        whole = tokenizer.backend_tokenizer.decode([*result.prompt_token_ids, *output.token_ids])
        assert before + output.text == whole


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(checkpoint: Path, llm: LLM, dtype: str) -> None:
    half = LLM(str(checkpoint), dtype=dtype, block_size=4)
    params = GREEDY.model_copy(update={"logprobs": 0, "max_tokens": 1})
    prompts = [[i + 1, 2 * i + 5, 90 + i] for i in range(12)]
    exact = torch.tensor([o.outputs[0].cumulative_logprob for o in run(llm, prompts, params)])
    close = torch.tensor([o.outputs[0].cumulative_logprob for o in run(half, prompts, params)])
    assert (exact - close).abs().max() < 0.5
