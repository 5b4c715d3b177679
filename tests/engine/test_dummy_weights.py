"""Random weights for measurements (`load_format: dummy`): no file is opened, and the model runs."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.models.build import build_model
from engine.models.causal_lm import CausalLM
from engine.models.registry import read_model_spec
from engine.models.sharding import shard
from engine.models.tensor_names import LLAMA_NAMES
from engine.weights import fill_with_random_weights, initialise_weights, load_weights
from engine.weights.matching import destinations
from tests.factories import paged_model
from tests.factories.checkpoints import ARCHITECTURES, write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel

CPU = torch.device("cpu")
TOKENS = [(7 * i + i // 3) % 160 for i in range(90)]


def shape_only(folder: Path, architecture: str = "LlamaForCausalLM", **settings: Any) -> Path:
    """Write a checkpoint without weights to `folder`."""
    write_checkpoint(folder, architecture, **settings)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return folder


def build(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Return a model whose parameters hold what a fill that leaves something out would leave."""
    model = build_model(read_model_spec(path), max_model_len=16, dtype=dtype, device=CPU)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    return model


def filled(path: Path, seed: int) -> dict[str, Tensor]:
    model = build(path)
    fill_with_random_weights(model, seed)
    return dict(model.named_parameters())


def dummy_logits(path: Path, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the logits of `TOKENS`, computed by a model with dummy weights."""

    def fill(model: CausalLM, path: Path, *, whole: CausalLM | None) -> None:
        initialise_weights(model, path, load_format="dummy", seed=seed)

    with (
        patch.object(paged_model, "load_weights", fill),
        patch.object(paged_model, "as_stored", lambda spec, _: spec),
    ):
        return PagedModel(path, dtype=dtype).logits(TOKENS, chunks=[40, 1, 49])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_finite_and_varied(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    logits = dummy_logits(shape_only(tmp_path, architecture), 0, dtype)
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2
    assert len(logits.argmax(-1).unique()) > len(TOKENS) / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["lfm2", "lfm2-moe", "qwen3.5", "qwen3.5-moe"])
def test_logits_of_hybrids_are_finite_and_varied(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    architecture, fields = FAMILIES[family]
    logits = dummy_logits(shape_only(tmp_path, architecture, **fields), 0, dtype)
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 4  # norms with a unit offset scale by 2
    assert len(logits.argmax(-1).unique()) > len(TOKENS) / 4


def test_many_layers_and_tied_embeddings_too(tmp_path: Path) -> None:
    path = shape_only(tmp_path, tie_word_embeddings=True, num_hidden_layers=40)
    logits = dummy_logits(path, 0, torch.float16)
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2
    assert len(logits.argmax(-1).unique()) >= 5  # attention makes positions alike, in many layers


def test_the_seed_determines_the_values(tmp_path: Path) -> None:
    path = shape_only(tmp_path, "Qwen2ForCausalLM")
    state = torch.random.get_rng_state()
    one, same, other = filled(path, 3), filled(path, 3), filled(path, 4)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, parameter in one.items():
        assert torch.equal(parameter, same[name]), name
        assert torch.equal(parameter, other[name]) == (parameter.dim() == 1), name


def test_values_have_the_size_that_keeps_activations(tmp_path: Path) -> None:
    parameters = filled(shape_only(tmp_path, "Qwen2ForCausalLM"), 0)
    for name, parameter in parameters.items():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            scaled = parameter * parameter.shape[-1] ** 0.5
            assert scaled.std().item() == pytest.approx(1, abs=0.05), name
            assert scaled.mean().item() == pytest.approx(0, abs=0.05), name
    matrices = [p for p in parameters.values() if p.dim() == 2]
    assert len({round(matrix[0, 0].item(), 6) for matrix in matrices}) == len(matrices)


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    model = build(shape_only(tmp_path), torch.bfloat16)
    reports: list[tuple[int, int]] = []
    initialise_weights(
        model, tmp_path, load_format="dummy", seed=0, on_progress=lambda *r: reports.append(r)
    )
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert {of for _, of in reports} == {total}
    assert reports[-1] == (total, total)


def test_auto_loads_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    expected, model = build(tmp_path), build(tmp_path)
    load_weights(expected, tmp_path)
    reports: list[tuple[int, int]] = []
    initialise_weights(
        model, tmp_path, load_format="auto", seed=0, on_progress=lambda *r: reports.append(r)
    )
    wanted = destinations(expected, LLAMA_NAMES)
    for name, found in destinations(model, LLAMA_NAMES).items():
        assert torch.equal(found.tensor, wanted[name].tensor), name
    assert reports[-1][0] == reports[-1][1]


def test_the_setting() -> None:
    assert EngineConfig().load_format == "auto"
    assert EngineConfig.parse({"load_format": "dummy"}).load_format == "dummy"
    with pytest.raises(ConfigError, match="load_format"):
        EngineConfig.parse({"load_format": "pt"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_no_second_copy_is_made() -> None:
    def layer() -> torch.nn.Linear:
        return torch.nn.Linear(8192, 8192, bias=False, device="cuda", dtype=torch.bfloat16)

    first, second = layer().requires_grad_(False), layer().requires_grad_(False)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fill_with_random_weights(first, 1)
    fill_with_random_weights(second, 1)
    assert torch.cuda.max_memory_allocated() - before < first.weight.nbytes / 8
    assert torch.equal(first.weight, second.weight)
    assert (first.weight.float() * 8192**0.5).std().item() == pytest.approx(1, abs=0.01)


def test_dummy_weights_of_ranks_are_equal_where_they_are_not_cut(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "MixtralForCausalLM")
    spec = read_model_spec(tmp_path)
    whole = build_model(spec, max_model_len=16, dtype=torch.float32, device=torch.device("meta"))
    ranks = []
    for rank in range(2):
        part = shard(spec, rank, 2)
        model = build_model(part, max_model_len=16, dtype=torch.float32, device=CPU)
        fill_with_random_weights(model, 3, whole=whole)
        ranks.append(dict(model.named_parameters()))
    router, queries = "model.layers.0.mlp.router.weight", "model.layers.0.self_attn.qkv_proj.weight"
    assert torch.equal(*(rank[router] for rank in ranks))
    assert not torch.equal(*(rank[queries] for rank in ranks))
