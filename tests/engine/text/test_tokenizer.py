"""Loading tokenizers, and text to ids and back."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from engine.errors import CheckpointError, RequestError, TridentError
from engine.text.chat_template import render, render_text
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from tests.engine.text.other_decoders import panicking_tokenizer, word_piece_tokenizer
from tests.factories.tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    save_tokenizer,
)


@pytest.mark.parametrize("build", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_loaded_tokenizer_equals_the_saved_one(build: Callable[[], object], tmp_path: Path) -> None:
    saved = Tokenizer(build())
    loaded = Tokenizer.from_pretrained(save_tokenizer(saved.hf_tokenizer, tmp_path))
    ids = list(range(saved.vocab_size))
    assert loaded.vocab_size == saved.vocab_size
    assert loaded.special_ids == saved.special_ids
    assert loaded.byte_fallback_ids == saved.byte_fallback_ids
    assert loaded.eos_token_id == saved.eos_token_id
    assert loaded.pad_token_id == saved.pad_token_id
    assert loaded.has_chat_template
    assert [loaded.decode([i], False) for i in ids] == [saved.decode([i], False) for i in ids]
    text = "the café, 你好 😀"
    assert loaded.encode(text) == saved.encode(text) == saved.hf_tokenizer(text)["input_ids"]


def _without_template(folder: Path) -> Path:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = None
    return save_tokenizer(tokenizer, folder)


@pytest.mark.parametrize(
    "template", ["Q: {{ messages[0].content }}", {"default": "Q: {{ messages[0].content }}"}]
)
def test_the_template_of_a_processor(template: object, tmp_path: Path) -> None:
    file = _without_template(tmp_path) / "chat_template.json"
    assert not Tokenizer.from_pretrained(tmp_path).has_chat_template
    file.write_text(json.dumps({"chat_template": template}))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.has_chat_template
    assert render_text(tokenizer, [{"role": "user", "content": "x"}]) == "Q: x"


def test_the_template_of_the_tokenizer_is_the_first(tmp_path: Path) -> None:
    file = save_tokenizer(byte_level_tokenizer(), tmp_path) / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "Q: {{ messages[0].content }}"}))
    assert "Q: " not in Tokenizer.from_pretrained(tmp_path).chat_template_text


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"chat_template": 3}', '{"chat_template": {"a": 1}}']
)
def test_a_broken_template_of_a_processor(content: str, tmp_path: Path) -> None:
    (_without_template(tmp_path) / "chat_template.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"^chat_template\.json: "):
        Tokenizer.from_pretrained(tmp_path)


def test_properties(byte_level: Detokenizer, byte_fallback: Detokenizer) -> None:
    level, fallback = byte_level.tokenizer, byte_fallback.tokenizer
    assert level.vocab_size == len(level.hf_tokenizer)
    assert level.byte_fallback_ids == frozenset()
    assert level.eos_token_id == level.pad_token_id == 0
    assert fallback.byte_fallback_ids == frozenset(range(3, 259))
    assert fallback.special_ids == {0, 1, 2}
    assert fallback.pad_token_id is None
    assert not Tokenizer(word_piece_tokenizer()).has_chat_template


def test_byte_tokens_are_text_where_the_decoder_takes_them_so() -> None:
    hf_tokenizer = byte_fallback_tokenizer()
    hf_tokenizer.backend_tokenizer.decoder = Tokenizer(
        byte_level_tokenizer()
    ).hf_tokenizer.backend_tokenizer.decoder
    assert Tokenizer(hf_tokenizer).byte_fallback_ids == frozenset()


@given(text=st.text())
def test_byte_level_text_survives_the_round_trip(byte_level: Detokenizer, text: str) -> None:
    plain = text.replace("é", "e")  # the fixture has an added token of that name
    tokenizer = byte_level.tokenizer
    assert tokenizer.decode(tokenizer.encode(plain), skip_special_tokens=False) == plain


def test_special_tokens(byte_fallback: Detokenizer) -> None:
    tokenizer = byte_fallback.tokenizer
    assert tokenizer.encode("the")[0] == 1
    assert 1 not in tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.decode(tokenizer.encode("the"), skip_special_tokens=False) == "<s> the"


def test_a_checkpoint_that_truncates_and_pads_does_neither_here(tmp_path: Path) -> None:
    hf_tokenizer = byte_level_tokenizer()
    hf_tokenizer.backend_tokenizer.enable_truncation(4)
    hf_tokenizer.backend_tokenizer.enable_padding(length=8)
    save_tokenizer(hf_tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]["max_length"] == 4
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer.encode("xyz" * 10)) == "xyz" * 10
    assert len(tokenizer.encode("x")) == 1


def test_lone_surrogates_are_refused(byte_level: Detokenizer) -> None:
    with pytest.raises(RequestError, match=r"bad_words: .*surrogate at character 2"):
        byte_level.tokenizer.encode("ab\ud83d", field="bad_words")
    with pytest.raises(RequestError, match=r"prompt: .*surrogate at character 2"):
        byte_level.tokenizer.encode("ab\ud83d")


def test_text_without_tokens_is_refused(tmp_path: Path) -> None:
    hf_tokenizer = word_piece_tokenizer()
    spec = json.loads(hf_tokenizer.backend_tokenizer.to_str())
    spec["model"]["unk_token"] = "[NONE]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(RequestError, match="prompt: cannot be tokenized"):
        Tokenizer.from_pretrained(tmp_path).encode("unheard")


def test_a_decoder_that_panics_raises_an_ordinary_error() -> None:
    """Rust's panics are no `Exception`s: they would pass all that guards a process."""
    tokenizer = Tokenizer(panicking_tokenizer())
    assert tokenizer.decode([2, 3]) == "ab"
    with pytest.raises(TridentError, match=r"the tokenizer cannot decode the tokens: .*panicked"):
        tokenizer.decode([1])


def test_token_text_is_that_inside_a_sentence(
    byte_level: Detokenizer, byte_fallback: Detokenizer
) -> None:
    level, fallback = byte_level.tokenizer, byte_fallback.tokenizer
    convert = fallback.hf_tokenizer.convert_tokens_to_ids
    assert fallback.token_text(convert("▁the")) == " the"
    assert fallback.token_text(convert("<0x41>")) == "A"
    assert fallback.token_text(convert("<0xE4>")) == "\N{REPLACEMENT CHARACTER}"
    assert fallback.token_text(convert("</s>")) == "</s>"
    assert level.token_text(level.encode("😃")[0]) in ("\N{REPLACEMENT CHARACTER}", " ")
    assert level.token_text(level.vocab_size) == ""
    assert byte_fallback.token_bytes(convert("<0xE4>")) == b"\xe4"
    assert byte_fallback.token_bytes(convert("▁the")) == b" the"


def test_the_bytes_of_tokens_join_to_the_text(byte_level: Detokenizer) -> None:
    text = "a😃你b"
    parts = map(byte_level.token_bytes, byte_level.tokenizer.encode(text))
    assert b"".join(part or b"?" for part in parts) == text.encode()


def test_loading_takes_no_torch(tmp_path: Path) -> None:
    """The tokenizer and detokenizer stages are processes of their own: torch would fill each."""
    save_tokenizer(byte_fallback_tokenizer(), tmp_path)
    script = f"""
        import sys
        from pathlib import Path
        from engine.config.engine_config import EngineConfig
        from engine.text.chat_template import render
        from engine.request.generation_defaults import GenerationDefaults
        from engine.text.detokenizer import Detokenizer
        from engine.text.stop.checker import StopChecker
        from engine.text.tokenizer import Tokenizer
        assert "transformers" not in sys.modules
        tokenizer = Tokenizer.from_pretrained(Path({str(tmp_path)!r}))
        GenerationDefaults.from_checkpoint(Path({str(tmp_path)!r}), tokenizer, 400, EngineConfig())
        render(tokenizer, [{{"role": "user", "content": "hi"}}])
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


def test_missing_folder_and_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json$"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        CheckpointError, match=r"no tokenizer\.json, only tokenizer\.model of a slow"
    ):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": '])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{name}: "):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [('"BPE"', '"Unheard"'), ('"vocab"', '"words"'), ('"ByteLevel"', '"Unheard"')]
)
def test_a_tokenizer_of_unknown_parts_is_refused(tmp_path: Path, old: str, new: str) -> None:
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    assert old in text
    (tmp_path / "tokenizer.json").write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: cannot be loaded"):
        Tokenizer.from_pretrained(tmp_path)


def test_code_in_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    assert Tokenizer.from_pretrained(tmp_path).eos_token_id == 0


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("starts", [False, True])
def test_a_text_starts_with_the_token_that_tokenizer_json_says(
    starts: bool, config: dict[str, bool], tmp_path: Path
) -> None:
    """Llama's and Gemma's do, those of GPT-2 and Qwen do not; as transformers has it."""
    hf_tokenizer = byte_fallback_tokenizer()
    hf_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A" if starts else "$A", special_tokens=[("<s>", 1)]
    )
    save_tokenizer(hf_tokenizer, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, **config}))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    plain = tokenizer.encode("the café", add_special_tokens=False)
    assert 1 not in plain
    assert tokenizer.encode("the café") == [1] * starts + plain
    assert AutoTokenizer.from_pretrained(tmp_path)("the café")["input_ids"] == [1] * starts + plain
    # A chat template writes its own.
    assert 1 not in render(tokenizer, [{"role": "user", "content": "the"}])
