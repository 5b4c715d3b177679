"""Checkpoints by name. The hub is a local server, asked by the real client in a process of its own,
since that reads its settings from the environment once."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.checkpoint.hub import resolve_checkpoint
from engine.checkpoint.tensor_files.headers import read_headers
from engine.demo import CHECKPOINT_DIR
from engine.errors import CheckpointError
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.gguf_files import write_gguf
from tests.factories.hub_server import hub_server
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

ROOT = Path(__file__).parents[3]

SCRIPT = """
import functools, json, os, sys
from engine.errors import CheckpointError
from engine.checkpoint.hub import resolve_checkpoint, resolve_tokenizer
resolve = {
    "all": resolve_checkpoint,
    "no weights": functools.partial(resolve_checkpoint, weights=False),
    "tokenizer": functools.partial(resolve_tokenizer, checkpoint=None),
}[os.environ.get("RESOLVE", "all")]
answers = {}
for model in sys.argv[1:]:
    try:
        answers[model] = str(resolve(model))
    except CheckpointError as error:
        answers[model] = f"error: {error}"
print(json.dumps(answers))
"""

WANTED = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "chat_template.jinja",
}
UNWANTED = {
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/params.json",
    "original/consolidated.00.pth",
    "README.md",
}
FILES = {name: f"content of {name}".encode() for name in WANTED | UNWANTED}


@dataclass
class Hub:
    """Resolves models in a fresh process against the local hub, with a cache of its own."""

    endpoint: str
    home: Path
    fetched: list[str] = field(default_factory=list)

    def resolve(self, *models: str, **environ: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        settings = {"HF_HOME": str(self.home), "HF_ENDPOINT": self.endpoint, **environ}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *models],
            env={**kept, "NO_PROXY": "127.0.0.1", **settings},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            timeout=60,
        )
        answers = json.loads(done.stdout)
        assert isinstance(answers, dict)
        return answers


@pytest.fixture(scope="module")
def gguf_parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("gguf")
    write_checkpoint(folder / "plain", vocab_size=400)
    save_tokenizer(byte_level_tokenizer(), folder / "plain")
    write_gguf(folder / "Tiny-Q8_0.gguf", folder / "plain", ["Q8_0"], tensors_per_file=15)
    parts = sorted(folder.glob("*.gguf"))
    assert len(parts) > 1
    return {f"Q8_0/{part.name}": part.read_bytes() for part in parts}


@pytest.fixture
def hub(tmp_path: Path, gguf_parts: dict[str, bytes]) -> Iterator[Hub]:
    others = ("Tiny-Q4_K.gguf", "Tiny-UD-Q8_0.gguf", "mmproj-Q8_0.gguf", "README.md")
    gguf = {**gguf_parts, **{name: name.encode() for name in others}}
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "owner/good", "lora_alpha": 4}
    repositories = {
        "owner/good": FILES | {"config.json": b"{}"},
        "owner/gated": FILES,
        "owner/gguf": gguf,
        "owner/adapter": {
            "adapter_config.json": json.dumps(adapter).encode(),
            "adapter_model.safetensors": b"weights",
        },
    }
    with hub_server(repositories, gated={"owner/gated"}) as (endpoint, fetched):
        yield Hub(endpoint, tmp_path, fetched)


def test_demo_is_bundled() -> None:
    assert resolve_checkpoint("demo") == CHECKPOINT_DIR


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert resolve_checkpoint("~/mine") == tmp_path / "mine"


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "~/nowhere", "a/b/c", "../x"])
def test_a_missing_folder_is_not_looked_up(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # elsewhere there may be one
    with refuses("invalid_checkpoint", "model", match=f"there is no folder {model}"):
        resolve_checkpoint(model)


@pytest.mark.parametrize("model", ["a b", "owner/na me", "-x", "x" * 300, "a\0b", "a--b"])
def test_a_name_that_can_be_nothing(model: str) -> None:
    with pytest.raises(CheckpointError, match="neither an existing folder nor a valid hub id"):
        resolve_checkpoint(model)


def test_a_file_in_place_of_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file; "):
        resolve_checkpoint(str(file))


def test_downloads_what_is_needed_once(hub: Hub) -> None:
    folder = Path(hub.resolve("owner/good")["owner/good"])
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == WANTED
    assert set(hub.fetched) == WANTED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.fetched.clear()
    assert hub.resolve("owner/good", HF_HUB_OFFLINE="1") == {"owner/good": str(folder)}
    assert hub.fetched == []


@pytest.mark.parametrize("kind", ["no weights", "tokenizer"])
def test_weights_are_downloaded_when_they_are_wanted(hub: Hub, kind: str) -> None:
    folder = Path(hub.resolve("owner/good", RESOLVE=kind)["owner/good"])
    assert set(hub.fetched) == WANTED - {"model.safetensors"}
    assert hub.resolve("owner/good") == {"owner/good": str(folder)}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_gguf_file_of_a_repository(hub: Hub, gguf_parts: dict[str, bytes]) -> None:
    """The kind's case does not matter; other kinds, variants and parts for images stay there."""
    cache = {"XDG_CACHE_HOME": str(hub.home / "cache")}
    asked = "owner/gguf:q8_0"
    folder = Path(hub.resolve(asked, **cache)[asked])
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert sorted(set(hub.fetched)) == sorted(gguf_parts)
    assert len(read_headers(folder)) > 20
    hub.fetched.clear()
    assert hub.resolve(asked, HF_HUB_OFFLINE="1", **cache) == {asked: str(folder)}
    assert hub.fetched == []
    hub.fetched.clear()
    answer = hub.resolve("owner/gguf:*", **cache)["owner/gguf:*"]
    assert (answer, hub.fetched) == (
        "error: model: '*' is not a GGUF quantisation suffix (for example Q4_K_M)",
        [],
    )
    answer = hub.resolve("owner/gguf:Q2_K", **cache)["owner/gguf:Q2_K"]
    assert answer.startswith("error: model: owner/gguf has no GGUF file with the suffix Q2_K")


@pytest.mark.parametrize("kind", ["all", "no weights"])
def test_an_adapter_and_its_base(hub: Hub, kind: str) -> None:
    cache = {"XDG_CACHE_HOME": str(hub.home / "cache"), "RESOLVE": kind}
    folder = Path(hub.resolve("owner/adapter", **cache)["owner/adapter"])
    of_base = WANTED - ({"model.safetensors"} if kind == "no weights" else set())
    assert {file.name for file in folder.iterdir()} == of_base | {"adapter"}
    assert set(hub.fetched) == of_base | {"adapter_config.json", "adapter_model.safetensors"}
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == b"weights"


def test_what_cannot_be_had_says_what_to_do(hub: Hub) -> None:
    answers = hub.resolve("owner/nothing", "owner/gated")
    assert answers["owner/nothing"].startswith(
        "error: model: there is no folder owner/nothing, and"
    )
    assert "check the spelling" in answers["owner/nothing"]
    assert "owner/gated is gated: accept its terms" in answers["owner/gated"]
    assert "HF_TOKEN" in answers["owner/gated"]


@pytest.mark.parametrize(
    "environ", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=["off", "down"]
)
def test_without_a_network(hub: Hub, environ: dict[str, str]) -> None:
    answer = hub.resolve("owner/good", **environ)["owner/good"]
    assert answer.startswith("error: model: there is no folder owner/good")
    assert "hub cannot be reached" in answer
    assert "check the network" in answer
