"""The folder that stands for an adapter, and adapters that are not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.hub import resolve_checkpoint
from engine.checkpoint.tensor_files.headers import read_headers
from engine.errors import CheckpointError, UnsupportedError
from engine.models.registry import read_model_spec
from engine.text.load_tokenizer import Tokenizer
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.tokenizers import byte_level_tokenizer

Q = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {f"{Q}.lora_A.weight": torch.ones(2, 64), f"{Q}.lora_B.weight": torch.ones(64, 2)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    write_checkpoint(folder, vocab_size=400)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trident" / "lora"


def write(base: Path, tensors: dict[str, torch.Tensor] | None = None, /, **config: Any) -> Path:
    """Write an adapter beside `base`; without tensors only its configuration."""
    folder = base.parent / "adapter"
    folder.mkdir(exist_ok=True)
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": 2,
        "lora_alpha": 4,
        "qalora_group_size": 16,  # PEFT writes it into each
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    if tensors is not None:
        save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_it_has_what_the_base_has(base: Path, cache: Path) -> None:
    folder = resolve_checkpoint(str(write(base, PAIR)))
    assert folder.parent == cache
    assert {file.name for file in folder.iterdir()} == {
        "adapter",
        *(file.name for file in base.iterdir()),
    }
    assert read_headers(folder).keys() == read_headers(base).keys()
    assert resolve_checkpoint(str(base.parent / "adapter"), weights=False) == folder


def test_its_own_tokenizer_replaces_all_files_of_the_other(base: Path) -> None:
    adapter = write(base, PAIR)
    own = byte_level_tokenizer()
    own.chat_template = "mine"
    own.save_pretrained(adapter)
    (base / "chat_template.jinja").write_text("theirs")
    (base / "added_tokens.json").write_text("{}")
    folder = resolve_checkpoint(str(adapter))
    assert (folder / "chat_template.jinja").read_text() == "mine"
    assert not (folder / "added_tokens.json").exists()
    assert (folder / "config.json").is_file()
    Tokenizer.from_pretrained(folder)


def test_a_tensor_of_its_own_replaces_that_of_the_base(base: Path) -> None:
    norm = {"base_model.model.model.norm.weight": torch.full((64,), 2.0)}
    found = read_headers(resolve_checkpoint(str(write(base, {**PAIR, **norm}))))
    assert found["model.norm.weight"].file.name == "adapter_model.safetensors"
    assert found["lm_head.weight"].file.name == "model.safetensors"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("lora_bias", True),
        ("alora_invocation_tokens", [1]),
        ("init_lora_weights", "pissa_niter_4"),
    ],
)
def test_other_kinds_are_refused_by_name(base: Path, field: str, value: object) -> None:
    with refuses("unsupported", f"adapter_config.json: {field}"):
        resolve_checkpoint(str(write(base, PAIR, **{field: value})))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_alpha", None),
        ("lora_alpha", "x"),
        ("alpha_pattern", {"q(": 1}),
        ("base_model_name_or_path", None),
        ("base_model_name_or_path", "/no/such"),
    ],
)
def test_broken_configurations(base: Path, field: str, value: object) -> None:
    with refuses("invalid_checkpoint", f"adapter_config.json: {field}"):
        resolve_checkpoint(str(write(base, PAIR, **{field: value})))


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        (None, r"adapter_model\.safetensors: not found in .*adapter; safetensors is required"),
        ({f"{Q}.lora_A.weight": torch.ones(2, 64)}, r"q_proj: has no lora_B"),
        (
            {**PAIR, f"{Q}.lora_B.weight": torch.ones(64, 3)},
            r"lora_A \[2, 64\] and lora_B",
        ),
        ({**PAIR, f"{Q}.lora_A.weight": torch.ones(2, 64).int()}, "got dtype I32"),
        ({**PAIR, f"{Q}.lora_magnitude_vector": torch.ones(7)}, r"must have shape \[64\]"),
    ],
)
def test_broken_tensors(base: Path, tensors: dict[str, torch.Tensor] | None, error: str) -> None:
    folder = resolve_checkpoint(str(write(base, tensors)))
    with pytest.raises(CheckpointError, match=error):
        read_headers(folder)


def test_an_embedding_is_refused(base: Path) -> None:
    tensors = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 400)}
    folder = resolve_checkpoint(str(write(base, {**PAIR, **tensors})))
    with pytest.raises(UnsupportedError, match=r"embed_tokens\.lora_embedding_A: "):
        read_headers(folder)


@pytest.mark.parametrize("config", [{}, {"text_config": None}, {"text_config": [1]}])
@pytest.mark.parametrize("shape", [(), (7,), (7, 64), (0, 64)])
def test_a_vocabulary_of_what_is_broken(
    base: Path, config: dict[str, Any], shape: tuple[int, ...]
) -> None:
    (base / "config.json").write_text(json.dumps(config))
    tensors = {"base_model.model.model.embed_tokens.weight": torch.ones(shape)}
    folder = resolve_checkpoint(str(write(base, {**PAIR, **tensors})))
    with pytest.raises(CheckpointError, match=r"^config\.json: "):
        read_model_spec(folder)


def test_of_an_adapter(base: Path) -> None:
    adapter = write(base, PAIR)
    with pytest.raises(UnsupportedError, match="is itself an adapter"):
        resolve_checkpoint(str(write(base, base_model_name_or_path=str(adapter))))


def test_of_a_folder_without_a_model(base: Path) -> None:
    (base / "config.json").unlink()
    with refuses("invalid_checkpoint", "adapter_config.json: base_model_name_or_path"):
        resolve_checkpoint(str(write(base, PAIR)))
