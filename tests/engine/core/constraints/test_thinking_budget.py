"""The thinking budget: what comes before it is as without, then the end tag, then the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.core.constraints.thinking_budget import ThinkingBudget
from engine.errors import RequestError
from engine.offline.outputs import CompletionOutput
from engine.text.output_parsing.chunk_parser import state_after_prompt
from engine.text.output_parsing.tracker import OutputTracker
from tests.factories.checkpoints import write_checkpoint
from tests.factories.processors import install
from tests.factories.tagged import Form, Kind, format_of, tagged, tagged_tokenizer
from tests.factories.tokenizers import save_tokenizer

TAGS = ("<think>", "</think>")
OPEN = "<|assistant|><think>\n"  # a prompt that has opened the reasoning


def write(folder: Path, form: Form) -> Path:
    tokenizer = tagged_tokenizer(TAGS, form, opens="<think>\n")
    write_checkpoint(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return save_tokenizer(tokenizer, folder)


@pytest.fixture(scope="module", params=["step-by-step", "one-step-ahead", "text", "tight"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    form: Form = "text" if request.param == "text" else "special"
    path = write(tmp_path_factory.mktemp(request.param), form)
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_seqs": 8}
    settings["num_gpu_blocks_override"] = 400
    settings["async_scheduling"] = request.param in ("one-step-ahead", "tight")
    if request.param == "tight":  # chunks are cut, and sequences preempted
        settings |= {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 16}
    return LLM(str(path), device="cpu", **settings)


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.check_integrity()
        assert llm.num_free_blocks == llm.num_blocks


def run(llm: LLM, prompt: str | list[int], *many: dict[str, Any]) -> list[CompletionOutput]:
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    # Tags come when they must: a random model does not know what they are for.
    bias = dict.fromkeys(sorted(tags_of(llm)), -100.0)
    if isinstance(prompt, str):
        prompt = llm._core.tokenizer.encode(prompt, add_special_tokens=False)
    params = [SamplingParams.parse({**defaults, "logit_bias": bias, **each}) for each in many]
    outputs = llm.generate([prompt] * len(many), params, use_tqdm=False)
    return [sequence for output in outputs for sequence in output.outputs]


def tags_of(llm: LLM) -> set[int]:
    ids = llm._core.tokenizer.added_token_ids
    return {ids[tag] for tag in TAGS if tag in ids}


def end_of(llm: LLM) -> list[int]:
    return llm._core.tokenizer.encode("</think>", add_special_tokens=False)


def prompt_of(llm: LLM, text: str = OPEN) -> list[int]:
    return llm._core.tokenizer.encode(text, add_special_tokens=False)


def test_the_end_tag_comes_after_so_many_tokens_and_the_rest_is_the_models(llm: LLM) -> None:
    budgets = [0, 1, 2, 3, 7, 20, 39, 40, None]
    outputs = run(llm, OPEN, *({"thinking_token_budget": budget} for budget in budgets))
    free = outputs[-1].token_ids
    for budget, output in zip(budgets[:-1], outputs, strict=False):
        assert budget is not None
        ids = list(output.token_ids)
        # A character may be completed.
        extra = next(i for i in range(4) if ids[budget + i :][:1] in (end_of(llm)[:1], []))
        thoughts = budget + extra
        assert ids[:thoughts] == list(free[:thoughts])
        end = end_of(llm)[: 40 - thoughts]
        assert ids[thoughts : thoughts + len(end)] == end
        rest = ids[thoughts + len(end) :]
        if rest:
            begun = [*prompt_of(llm), *ids[: thoughts + len(end)]]
            [expected] = run(llm, begun, {"max_tokens": len(rest)})
            assert rest == list(expected.token_ids)


def test_the_sections_tell_thoughts_and_answer(llm: LLM) -> None:
    asked = {"thinking_token_budget": 5, "return_sections": True}
    [output] = run(llm, OPEN, asked)
    assert output.sections is not None
    thoughts, answer = output.sections
    assert thoughts.type == "reasoning"
    assert 5 <= thoughts.num_tokens <= 8
    assert answer.type == "content"
    assert answer.tag == "</think>"
    [plain] = run(llm, OPEN, {"thinking_token_budget": 5})
    assert plain.sections is None
    assert plain.token_ids == output.token_ids


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 3, "temperature": 2.0, "seed": 4},
        {"logprobs": 2},
        {"min_tokens": 40, "ignore_eos": False},
        {"bad_words": ["a", "</think>"]},
        {"dry_multiplier": 2.0},
        {"structured_outputs": {"regex": "[a-c]{3}"}},
        {"return_sections": True, "structured_outputs": {"regex": "[a-c]{3}"}},
        {"stop": ["<"], "min_tokens": 30},
        {"skip_special_tokens": False, "return_sections": True},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_it_holds_beside_what_else_is_asked_for(llm: LLM, sampling: dict[str, Any]) -> None:
    for output in run(llm, OPEN, {**sampling, "thinking_token_budget": 6}):
        ids = list(output.token_ids)
        end = end_of(llm)
        position = next(i for i in range(len(ids)) if ids[i : i + len(end)] == end)
        assert 6 <= position <= 9
        if "structured_outputs" in sampling:
            assert output.finish_reason == "stop"
            assert set(llm._core.tokenizer.decode(ids[position + len(end) :])) <= set("abc")


def test_thoughts_that_begin_late_are_counted_from_there(llm: LLM) -> None:
    think = prompt_of(llm, "<think>")
    if len(think) > 1:
        pytest.skip("the model cannot be made to write a tag of several tokens")
    only = {"bad_words": [], "logit_bias": {think[0]: 100.0}}
    for budget in (0, 1, 4):
        [output] = run(llm, "<|assistant|>Hi", {**only, "thinking_token_budget": budget})
        ids = list(output.token_ids)
        assert ids[: budget + 2] == [*think, *think * budget, *end_of(llm)]
        # Opened again at once, and each time closed after a token.
        assert ids[budget + 2 : budget + 8] == [*think, *think, *end_of(llm)] * 2


def test_an_answer_without_thoughts_is_as_without_a_budget(llm: LLM) -> None:
    free, bounded = run(llm, "<|user|>Hi<|end|>", {}, {"thinking_token_budget": 0})
    assert bounded.token_ids == free.token_ids


def test_a_character_is_completed_but_not_for_ever() -> None:
    detokenizer = tagged(TAGS, "special", opens="<think>\n")
    parser_spec = format_of(detokenizer)
    tokenizer = detokenizer.tokenizer
    prompt = tokenizer.encode(OPEN, add_special_tokens=False)
    first, *others = tokenizer.encode("\N{SLIGHTLY SMILING FACE}", add_special_tokens=False)
    parser_state = state_after_prompt(parser_spec, detokenizer, prompt)
    [end] = parser_spec.end_ids(parser_state.state)

    def forced_after(token_ids: list[int]) -> int | None:
        window = detokenizer.prompt_window(prompt)
        tracker = OutputTracker(parser_spec, detokenizer, window, parser_state)
        budget = ThinkingBudget(1, parser_spec, tracker)
        for token_id in token_ids:
            assert budget.forced is None
            assert budget.host_chooses
            tracker.append(token_id)
            budget.append(token_id)
        return budget.forced

    for count in range(len(others)):
        assert forced_after([first, *others[:count]]) is None
    assert forced_after([first, *others]) == end
    assert forced_after([first, first, first]) is None
    assert forced_after([first, first, first, first]) == end


def feed(
    num_tokens: int, text: str, form: Form = "special", kind: Kind = "byte_level", opens: str = OPEN
) -> tuple[str, list[int]]:
    """Return how much of `text` is taken after `opens` before a tag is forced, and its tokens."""
    detokenizer = tagged(TAGS, form, kind=kind, opens="<think>\n")
    parser_spec = format_of(detokenizer)
    tokenizer = detokenizer.tokenizer
    prompt = tokenizer.encode(opens, add_special_tokens=False)
    parser_state = state_after_prompt(parser_spec, detokenizer, prompt)
    tracker = OutputTracker(
        parser_spec, detokenizer, detokenizer.prompt_window(prompt), parser_state
    )
    budget = ThinkingBudget(num_tokens, parser_spec, tracker)
    taken, forced = [], []
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if budget.forced is not None:
            break
        taken.append(token_id)
        tracker.append(token_id)
        budget.append(token_id)
    while (token_id := budget.forced) is not None:
        forced.append(token_id)
        tracker.append(token_id)
        budget.append(token_id)
    assert not tracker.is_reasoning
    return tokenizer.decode(taken), forced


def test_complete_bytes_wait_for_nothing() -> None:
    """Where bytes are tokens of their own, what follows them is a part of the same run."""
    opens = "<|assistant|><think>ab"
    face, new_line = "\N{SLIGHTLY SMILING FACE}", "\n"
    for text, num_tokens, taken in (
        (4 * face, 8, 2 * face),
        (4 * face, 7, 2 * face),
        (4 * face, 4, face),
        (9 * new_line, 3, 2 * new_line),  # a text begins with a token for a space
    ):
        assert feed(num_tokens, text, kind="byte_fallback", opens=opens)[0] == taken


def test_a_tag_that_is_begun_is_completed() -> None:
    detokenizer = tagged(TAGS, "text", opens="<think>\n")
    whole = detokenizer.tokenizer.encode("so</think>", add_special_tokens=False)
    for num_tokens in range(len(whole)):
        taken, forced = feed(num_tokens, "so</think>", "text")
        rest = detokenizer.tokenizer.decode(forced)
        if num_tokens < 2:
            assert rest == "</think>"
        else:
            assert taken + rest == "so</think>"


def test_minus_one_is_no_limit() -> None:
    assert SamplingParams.parse({"thinking_token_budget": -1}) == SamplingParams()


@pytest.mark.parametrize("value", [-2, 1.5, "many", 2**31])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="thinking_token_budget"):
        SamplingParams.parse({"thinking_token_budget": value})


def test_a_budget_that_cannot_be_held_is_refused(llm: LLM, checkpoint: Path) -> None:
    with pytest.raises(RequestError, match="needs the tokens of the tag"):
        run(llm, OPEN, {"thinking_token_budget": 3, "allowed_token_ids": [5, 6]})
    with pytest.raises(RequestError, match="thinking_token_budget: is not supported with beam"):
        run(llm, OPEN, {"thinking_token_budget": 0, "beam_width": 2})
    plain = LLM(str(checkpoint), device="cpu", num_gpu_blocks_override=64)
    with pytest.raises(
        RequestError, match="thinking_token_budget: the model has no known reasoning tags"
    ):
        plain.generate(["Hi"], SamplingParams.parse({"thinking_token_budget": 3}), use_tqdm=False)


def test_a_processor_that_forbids_the_tag_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install(tmp_path / "packages", {"counting": "tests.factories.processors:Counting"})
    monkeypatch.syspath_prepend(str(folder))
    path = write(tmp_path, "special")
    llm = LLM(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=64)
    asked = [{"name": "counting", "args": {"first": 40, "dense": True}}]
    fields = {"logits_processors": asked, "thinking_token_budget": 2, "max_tokens": 6}
    [output] = run(llm, OPEN, {**fields, "logit_bias": None})
    assert output.token_ids == [40, 41, *end_of(llm), 43, 44, 45]
