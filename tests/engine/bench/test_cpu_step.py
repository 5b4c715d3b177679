"""The profile of a decode step on a CPU: its parts, their floors, and what it says of mistakes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.bench import ceilings, cpu_step
from engine.bench.cpu_step import CpuStep, gemm_parameters, main
from engine.core.engine_core import EngineCore
from engine.layers.linear.linear import Linear
from engine.layers.rope import DefaultRope
from engine.models.build import build_model
from engine.models.spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    Gated,
    LayerSpec,
    ModelSpec,
    NormSpec,
)
from engine.models.tensor_names import LLAMA_NAMES
from tests.factories.checkpoints import write_checkpoint
from tests.factories.forms import in_panels
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

needs_fused_layers = pytest.mark.skipif(
    not in_panels(torch.bfloat16), reason="no kernel runs whole layers on this CPU"
)
CEILINGS = {"read": 1e9, "bf16": 1e12, "int8": 2e12}
PARTS = {
    *("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"),
    *("attention", "norms", "rotary", "draw", "all else"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, dtype=torch.bfloat16)
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda: CEILINGS)


@needs_fused_layers
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_parts_are_those_of_the_step(
    path: Path, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_step, "_BUDGET", 8)  # prefilled in several steps, they wait
    profile = CpuStep(path, quantization, most=3, context=20)
    for batch in (1, 3):
        step, parts = profile.measure(batch, context=20)
        assert parts.keys() == PARTS - {"all else"}
        assert all(0 < taken < step for taken in parts.values())
    profile.core.check_integrity()
    assert not profile.core.has_unfinished_requests()


@needs_fused_layers
def test_floors_follow_from_the_shapes(path: Path) -> None:
    few, many = (
        CpuStep(path, quantization, most=1, context=20).decode_floors(1, 20, CEILINGS)
        for quantization in ("int8", None)
    )
    # Of one row the weights are read, a byte or two of each.
    assert many["down_proj"] == pytest.approx(2 * few["down_proj"])
    assert many["lm_head"] == pytest.approx(2 * few["lm_head"])
    profile = CpuStep(path, None, most=1, context=20)
    products = profile.decode_floors(10**6, 20, CEILINGS)["down_proj"] * CEILINGS["bf16"]
    spec = profile._model.spec
    assert products == pytest.approx(
        spec.num_layers * 2 * 10**6 * spec.hidden_size * spec.layers[0].mlp.size
    )


def test_gemm_parameters_are_those_of_every_kind_of_layer() -> None:
    norm = NormSpec("rms", 1e-6)
    attention = AttentionSpec(4, 2, 16, 0.25, DefaultRope(1e4), 16, qk_norm=norm, has_gate=True)
    delta = DeltaSpec(2, 4, key_dim=24, value_dim=20, kernel=4, norm_eps=1e-6)
    mixers = (attention, delta, ConvSpec(64, 3), delta, replace(attention, has_gate=False))
    layers = tuple(LayerSpec(mixer, Gated(96), norm) for mixer in mixers)
    spec = ModelSpec(
        "test", 160, 64, layers, norm, 128, "bfloat16", True, (), tensor_names=LLAMA_NAMES
    )
    meta = torch.device("meta")
    model = build_model(spec, max_model_len=128, dtype=torch.bfloat16, device=meta)
    expected: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            part = name.rpartition(".")[2]
            expected["in_proj" if part == "gates" else part] += module.weight.numel()
    assert gemm_parameters(spec) == expected


@needs_fused_layers
def test_the_command_prints_every_part_beside_its_floor(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(path), "--batches", "1,2", "--context", "20"])
    said = capsys.readouterr().out
    assert "bf16, 1 sequences of 20 tokens" in said
    assert "bf16, 2 sequences of 20 tokens" in said
    assert "reads 1.0 GB/s" in said
    assert all(said.count(f"\n| {part} ") == 2 for part in PARTS)


@needs_fused_layers
def test_a_prompt_is_a_step_of_its_own(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(path), "--prompts", "30,40"])
    said = capsys.readouterr().out
    assert "bf16, a prompt of 30 tokens" in said
    assert "bf16, a prompt of 40 tokens" in said
    assert "sequences of" not in said
    for part in PARTS:
        assert said.count(f"\n| {part} ") == (0 if part in ("lm_head", "draw") else 2)


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main([str(folder), *arguments])
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1,x"], "argument --batches: invalid"),
        (["--batches", "0"], "argument --batches: invalid"),
        (["--context", "0"], "--context: must be at least 1"),
        (["--quantization", "int3"], "argument --quantization: invalid choice"),
        ([], "missing"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, tmp_path / "missing", *arguments)


@needs_fused_layers
def test_sequences_without_room_are_refused(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "has_unfinished_requests", lambda core: False)
    monkeypatch.setattr(cpu_step, "_BUDGET", 8)
    said = refused(capsys, path, "--batches", "3", "--context", "40")
    assert "no room for 3" in said


def test_layers_that_no_kernel_runs_are_refused(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_step, "FusedLayers", type("Other", (), {}))
    said = refused(capsys, path, "--batches", "1", "--context", "8")
    assert "runs whole layers" in said
