"""In the deterministic mode a token's logits depend on its own sequence alone, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.config.setting_types import Quantization
from engine.models import process_weights
from engine.models.process_weights import check_deterministic
from kernels.cpu import linear as panels
from kernels.rms_norm import rms_norm
from tests.factories import families
from tests.factories.checkpoints import write_checkpoint
from tests.factories.errors import refuses
from tests.factories.forms import runs_panels
from tests.factories.paged_model import CPU, PagedModel, Sequence

pytestmark = pytest.mark.skipif(
    not runs_panels(torch.bfloat16),
    reason="this CPU has no products of ours, or the kernels are not built",
)

# Beyond several tiles of 64 keys, and where the keys of a sequence alone would be divided.
LENGTH = 560
BLOCK_SIZE = 4
TOKENS = [(7 * i + i // 3) % 160 for i in range(LENGTH)]
FORMS: list[tuple[torch.dtype, Quantization | None]] = [
    (torch.bfloat16, None),
    (torch.bfloat16, "int8"),
    (torch.float32, None),
    (torch.float32, "int8"),
    (torch.float16, None),
]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", {}),
    ("MistralForCausalLM", {"sliding_window": 100}),
    families.FAMILIES["lfm2"],
    families.FAMILIES["qwen3.5"],
]
# Sizes at which products, tiles and tasks change, and any.
COUNTS = st.one_of(st.sampled_from([1, 1, 2, 12, 13, 64, 65]), st.integers(1, 200))


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family[0])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, fields = request.param
    folder = tmp_path_factory.mktemp("model")
    # Matrices keep the size of the activations: no softmax magnifies an error.
    fields = {"max_position_embeddings": LENGTH, "initializer_range": 64**-0.5, **fields}
    write_checkpoint(folder, architecture, **fields)
    return folder


@pytest.fixture(scope="module", params=FORMS, ids=str)
def model(request: pytest.FixtureRequest, path: Path) -> PagedModel:
    dtype, quantization = request.param
    return PagedModel(
        path,
        dtype=dtype,
        max_model_len=LENGTH,
        num_blocks=8 * LENGTH // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        deterministic=True,
        quantization=quantization,
    )


@pytest.fixture(scope="module")
def alone(model: PagedModel) -> Tensor:
    """The logits of every position, computed one after the other without company."""
    return model.logits(TOKENS, chunks=[1] * LENGTH)


@settings(max_examples=8)
@given(data=st.data())
def test_logits_depend_on_the_sequence_alone(
    model: PagedModel, alone: Tensor, data: st.DataObject
) -> None:
    """Whatever its chunks are, what runs beside it, on how many threads, and what is cached."""
    draw = data.draw
    num_cached = draw(st.integers(0, LENGTH - 1), "cached tokens") // BLOCK_SIZE * BLOCK_SIZE
    prefix = model.start(TOKENS)
    model.step([(prefix, LENGTH)])
    own = model.start(TOKENS, prefix=prefix, num_cached=num_cached)
    lengths = draw(st.lists(COUNTS, max_size=4), "lengths of others")
    others = [model.start([7 * length % 160] * length) for length in lengths]
    threads = torch.get_num_threads()
    torch.set_num_threads(draw(st.sampled_from([1, 3]), "threads"))
    try:
        while own.remaining:
            beside = [other for other in others if other.remaining and draw(st.booleans(), "runs")]
            work = [(each, min(draw(COUNTS, "chunk"), each.remaining)) for each in (own, *beside)]
            model.step(_decodes_first(work))
    finally:
        torch.set_num_threads(threads)
        own.block_ids = own.block_ids[num_cached // BLOCK_SIZE :]
        for sequence in (prefix, own, *others):
            model.end(sequence)
    assert torch.equal(torch.cat(own.logits), alone[num_cached:])


def _decodes_first(work: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
    return sorted(work, key=lambda pair: pair[1] > 1)


def test_the_logits_are_those_of_the_other_mode(path: Path, model: PagedModel) -> None:
    """But for rounding: of each of the 13 products, and of what is between them."""
    weight = model.model.model.embed_tokens.weight
    if model.is_quantized:
        pytest.skip("what quantisation costs is tested elsewhere")
    found = model.logits(TOKENS[:100], chunks=[99, 1])
    plain = PagedModel(path, dtype=weight.dtype, max_model_len=LENGTH)
    wanted = plain.logits(TOKENS[:100], chunks=[99, 1])
    rounding = torch.finfo(weight.dtype).eps / 2
    assert (found - wanted).norm() < (13**0.5 * 2 * rounding + 1e-5) * wanted.norm()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [896, 8192, 151_936])
def test_what_torch_computes_does_not_depend_on_other_rows(size: int) -> None:
    """The last norm in float32, and log-probabilities."""
    generator = torch.Generator().manual_seed(size)
    x, weight = torch.randn(33, size, generator=generator), torch.randn(size, generator=generator)
    normed, logprobs = rms_norm(x, weight, 1e-6), x.log_softmax(-1)
    for begin, end in ((0, 1), (5, 6), (5, 8), (1, 33)):
        assert torch.equal(rms_norm(x[begin:end], weight, 1e-6), normed[begin:end])
        assert torch.equal(x[begin:end].log_softmax(-1), logprobs[begin:end])


@pytest.mark.parametrize("fields", [{"intermediate_size": 44}, {"intermediate_size": 34}], ids=str)
def test_what_has_no_such_form_is_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    write_checkpoint(tmp_path, **fields)
    with refuses("unsupported", "deterministic", match="multiple of 4 inputs"):
        check_deterministic(PagedModel(tmp_path, dtype=torch.bfloat16).model, CPU)


def test_other_processors_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PagedModel(path, dtype=torch.bfloat16).model
    check_deterministic(model, CPU)
    monkeypatch.setattr(panels, "runs", lambda weight, device: False)
    with refuses("unsupported", "deterministic"):
        check_deterministic(model, CPU)
    monkeypatch.setattr(process_weights, "has_triton", lambda device: True)
    check_deterministic(model, CPU)
