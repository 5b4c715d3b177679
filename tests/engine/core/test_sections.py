"""Sections through the engine: what is streamed is what a whole answer gives."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import LLM, SamplingParams, Section
from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol.messages import AddRequest, SequenceOutput
from engine.protocol.token_ids import pack_token_ids
from engine.text.output_parsing.chunk_parser import ChunkParser
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tagged import Form, tagged_tokenizer
from tests.factories.tokenizers import save_tokenizer

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SAMPLING: dict[str, Any] = {"temperature": 30.0, "seed": 5, "max_tokens": 60, "ignore_eos": True}


def write(folder: Path, form: Form) -> Path:
    tokenizer = tagged_tokenizer(TAGS, form, opens="<think>\n")
    if form == "text":
        tokenizer.add_tokens(["<think", "</think", "<tool_call", "</tool_call"])
    write_checkpoint(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return save_tokenizer(tokenizer, folder)


@pytest.fixture(scope="module", params=["special", "added", "text"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


def make_core(checkpoint: Path, **settings: Any) -> EngineCore:
    fields = {"model": str(checkpoint), "dtype": "float32", "device": "cpu"}
    return EngineCore(EngineConfig.parse({**fields, "num_gpu_blocks_override": 64, **settings}))


def words(core: EngineCore) -> list[int]:
    """Return the tokens that a random model may choose from: tags, as they are spelt, and text."""
    spelt = {i for tag in TAGS for i in core.tokenizer.encode(tag, add_special_tokens=False)}
    return sorted(spelt | set(core.tokenizer.encode("a b", add_special_tokens=False)))


def run(core: EngineCore, **sampling: Any) -> list[SequenceOutput]:
    prompt = core.tokenizer.encode("<|assistant|><think>\n", add_special_tokens=False)
    params = {**SAMPLING, "allowed_token_ids": words(core), **sampling}
    core.add_request(AddRequest(1, pack_token_ids(prompt), params))
    outputs: list[SequenceOutput] = []
    while core.has_unfinished_requests():
        outputs += core.step().rows()
    return outputs


def joined(parts: list[Section]) -> list[Section]:
    groups = [list(same) for _, same in groupby(parts, attrgetter("index"))]
    return [
        msgspec.structs.replace(
            same[0],
            text="".join(part.text for part in same),
            num_tokens=sum(part.num_tokens for part in same),
        )
        for same in groups
    ]


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({}, {}),
        (
            {"async_scheduling": True, "num_gpu_blocks_override": 12},
            {"stop": ["ab", "b<th"], "min_tokens": 30},
        ),
        ({"stream_interval": 3}, {"skip_special_tokens": False, "logprobs": 1}),
    ],
    ids=["plain", "ahead, preempted, with stop strings", "by three tokens, with logprobs"],
)
def test_streamed_sections_are_those_of_the_whole(
    checkpoint: Path, settings: dict[str, Any], sampling: dict[str, Any]
) -> None:
    core = make_core(checkpoint, **settings)
    outputs = run(core, n=4, return_sections=True, **sampling)
    skip = sampling.get("skip_special_tokens", True)
    reader = ChunkParser(core.detokenizer, core.parser_spec)
    assert len(outputs) > 8
    preemptions = sum(output.stats.num_preemptions for output in outputs if output.stats)
    assert bool(preemptions) == ("num_gpu_blocks_override" in settings)
    kinds = set()
    for index in range(4):
        chunks = [output for output in outputs if output.index == index]
        parts = [
            part
            for chunk in chunks
            for part in reader.read(
                chunk.window_ids, chunk.token_ids, chunk, skip_special_tokens=skip
            )
        ]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        for chunk in chunks:
            count = None if chunk.logprobs is None else len(chunk.logprobs)
            assert count == (len(chunk.token_ids) if "logprobs" in sampling else None)
        whole = msgspec.structs.replace(chunks[-1], parser_state=chunks[0].parser_state)
        window = chunks[0].window_ids
        expected = reader.read(window, token_ids, whole, skip_special_tokens=skip)
        assert joined(parts) == expected
        assert core.parser_spec.states[chunks[0].parser_state[0]].kind == "reasoning"
        kinds |= {section.type for section in expected}
    assert kinds >= {"reasoning", "content"}


def test_a_request_that_does_not_ask_streams_the_same_tokens_and_is_not_watched(
    checkpoint: Path,
) -> None:
    core = make_core(checkpoint)
    plain, asked = (run(core, return_sections=asks) for asks in (False, True))
    assert [i for output in plain for i in output.token_ids] == [
        i for output in asked for i in output.token_ids
    ]
    assert all(output.parser_state == (0, 0) for output in plain)
    assert len(plain) == SAMPLING["max_tokens"] >= len(asked)


def test_the_offline_api_gives_sections_to_those_who_ask(tmp_path: Path) -> None:
    path = write(tmp_path, "special")
    llm = LLM(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=64)
    bias = dict.fromkeys(llm._core.tokenizer.encode("</think>", add_special_tokens=False), 50.0)
    asked = SamplingParams(temperature=0, max_tokens=3, return_sections=True, logit_bias=bias)
    plain = SamplingParams(temperature=0, max_tokens=3)
    messages = [{"role": "user", "content": "Hi"}]
    first, second = llm.chat([messages, messages], [asked, plain], use_tqdm=False)
    assert first.outputs[0].sections == [Section("content", 1, "", "</think>", 3)]
    assert first.outputs[0].text == ""
    assert second.outputs[0].sections is None
