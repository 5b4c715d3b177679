import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import CheckpointError
from engine.models.build import build_model
from engine.models.causal_lm import CausalLM
from engine.models.registry import read_model_spec
from engine.weights import INDEX, SINGLE, as_stored, load_weights
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.exact import ExactModel, assert_as_accurate, decoded_logits
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel
from tests.factories.quantized import change_config

CPU = torch.device("cpu")
TOKENS = random.Random(0).choices(range(160), k=30)


def _build(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = as_stored(read_model_spec(path), path)
    return build_model(config, max_model_len=16, dtype=dtype, device=CPU)


def _load(path: Path, **settings: Any) -> CausalLM:
    model = _build(path)
    load_weights(model, path, **settings)
    return model


def _rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE)


def _check_logits(path: Path, reference: PreTrainedModel) -> None:
    """Assert that the checkpoint in `path` is `reference`."""
    found, theirs = PagedModel(path).logits(TOKENS), decoded_logits(reference, TOKENS)
    assert_as_accurate(found, theirs, ExactModel(reference).logits(TOKENS))


def test_projections_are_stacked_in_order(tmp_path: Path) -> None:
    state = write_checkpoint(tmp_path, "Qwen2ForCausalLM").state_dict()
    layer = _load(tmp_path).model.layers[1]
    prefix = "model.layers.1."
    for kind in ("weight", "bias"):
        parts = [state[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(getattr(layer.self_attn.qkv_proj, kind), torch.cat(parts))
    parts = [state[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(parts))
    assert layer.self_attn.o_proj.bias is None
    assert not any(parameter.requires_grad for parameter in _load(tmp_path).parameters())


def test_sharded_equals_single(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path / "single")
    write_checkpoint(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert not (tmp_path / "sharded" / SINGLE).exists()
    single, sharded = _load(tmp_path / "single"), _load(tmp_path / "sharded")
    for (name, left), right in zip(single.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(left, right), name
    _check_logits(tmp_path / "sharded", reference)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_casts_to_the_dtype_of_the_model(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    state = write_checkpoint(tmp_path, dtype=stored).state_dict()
    model = _build(tmp_path, wanted)
    load_weights(model, tmp_path)
    weight = model.model.layers[2].mlp.down_proj.weight
    assert weight.dtype == wanted
    assert torch.equal(weight, state["model.layers.2.mlp.down_proj.weight"].to(wanted))


@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_progress_reaches_the_total(max_shard_size: str, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, max_shard_size=max_shard_size, dtype=torch.bfloat16)
    reports: list[tuple[int, int]] = []
    _load(tmp_path, on_progress=lambda loaded, total: reports.append((loaded, total)))
    total = 2 * sum(tensor.numel() for tensor in reference.state_dict().values())
    assert {of for _, of in reports} == {total}
    assert [loaded for loaded, _ in reports] == sorted({loaded for loaded, _ in reports})
    assert reports[-1] == (total, total)


class TestTiedEmbeddings:
    def test_head_absent(self, tmp_path: Path) -> None:
        reference = write_checkpoint(tmp_path, tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(tmp_path / SINGLE)
        assert _load(tmp_path).lm_head is None
        _check_logits(tmp_path, reference)

    def test_equal_head_present(self, tmp_path: Path) -> None:
        reference = write_checkpoint(tmp_path, tie_word_embeddings=True)
        embedding = reference.state_dict()["model.embed_tokens.weight"]
        _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
        _check_logits(tmp_path, reference)

    def test_only_the_head_present(self, tmp_path: Path) -> None:
        reference = write_checkpoint(tmp_path, tie_word_embeddings=True)
        _rewrite(
            tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")})
        )
        _check_logits(tmp_path, reference)

    @pytest.mark.parametrize("family", ["llama", "mistral3-vision"])
    def test_another_head_present(
        self, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        architecture, fields = FAMILIES[family]
        reference = write_checkpoint(tmp_path, architecture, **fields, tie_word_embeddings=False)
        change_config(tmp_path, tie_word_embeddings=True)
        _check_logits(tmp_path, reference)
        assert "lm_head.weight differs from " in caplog.text

    def test_another_head_of_a_wrong_shape(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, tie_word_embeddings=True)
        _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(150, 64)}))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: has shape \[150, 64\]"):
            _load(tmp_path)

    def test_untied_head_absent(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        _rewrite(tmp_path, lambda t: t.pop("lm_head.weight"))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: missing"):
            _load(tmp_path)


class TestBrokenTensors:
    def test_missing(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        _rewrite(tmp_path, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
        with pytest.raises(CheckpointError, match=r"^model\.layers\.1\.self_attn\.k_proj\.weight"):
            _load(tmp_path)

    def test_unknown(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        _rewrite(tmp_path, lambda t: t.update({"model.layers.3.extra": torch.ones(1)}))
        with refuses("invalid_checkpoint", "model.layers.3.extra"):
            _load(tmp_path)

    def test_bias_that_the_configuration_does_not_mention(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        name = "model.layers.0.self_attn.q_proj.bias"
        _rewrite(tmp_path, lambda t: t.update({name: torch.ones(64)}))
        with refuses("invalid_checkpoint", name):
            _load(tmp_path)

    @pytest.mark.parametrize("leftover", ["inv_freq", "cos_cached"])  # ColossalAI wrote the latter
    def test_harmless_leftover(self, leftover: str, tmp_path: Path) -> None:
        reference = write_checkpoint(tmp_path)
        name = f"model.layers.0.self_attn.rotary_emb.{leftover}"
        _rewrite(tmp_path, lambda t: t.update({name: torch.ones(8)}))
        _check_logits(tmp_path, reference)

    def test_wrong_shape_leaves_the_model_untouched(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        name = "model.layers.2.mlp.up_proj.weight"
        _rewrite(tmp_path, lambda t: t.update({name: torch.ones(95, 64)}))
        model = _build(tmp_path)
        for parameter in model.parameters():
            parameter.fill_(7.0)
        with refuses("invalid_checkpoint", name, match=r"\[95, 64\].*\[96, 64\]"):
            load_weights(model, tmp_path)
        assert all((parameter == 7.0).all() for parameter in model.parameters())

    def test_integers(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        name = "model.norm.weight"
        _rewrite(tmp_path, lambda t: t.update({name: torch.ones(64, dtype=torch.int8)}))
        with refuses("invalid_checkpoint", name, match="has dtype I8"):
            _load(tmp_path)


class TestBrokenFiles:
    def _sharded(self, path: Path) -> list[Path]:
        write_checkpoint(path, max_shard_size="60KB")
        return sorted(path.glob("*.safetensors"))

    def _edit_index(self, path: Path, change: Callable[[dict[str, Any]], object]) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index)
        (path / INDEX).write_text(json.dumps(index))

    def test_missing_shard(self, tmp_path: Path) -> None:
        shard = self._sharded(tmp_path)[1]
        shard.unlink()
        with refuses("invalid_checkpoint", shard.name):
            _load(tmp_path)

    def test_shard_without_a_promised_tensor(self, tmp_path: Path) -> None:
        shards = self._sharded(tmp_path)
        tensors = load_file(shards[0])
        name = next(iter(tensors))
        tensors.pop(name)
        save_file(tensors, shards[0])
        with refuses("invalid_checkpoint", name, match=f"{shards[0].name}"):
            _load(tmp_path)

    def test_tensor_in_two_shards(self, tmp_path: Path) -> None:
        shards = self._sharded(tmp_path)
        first, second = load_file(shards[0]), load_file(shards[1])
        name = next(iter(first))
        save_file({**second, name: first[name]}, shards[1])
        with refuses("invalid_checkpoint", name):
            _load(tmp_path)

    @pytest.mark.parametrize("file", ["../secret.safetensors", "weights.bin", "/etc/passwd"])
    def test_index_that_names_another_kind_of_file(self, file: str, tmp_path: Path) -> None:
        self._sharded(tmp_path)
        self._edit_index(tmp_path, lambda i: i["weight_map"].update({"lm_head.weight": file}))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: must name a \.safetensors"):
            _load(tmp_path)

    def test_index_without_a_map(self, tmp_path: Path) -> None:
        self._sharded(tmp_path)
        self._edit_index(tmp_path, lambda i: i.pop("weight_map"))
        with refuses("invalid_checkpoint", f"{INDEX}: weight_map"):
            _load(tmp_path)

    def test_index_that_is_no_json(self, tmp_path: Path) -> None:
        self._sharded(tmp_path)
        (tmp_path / INDEX).write_text("{")
        with pytest.raises(CheckpointError, match="is not valid JSON"):
            _load(tmp_path)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: b"",
            lambda data: data[:5],
            lambda data: data[:-1000],
            lambda data: b"\xff" * 8 + data[8:],
            lambda data: data[:8] + b"}" + data[9:],
        ],
        ids=["empty", "cut-in-header", "truncated", "huge-header", "broken-header"],
    )
    def test_corrupt_file(self, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        file = tmp_path / SINGLE
        file.write_bytes(damage(file.read_bytes()))
        with pytest.raises(CheckpointError, match=f"{SINGLE}: corrupt or truncated"):
            _load(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
    def test_pickles_are_never_opened(self, name: str, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        (tmp_path / SINGLE).rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"pickled weights .{name}.*{SINGLE}"):
            _load(tmp_path)

    def test_no_weights_at_all(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        (tmp_path / SINGLE).unlink()
        with pytest.raises(CheckpointError, match=f"has neither {SINGLE} nor {INDEX}"):
            _load(tmp_path)
