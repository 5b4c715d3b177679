"""What each family of models writes, in fragments of our own with its tags."""

from __future__ import annotations

import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.protocol.messages import OutputDetails
from engine.text import chat_template
from engine.text.detokenizer import Detokenizer
from engine.text.output_parsing.chunk_parser import ChunkParser, state_after_prompt
from engine.text.output_parsing.parser import ParserState, Section
from engine.text.output_parsing.parser_spec import ParserSpec, tool_call_parser
from engine.text.output_parsing.tags import REASONING, TOOL_CALLS
from engine.text.output_parsing.tracker import OutputTracker
from engine.text.tokenizer import Tokenizer
from tests.factories.tagged import Form, format_of, tagged, template
from tests.factories.tokenizers import byte_level_tokenizer

FORMS: tuple[Form, ...] = ("special", "added", "text")
QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")


def encode(detokenizer: Detokenizer, text: str) -> list[int]:
    return detokenizer.tokenizer.encode(text, add_special_tokens=False)


def prompt_of(detokenizer: Detokenizer, question: str) -> list[int]:
    return chat_template.render(detokenizer.tokenizer, [{"role": "user", "content": question}])


def read(
    detokenizer: Detokenizer,
    output: str,
    parser_spec: ParserSpec | None = None,
    *,
    prompt: list[int] | None = None,
) -> list[Section]:
    """Return the sections of an answer; special tokens are skipped."""
    parser_spec = parser_spec or format_of(detokenizer)
    prompt = prompt_of(detokenizer, "Hi") if prompt is None else prompt
    parser_state = ParserState(state_after_prompt(parser_spec, detokenizer, prompt).state)
    details = OutputDetails(finish_reason="length", parser_state=tuple(parser_state))
    return ChunkParser(detokenizer, parser_spec).read(
        prompt[-1:], encode(detokenizer, output), details, skip_special_tokens=True
    )


def shorthand(sections: list[Section]) -> list[tuple[str, str, str]]:
    return [(section.type, section.tag, section.text) for section in sections]


@pytest.mark.parametrize("form", FORMS)
def test_qwen_opens_its_reasoning_itself(form: Form) -> None:
    answer = (
        '<think>\nhm\n</think>\n\n<tool_call>\n{"a": 1}\n</tool_call>\n<tool_call>{}</tool_call>'
    )
    assert shorthand(read(tagged(QWEN, form), answer)) == [
        ("reasoning", "<think>", "\nhm\n"),
        ("content", "</think>", "\n\n"),
        ("tool_call", "<tool_call>", '\n{"a": 1}\n'),
        ("content", "</tool_call>", "\n"),
        ("tool_call", "<tool_call>", "{}"),
        ("content", "</tool_call>", ""),
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opens", ["<think>", "<think>\n"])
def test_a_template_may_open_the_reasoning(form: Form, opens: str) -> None:
    detokenizer = tagged(QWEN, form, opens=opens)
    assert shorthand(read(detokenizer, "hm</think>\n4")) == [
        ("reasoning", "", "hm"),
        ("content", "</think>", "\n4"),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_template_may_close_it_too(form: Form) -> None:
    detokenizer = tagged(QWEN, form, opens="<think>\n\n</think>\n\n")
    assert shorthand(read(detokenizer, "4")) == [("content", "", "4")]


@pytest.mark.parametrize("form", FORMS)
def test_what_the_user_writes_opens_nothing(form: Form) -> None:
    detokenizer = tagged(QWEN, form)
    prompt = prompt_of(detokenizer, "What does <think> mean? <tool_call>")
    assert shorthand(read(detokenizer, "It", prompt=prompt)) == [("content", "", "It")]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_may_be_continued_inside_its_reasoning(form: Form) -> None:
    detokenizer = tagged(QWEN, form)
    begun = [*prompt_of(detokenizer, "Hi"), *encode(detokenizer, "<think>so fa")]
    assert shorthand(read(detokenizer, "r</think>", prompt=begun)) == [
        ("reasoning", "", "r"),
        ("content", "</think>", ""),
    ]


def test_only_a_special_token_calls_a_tool_out_of_reasoning() -> None:
    """Models muse about tags that are text; a special token is nothing to muse about."""
    answer = "<think>I might <tool_call>{}</tool_call>"
    for form in ("added", "text"):
        assert shorthand(read(tagged(QWEN, form), answer)) == [
            ("reasoning", "<think>", "I might <tool_call>{}</tool_call>")
        ]
    assert shorthand(read(tagged(QWEN, "special"), answer)) == [
        ("reasoning", "<think>", "I might "),
        ("tool_call", "<tool_call>", "{}"),
        ("content", "</tool_call>", ""),
    ]


def test_a_tag_that_is_a_token_cannot_be_spelt_out() -> None:
    detokenizer = tagged(QWEN, "special")
    spelt = [i for character in "<think>" for i in encode(detokenizer, character)]
    reader = ChunkParser(detokenizer, format_of(detokenizer))
    details = OutputDetails(finish_reason="length")
    assert reader.read([], spelt, details, skip_special_tokens=True) == [
        Section("content", 0, "<think>", num_tokens=len(spelt))
    ]


def test_mistrals_calls_have_no_end_and_show_their_special_tokens() -> None:
    tags = ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")
    answer = '[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}'
    assert shorthand(read(tagged(tags, "special"), answer)) == [
        ("reasoning", "[THINK]", "a"),
        ("content", "[/THINK]", "b"),
        ("tool_call", "[TOOL_CALLS]", 'f[ARGS]{"x": 1}'),
        ("tool_call", "[TOOL_CALLS]", "g[ARGS]{}"),
    ]


def test_llamas_python_tag_goes_on_to_the_end() -> None:
    detokenizer = tagged(("<|python_tag|>", "<|eom_id|>"), "special")
    assert shorthand(read(detokenizer, '<|python_tag|>{"name": "f"}')) == [
        ("tool_call", "<|python_tag|>", '{"name": "f"}')
    ]


def test_deepseek_separates_calls_by_tokens_of_their_own() -> None:
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    begin, call, end = (f"<{bar}tool▁{name}{bar}>" for name in ("calls▁begin", "sep", "calls▁end"))
    detokenizer = tagged(("<think>", "</think>", begin, call, end), "added", opens="<think>\n")
    assert shorthand(read(detokenizer, f"a</think>b{begin}f{call}{{}}{end}")) == [
        ("reasoning", "", "a"),
        ("content", "</think>", "b"),
        ("tool_call", begin, f"f{call}{{}}"),
        ("content", end, ""),
    ]


def test_granite_writes_sentences_for_tags() -> None:
    detokenizer = tagged(("Here is my thought process:", "Here is my response:"), "text")
    answer = "Here's my thought process: a. Here is my response: b. Here is my res"
    assert shorthand(read(detokenizer, answer)) == [
        ("reasoning", "Here's my thought process:", " a. "),
        ("content", "Here is my response:", " b. Here is my res"),
    ]


def test_tags_around_the_answer_are_left_out_of_it() -> None:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    assert shorthand(read(tagged(tags, "text"), "<think>a</think><answer>b</answer>")) == [
        ("reasoning", "<think>", "a"),
        ("content", "</think>", ""),
        ("content", "<answer>", "b"),
        ("content", "</answer>", ""),
    ]


def test_the_headers_of_harmony_say_what_a_message_is() -> None:
    detokenizer = tagged(HARMONY, "special", opens="<|start|>assistant")
    call = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    answer = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        f"Wait.<|end|>{call}{{}}<|end|><|start|>assistant to=g<|channel|>commentary<|message|>1"
        "<|call|><|start|>assistant<|channel|>final<|message|>4<|start|>assis"
    )
    assert shorthand(read(detokenizer, answer)) == [
        ("reasoning", "<|channel|>analysis<|message|>", "hm"),
        ("content", "<|end|>", ""),
        ("content", "<|start|>assistant<|channel|>commentary<|message|>", "Wait."),
        ("content", "<|end|>", ""),
        ("tool_call", call, "{}"),
        ("content", "<|end|>", ""),
        ("tool_call", "<|start|>assistant to=g<|channel|>commentary<|message|>", "1"),
        ("content", "<|call|>", ""),
        ("content", "<|start|>assistant<|channel|>final<|message|>", "4"),
    ]


def test_a_named_parser_has_its_tags_whatever_the_template_says() -> None:
    detokenizer = tagged(("[THINK]", "[/THINK]"), "text")
    answer = "<think>a</think>[THINK]<tool_call>b"
    named = format_of(detokenizer, "qwen3", "none")
    assert shorthand(read(detokenizer, answer, named)) == [
        ("reasoning", "<think>", "a"),
        ("content", "</think>", "[THINK]<tool_call>b"),
    ]
    assert read(detokenizer, answer, format_of(detokenizer, "none", "none")) == [
        Section("content", 0, answer, num_tokens=len(encode(detokenizer, answer)))
    ]


@pytest.mark.parametrize("reasoning", REASONING)
def test_all_parsers_go_together(reasoning: str) -> None:
    for tools, sections in TOOL_CALLS.items():
        states = format_of(tagged(QWEN, "added"), reasoning, tools).states
        assert "reasoning" in {state.kind for state in states}
        tags = {tag for state in states for tag in state.next}
        starts = {tag for section in sections for tag in section.starts}
        assert starts <= tags or reasoning == "openai_gptoss"


@pytest.mark.parametrize(
    ("setting", "known"), [("reasoning_parser", REASONING), ("tool_call_parser", TOOL_CALLS)]
)
def test_an_unknown_parser_is_refused_with_the_known_ones(
    setting: str, known: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: .*auto, none or one of {', '.join(known)}"):
        EngineConfig.parse({setting: "qwen4"})


@pytest.mark.parametrize("name", ["kimi_k2", "glm45", "deepseek_v31", "xlam"])
def test_tool_call_parser_of_vllm_that_is_not_here_ends_the_start(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^tool_call_parser: .* one of ernie45, granite4, hermes"
    ):
        EngineConfig.parse({"tool_call_parser": name})


@pytest.mark.parametrize("form", ["special", "added"])
def test_calls_without_a_parser_are_marked_too(form: Form) -> None:
    tags = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    assert shorthand(read(tagged(tags, form), f"a{tags[0]}f{tags[1]}b")) == [
        ("content", "", "a"),
        ("tool_call", tags[0], "f"),
        ("content", tags[1], "b"),
    ]


def follow(detokenizer: Detokenizer, output: str) -> list[bool]:
    """Return after each token whether the reasoning has ended, with the state before the first."""
    parser_spec = format_of(detokenizer)
    prompt = prompt_of(detokenizer, "Hi")
    parser_state = state_after_prompt(parser_spec, detokenizer, prompt)
    tracker = OutputTracker(parser_spec, detokenizer, prompt[-1:], parser_state)
    ended = [tracker.has_reasoning_ended]
    for token_id in encode(detokenizer, output):
        tracker.append(token_id)
        ended.append(tracker.has_reasoning_ended)
    return ended


def test_the_end_of_reasoning_is_known() -> None:
    added = tagged(QWEN, "added")
    assert follow(added, "<think>a</think>b") == [False, False, False, True, True]
    assert follow(added, "\na") == [False, False, True]  # it does without
    assert follow(tagged(QWEN, "added", opens="<think>\n"), "a</think>")[1:] == [False, True]
    assert follow(tagged(QWEN, "added", opens="<think></think>"), "a") == [True, True]
    assert follow(tagged(("[TOOL_CALLS]",), "special"), "a") == [True, True]
    harmony = tagged(HARMONY, "special", opens="<|start|>assistant")
    answer = "<|channel|>analysis<|message|>a<|end|><|start|><|channel|>final<|message|>"
    ended = follow(harmony, answer)
    assert ended == [False] * (len(ended) - 1) + [True]


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("<tool_call>", '{"name": "f", "arguments": {}}'), "hermes"),
        (("<tool_call>", "<function=f>", "<parameter=x>"), "qwen3_coder"),
        (("<tool_call>", "<arg_key>"), "none"),
        (("[TOOL_CALLS]",), "mistral"),
        (("<|python_start|>",), "llama4_pythonic"),
        (('{"name": function name, "parameters": dictionary of',), "llama3_json"),
        (("[func_name1(params_name1=",), "pythonic"),
        (("<|channel|>", "<|message|>", "functions."), "openai"),
        (("<tool_calls>",), "none"),
        (("nothing",), "none"),
    ],
)
def test_the_form_of_tool_calls_is_told_by_the_template(parts: tuple[str, ...], name: str) -> None:
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.chat_template = template("tools", *parts)
    assert tool_call_parser(Tokenizer(hf_tokenizer), "auto") == name
    assert tool_call_parser(Tokenizer(hf_tokenizer), "lfm2") == "lfm2"
    hf_tokenizer.chat_template = template(*parts)
    assert tool_call_parser(Tokenizer(hf_tokenizer), "auto") == "none"
