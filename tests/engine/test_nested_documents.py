"""Documents that nest up to a million levels are refused by name, wherever one is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.config import read_config
from engine.checkpoint.json_files import read_object
from engine.checkpoint.lora.config import read_lora_config
from engine.checkpoint.tensor_files.headers import read_headers
from engine.config.engine_config import EngineConfig
from engine.errors import CheckpointError, TridentError
from engine.execution import cpu_choices
from engine.json_reader import MAX_DEPTH, parse_json, parse_json_fields
from engine.launch import server_log
from engine.models.pooling import task_of
from engine.quantization.modelopt import read_quantization_file
from engine.quantization.registry import read_quantization
from engine.service.parameters import decode_parameters, parse_sampling_parameters
from engine.service.stub.engine_inputs import parse_options
from engine.text.chat_parameters import ChatParameters
from engine.text.chat_template import parse_messages, render_text
from engine.text.grammar.json_schema import prepare_schema
from engine.text.grammar.request_formats import parse_structured_outputs
from engine.text.grammar.spec import GrammarTextError
from engine.text.grammar.structural_tags import StructuralTags
from engine.text.tokenizer import Tokenizer
from tests.factories.configurations import LLAMA, QWEN2, read_configuration
from tests.factories.tokenizers import byte_level_tokenizer

DEPTHS = (100, MAX_DEPTH, MAX_DEPTH + 1, 1_000, 100_000, 1_000_000)
BRACKETS = (("[", "]"), ('{"a":', "}"))


def nested(depth: int, brackets: tuple[str, str]) -> str:
    return brackets[0] * depth + "1" + brackets[1] * depth


def write(name: str, *, whole: bool = False) -> Callable[[Path, str], Path]:
    """Return what writes a file `name` with a nested value, alone or in a field that has none."""

    def write_file(folder: Path, text: str) -> Path:
        content = text if whole else f'{{"chat": {text}}}'
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
        return folder

    return write_file


def adapter(folder: Path, text: str) -> None:
    (folder / "adapter_config.json").write_text(f'{{"peft_type": {text}}}', encoding="utf-8")
    read_lora_config(folder)


def safetensors(folder: Path, text: str) -> None:
    header = f'{{"__metadata__": {{"a": {text}}}}}'.encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    read_headers(folder)


def index(folder: Path, text: str) -> None:
    file = folder / "model.safetensors.index.json"
    file.write_text(f'{{"weight_map": {text}}}', encoding="utf-8")
    read_headers(folder)


def pooling(folder: Path, text: str) -> None:
    (folder / "modules.json").write_text(text, encoding="utf-8")
    task_of(folder, "Qwen3ForCausalLM")


def tokenizer_file(name: str) -> Callable[[Path, str], None]:
    def read(folder: Path, text: str) -> None:
        for each in ("tokenizer.json", name):
            (folder / each).write_text(f'{{"chat_template": {text}}}', encoding="utf-8")
        Tokenizer.from_pretrained(folder)

    return read


READERS: dict[str, Callable[[Path, str], Any]] = {
    "parse_json": lambda folder, text: parse_json(text, "x", TridentError),
    "parse_json_fields": lambda folder, text: parse_json_fields(text, "x", TridentError),
    "config.json": lambda folder, text: read_config(write("config.json")(folder, text)),
    "config.json alone": lambda folder, text: read_config(
        write("config.json", whole=True)(folder, text)
    ),
    "generation_config.json": lambda folder, text: read_object(
        write("generation_config.json")(folder, text) / "generation_config.json"
    ),
    "quantization": lambda folder, text: read_quantization(write("config.json")(folder, text)),
    "hf_quant_config.json": lambda folder, text: read_quantization_file(
        write("hf_quant_config.json")(folder, text)
    ),
    "adapter_config.json": adapter,
    "safetensors": safetensors,
    "index": index,
    "modules.json": pooling,
    **{
        name: tokenizer_file(name)
        for name in (
            *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
            *("added_tokens.json", "chat_template.json"),
        )
    },
    "engine.json": lambda folder, text: EngineConfig.load(
        write("engine.json", whole=True)(folder, f'{{"hf_overrides": {text}}}') / "engine.json", {}
    ),
    **{
        name: lambda folder, text, name=name: EngineConfig.parse({name: text})
        for name in ("hf_overrides", "override_generation_config", "speculative_config")
    },
    "sampling_parameters": lambda folder, text: parse_sampling_parameters(text),
    "request parameters": lambda folder, text: decode_parameters(f'{{"a": {text}}}'),
    "chat_parameters": lambda folder, text: ChatParameters.parse(f'{{"tools": {text}}}'),
    "chat_template_kwargs": lambda folder, text: ChatParameters.parse(
        f'{{"chat_template_kwargs": {text}}}'
    ),
    "messages": lambda folder, text: parse_messages(text),
    "message": lambda folder, text: parse_messages(f'[{{"role": "user", "content": {text}}}]'),
    "json schema": lambda folder, text: prepare_schema(f'{{"enum": [{text}]}}', strict=True),
    "structural tag": lambda folder, text: StructuralTags(SimpleNamespace(), strict=True).read(  # type: ignore[arg-type]
        f'{{"format": {text}}}'
    ),
    **{
        name: lambda folder, text, name=name: parse_structured_outputs({name: text})
        for name in ("choice", "json_object")
    },
}


def refusal(read: Callable[[], object]) -> str:
    """Return the text of the error with which `read` refuses; "" if it does not."""
    try:
        read()
    except (TridentError, GrammarTextError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("brackets", BRACKETS, ids=["lists", "objects"])
@pytest.mark.parametrize("reader", READERS)
def test_reader_of_a_nested_document_refuses_by_name(
    reader: str, brackets: tuple[str, str], depth: int, tmp_path: Path
) -> None:
    said = refusal(lambda: READERS[reader](tmp_path, nested(depth, brackets)))
    assert len(said) < 1_000
    if depth > MAX_DEPTH:
        assert re.search(
            r"nested (too deeply|deeper than)|must be|characters; at most|corrupt", said
        ), said


@pytest.mark.parametrize("brackets", BRACKETS, ids=["lists", "objects"])
def test_config_nested_too_deeply_names_the_file(brackets: tuple[str, str], tmp_path: Path) -> None:
    text = nested(100_000, brackets)
    with pytest.raises(CheckpointError, match=r"config\.json: is nested too deeply"):
        read_config(write("config.json")(tmp_path, text))
    assert parse_json(nested(MAX_DEPTH, brackets), "x", TridentError)
    with pytest.raises(TridentError, match=r"^x: is nested too deeply"):
        parse_json(nested(MAX_DEPTH + 1, brackets), "x", TridentError)


@pytest.mark.parametrize("depth", DEPTHS)
def test_message_between_stages_that_is_nested_is_refused(depth: int) -> None:
    for packed in (b"\x91" * depth + b"\x01", b"\x81\xa1a" * depth + b"\x01"):
        data = {"response_options": np.frombuffer(packed, np.uint8)}
        assert refusal(partial(parse_options, data, len(packed)))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("brackets", BRACKETS, ids=["lists", "objects"])
def test_line_of_the_log_that_is_nested_stays_as_it_is(
    brackets: tuple[str, str], depth: int
) -> None:
    line = f'{{"ts": {nested(depth, brackets)}}}'
    assert server_log.parse(line).text == line


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("begin", "middle", "end"),
    [
        ("{{ ", "(1)", " }}"),
        ("{{ ", "[1]", " }}"),
        ("{{ ", "{1:2}", " }}"),
        ("{{ ", "-1", " }}"),
        ("{{ ", "not x", " }}"),
        ("{{ ", "f(x)", " }}"),
        ("", "{% if x %}y{% endif %}", ""),
        ("", "{% for x in y %}z{% endfor %}", ""),
    ],
)
def test_chat_template_that_is_nested_is_refused_or_rendered(
    begin: str, middle: str, end: str, depth: int
) -> None:
    size = min(depth, 100_000)
    left, right = middle[: len(middle) // 2], middle[len(middle) // 2 :]
    source = begin + left * size + right * size + end
    tokenizer = Tokenizer(byte_level_tokenizer()).with_chat_template(source)
    messages = [{"role": "user", "content": "a"}]
    assert len(refusal(lambda: render_text(tokenizer, messages))) < 1_000


@pytest.mark.parametrize("family", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("brackets", BRACKETS, ids=["lists", "objects"])
def test_fields_of_a_nested_value_are_refused_by_name(
    family: dict[str, Any], brackets: tuple[str, str], tmp_path: Path
) -> None:
    deep = json.loads(nested(MAX_DEPTH - 1, brackets))
    extra = ("rope_scaling", "rope_parameters", "head_dim", "sliding_window", "layer_types")
    for name in (*family, *extra, "eos_token_id", "quantization_config"):
        said = refusal(partial(read_configuration, tmp_path, {**family, name: deep}))
        assert "config.json" in said or not said


def test_measurements_of_a_nested_file_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "trident").mkdir()
    for brackets in BRACKETS:
        text = f'{{"a": {nested(1_000_000, brackets)}}}'
        (tmp_path / "trident" / "measurements.json").write_text(text, encoding="utf-8")
        assert cpu_choices.remembered("x", lambda: 3, int) == 3
