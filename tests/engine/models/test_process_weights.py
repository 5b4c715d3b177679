"""What becomes of the projections of a loaded model: which form, how exact, and in what memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine import LLM, SamplingParams
from engine.config.setting_types import Quantization
from engine.errors import InsufficientMemoryError
from engine.execution.memory import kv_cache_plan
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.layers.linear.int8 import Int8Linear, multiplies_int8
from engine.layers.linear.linear import Linear
from engine.layers.linear.onednn import OneDnnLinear, can_pack
from engine.models import linear_methods, process_weights
from engine.models.process_weights import (
    WeightProcessor,
    check_quantization,
    num_bytes_while_loading,
)
from kernels.cpu import linear as panels
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.families import FAMILIES
from tests.factories.forms import FLOATS, in_panels, quantizes, rounding, runs_panels
from tests.factories.paged_model import PagedModel
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

CPU = torch.device("cpu")
PACKABLE = [dtype for dtype in FLOATS if can_pack(dtype)]
TOKENS = [(7 * i + i // 3) % 160 for i in range(90)]

each_kernels = pytest.mark.parametrize("ours", [False, True], ids=["oneDNN", "ours"])


def _choose(
    monkeypatch: pytest.MonkeyPatch, ours: bool, dtype: torch.dtype, *, int8: bool = False
) -> None:
    """Have oneDNN's products serve, or ours; skip where this machine has none for `dtype`."""
    if ours:
        if not runs_panels(dtype):
            pytest.skip(f"our kernels are not for {dtype} on this CPU, or not built")
        monkeypatch.setattr(panels, "serves", panels.runs)
    if not ours:
        monkeypatch.setattr(panels, "serves", lambda weight, device: False)
        if not (multiplies_int8() if int8 else can_pack(dtype)):
            pytest.skip(f"oneDNN has no products of {'int8' if int8 else dtype} on this CPU")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices keep the size of the activations: no softmax magnifies an error."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(
        folder, "Qwen2ForCausalLM", tie_word_embeddings=request.param, initializer_range=64**-0.5
    )
    return folder


def logits(path: Path, dtype: torch.dtype, *, convert: bool, **settings: Any) -> Tensor:
    model = PagedModel(path, dtype=dtype)
    if convert:
        WeightProcessor(model.model, settings.get("quantization")).finish()
    return model.logits(TOKENS, chunks=[40, 1, 3, 46])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    assert found.isfinite().all()
    return ((found - wanted).norm() / wanted.norm()).item()


@each_kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_model_computes_the_same_with_packed_weights(
    path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    _choose(monkeypatch, ours, dtype)
    found, wanted = (logits(path, dtype, convert=convert) for convert in (True, False))
    # Each of the 13 products may be rounded to the other side: independent errors.
    assert relative_error(found, wanted) < 13**0.5 * 2 * rounding(dtype) + 1e-5


@each_kernels
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_quantised_state_mixers_keep_gates_and_convolution_as_floats(
    family: str,
    quantization: Quantization,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ours: bool,
) -> None:
    if quantization == "int4" and not ours:
        pytest.skip("oneDNN has no products of 4 bits")
    _choose(monkeypatch, ours, torch.bfloat16, int8=True)
    architecture, fields = FAMILIES[family]
    write_checkpoint(tmp_path, architecture, **fields, initializer_range=64**-0.5)
    wanted = PagedModel(tmp_path, dtype=torch.bfloat16).logits(TOKENS)
    model = PagedModel(tmp_path, dtype=torch.bfloat16)
    WeightProcessor(model.model, quantization).finish()
    found = model.logits(TOKENS, chunks=[40, 1, 3, 46])
    assert 1e-3 < relative_error(found, wanted) < (0.2 if quantization == "int8" else 0.8)
    mixers = [layer.state_mixer for layer in model.model.model.layers]
    for mixer in filter(None, mixers):
        assert mixer.conv_weight.dtype == torch.bfloat16
        for linear in (mixer.in_proj, mixer.out_proj):
            if ours:
                assert linear.tensors()["weight"].dtype == torch.uint8
            else:
                assert isinstance(linear, Int8Linear)
        if family == "lfm2":
            continue
        if ours:
            assert mixer.gates.tensors()["weight"].dtype == torch.bfloat16
        else:
            assert isinstance(mixer.gates, OneDnnLinear)


@each_kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_model_computes_nearly_the_same_in_int8(
    path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    _choose(monkeypatch, ours, dtype, int8=True)
    found = logits(path, dtype, convert=True, quantization="int8")
    wanted = logits(path, dtype, convert=False)
    # Rounding to a step is off by step / 12 ** 0.5 on average; the largest of a row is at most 4
    # deviations. That makes 0.9 % of each operand, 1.3 % of each product: of the 12 of
    # the layers, beside which that of the head is little.
    expected = 12**0.5 * 2**0.5 * (4 / 127 / 12**0.5)
    error = relative_error(found, wanted)
    assert expected / 4 < error < expected


@each_kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_head_is_quantised_too(
    path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    _choose(monkeypatch, ours, dtype, int8=True)
    model = PagedModel(path, dtype=dtype).model
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = model.compute_logits(hidden)
    WeightProcessor(model, "int8").finish()
    expected = 2**0.5 * (4 / 127 / 12**0.5)  # of one product, as above
    assert expected / 4 < relative_error(model.compute_logits(hidden), wanted) < expected


@each_kernels
def test_the_originals_are_freed_one_after_the_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    _choose(monkeypatch, ours, torch.bfloat16)
    model = PagedModel(path, dtype=torch.bfloat16).model
    is_tied = model.lm_head is None
    originals = [
        StorageWeakRef(module.weight.untyped_storage())
        for module in model.modules()
        if isinstance(module, Linear)
    ]
    num_alive: list[int] = []

    form = CpuPackedLinear if ours else OneDnnLinear

    class Recording(form):  # type: ignore[misc, valid-type]
        def __init__(self, weight: Tensor, bias: Tensor | None, **settings: Any) -> None:
            num_alive.append(sum(not storage.expired() for storage in originals))
            super().__init__(weight, bias, **settings)

    monkeypatch.setattr(linear_methods, form.__name__, Recording)
    WeightProcessor(model, None).finish()
    assert num_alive[: len(originals)] == list(range(len(originals), 0, -1))
    assert all(storage.expired() for storage in originals)
    assert len(num_alive) == len(originals) + is_tied
    assert not any(isinstance(module, Linear) for module in model.modules())


@each_kernels
def test_a_tied_head_is_a_copy(path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    _choose(monkeypatch, ours, torch.bfloat16)
    model = PagedModel(path, dtype=torch.bfloat16).model
    embedding = model.model.embed_tokens
    rows = embedding.weight.clone()
    hidden = torch.randn(3, 64).bfloat16()
    wanted = model.compute_logits(hidden)
    WeightProcessor(model, None).finish()
    assert torch.equal(embedding.weight, rows)
    assert torch.equal(embedding(torch.tensor([5, 159])), rows[[5, 159]])
    torch.testing.assert_close(model.compute_logits(hidden), wanted, rtol=2**-7, atol=1e-5)
    is_tied = model.lm_head is None
    assert (embedding.head is not None) == is_tied


def test_weights_of_a_type_without_packed_products_stay(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_methods, "can_pack", lambda dtype: False)
    model = PagedModel(path).model
    before = dict(model.named_modules())
    WeightProcessor(model, None).finish()
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_memory_that_loading_takes_is_known_before(
    path: Path, quantization: Quantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _choose(monkeypatch, True, torch.bfloat16)
    model = PagedModel(path, dtype=torch.bfloat16).model
    layers = model.model.layers
    loaded = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    expected = num_bytes_while_loading(model, quantization, CPU)
    plain = sum(p.nbytes for p in model.parameters())
    assert num_bytes_while_loading(model, quantization, torch.device("cuda")) == plain
    WeightProcessor(model, quantization).finish()
    converted = [
        tensor.nbytes
        for module in layers.modules()
        if isinstance(module, CpuPackedLinear)
        for name, tensor in module.tensors().items()
        if name != "bias"
    ]
    assert len(converted) == {None: 12, "int8": 24, "int4": 36}[quantization]
    others = plain - sum(loaded) + sum(p.nbytes for p in layers.parameters())
    biases = sum(
        module.tensors()["bias"].nbytes
        for module in layers.modules()
        if isinstance(module, CpuPackedLinear) and "bias" in module.tensors()
    )
    # The head is not as large as a layer here.
    assert expected <= others + biases + sum(converted) + max(loaded)
    assert expected >= others + biases + sum(converted) + 0.95 * max(loaded)


def test_the_copy_of_a_tied_head_needs_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, tie_word_embeddings=True, vocab_size=400)
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    num_bytes = sum(parameter.nbytes for parameter in PagedModel(tmp_path).model.parameters())
    monkeypatch.setattr(kv_cache_plan, "_free_bytes", lambda device: num_bytes + 400 * 64 * 4 - 1)
    with pytest.raises(InsufficientMemoryError, match="the weights need"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantisation_is_refused_where_there_are_no_kernels(
    name: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses("unsupported", "quantization", match=f"{name} is for CPUs only"):
        check_quantization(name, torch.device("cuda"), torch.bfloat16)
    check_quantization(None, torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(process_weights, "multiplies_int8", lambda: False)
    with refuses("unsupported", "quantization", match=f"{name} needs .*float32"):
        check_quantization(name, CPU, torch.float32)
    check_quantization(None, CPU, torch.float16)
    monkeypatch.setattr(panels, "serves", lambda weight, device: False)
    with refuses("unsupported", "quantization", match=rf"{name} needs .*kernels\.cpu"):
        check_quantization(name, CPU, torch.bfloat16)


def test_fp8_is_refused_where_there_are_no_products_of_it() -> None:
    with refuses("unsupported", "quantization", match="fp8 is for GPUs only"):
        check_quantization("fp8", CPU, torch.bfloat16)
    with refuses("unsupported", "quantization", match="fp8 needs a dtype of 16 bits"):
        check_quantization("fp8", torch.device("cuda"), torch.float32)
    check_quantization("fp8", torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_engine_serves(
    checkpoint: Path, quantization: Quantization | None, dtype: str, load_format: str
) -> None:
    if quantization is not None and not quantizes(getattr(torch, dtype), quantization):
        pytest.skip(f"this CPU has no {quantization} products for weights of {dtype}")
    llm = LLM(
        str(checkpoint),
        device="cpu",
        dtype=dtype,
        quantization=quantization,
        load_format=load_format,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=4,
    )
    layers = list(llm._core._runner.model.model.modules())
    is_converted = getattr(torch, dtype) in PACKABLE or in_panels(getattr(torch, dtype))
    is_integer = [
        isinstance(each, Int8Linear)
        or (isinstance(each, CpuPackedLinear) and "scale" in each.tensors())
        for each in layers
        if isinstance(each, Int8Linear | CpuPackedLinear | OneDnnLinear)
    ]
    assert any(is_integer) == (quantization is not None)
    assert all(is_integer) or quantization is None
    if quantization is not None or is_converted:
        assert not any(isinstance(layer, Linear) for layer in layers)
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=0, ignore_eos=True)
    prompts = [[1 + i, *range(3, 4 + 5 * i)] for i in range(6)]
    batched = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, batched, strict=True):
        assert len(output.outputs[0].token_ids) == 9
        assert output.outputs[0].cumulative_logprob > -100
        if dtype == "float32":
            alone = llm.generate(prompt, params, use_tqdm=False)[0]
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    llm.check_integrity()
