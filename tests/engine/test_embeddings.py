"""Embeddings are transformers' last hidden states, however the prompts are batched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, PreTrainedModel

from engine import LLM, SamplingParams
from engine.errors import RequestError, UnsupportedError
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from tests.factories.checkpoints import write_checkpoint
from tests.factories.embeddings import reference_embedding
from tests.factories.quantized import change_config
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

ATOL = 2e-6


def write(folder: Path, architecture: str = "LlamaForCausalLM", **fields: Any) -> Path:
    tokenizer = byte_level_tokenizer()
    eos = tokenizer.eos_token_id
    write_checkpoint(folder, architecture, vocab_size=len(tokenizer), eos_token_id=eos, **fields)
    return save_tokenizer(tokenizer, folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("embeddings"))


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return AutoModel.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(params=["roomy", "one-step-ahead", "chunked", "tight"])
def llm(path: Path, request: pytest.FixtureRequest) -> LLM:
    settings: dict[str, Any] = {"num_gpu_blocks_override": 200, "block_size": 4}
    if request.param == "one-step-ahead":
        settings["async_scheduling"] = True
    if request.param == "chunked":
        settings |= {"max_num_batched_tokens": 7, "max_num_seqs": 3}
    if request.param == "tight":  # sequences wait, or are preempted
        settings |= {"num_gpu_blocks_override": 26, "async_scheduling": True}
    return LLM(str(path), dtype="float32", device="cpu", **settings)


def prompts() -> list[list[int]]:
    begin = [(5 * index) % 200 + 30 for index in range(40)]
    lengths = [1, 2, 3, 4, 5, 16, 17, 40, 40, 33]
    return [[*begin[: length - 1], 60 + length] for length in lengths]


def test_they_are_those_of_transformers(llm: LLM, model: PreTrainedModel) -> None:
    for _ in range(2):  # the second time from the prefix cache
        many = llm.embed([{"prompt_token_ids": each} for each in prompts()], use_tqdm=False)
        for prompt, found in zip(prompts(), many, strict=True):
            assert found.prompt_token_ids == prompt
            assert found.outputs.hidden_size == 64
            np.testing.assert_allclose(
                found.outputs.embedding, reference_embedding(model, prompt), atol=ATOL
            )
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks


def test_a_text_is_embedded_with_its_special_tokens(path: Path, model: PreTrainedModel) -> None:
    llm = LLM(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=32)
    [found] = llm.embed("Hello there", use_tqdm=False)
    ids = llm.get_tokenizer()("Hello there")["input_ids"]
    assert found.prompt_token_ids == ids
    np.testing.assert_allclose(found.outputs.embedding, reference_embedding(model, ids), atol=ATOL)
    assert found.finished


def test_a_longer_prompt_is_cut_to_its_end_if_it_shall_be(path: Path) -> None:
    llm = LLM(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=64)
    limit = llm._core.ready.max_model_len
    whole = [(5 * index) % 200 + 30 for index in range(limit + 20)]
    given = [{"prompt_token_ids": whole}]
    with pytest.raises(RequestError, match="max_model_len"):
        llm.embed(given, use_tqdm=False)
    for most, length in ((3, 3), (-1, limit - 1), (limit - 1, limit - 1)):
        [found] = llm.embed(given, use_tqdm=False, truncate_prompt_tokens=most)
        assert found.prompt_token_ids == whole[-length:]
        [same] = llm.embed([{"prompt_token_ids": whole[-length:]}], use_tqdm=False)
        assert found.outputs == same.outputs
    fields = {"truncate_prompt_tokens": -1, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    [answer] = llm.generate(given, SamplingParams.parse(fields), use_tqdm=False)
    assert answer.prompt_token_ids == whole[-(limit - 5) :]
    assert len(answer.outputs[0].token_ids) == 5
    assert len(whole) == limit + 20
    for wrong in (0, -2):
        with pytest.raises(ValueError, match="truncate_prompt_tokens"):
            llm.embed(given, truncate_prompt_tokens=wrong)


def test_who_generates_beside_them_never_notices(llm: LLM, model: PreTrainedModel) -> None:
    generates = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    params = [SamplingParams.parse(generates)] * len(prompts())
    ids = [{"prompt_token_ids": each} for each in prompts()]
    alone = [each.outputs[0].token_ids for each in llm.generate(ids, params, use_tqdm=False)]
    core, found, tokens = llm._core, {}, dict[int, list[int]]()
    fields = [generates, {"return_embedding": True, "prompt_logprobs": 0}]
    for uid, (prompt, asked) in enumerate((p, f) for p in prompts() for f in fields):
        core.add_request(AddRequest(10**6 + uid, pack_token_ids(prompt), asked))
    while core.has_unfinished_requests():
        for output in core.step().rows():
            uid = output.uid - 10**6
            if uid % 2:
                assert (output.token_ids, output.finish_reason) == ([], "length")
                assert output.prompt_logprobs is not None
                found[uid // 2] = np.frombuffer(output.embedding or b"", dtype="<f4")
            else:
                assert output.embedding is None
                tokens.setdefault(uid // 2, []).extend(output.token_ids)
    assert [tokens[number] for number in range(len(prompts()))] == alone
    for number, prompt in enumerate(prompts()):
        np.testing.assert_allclose(found[number], reference_embedding(model, prompt), atol=ATOL)


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_decoder_that_is_stored_alone(tmp_path: Path, architecture: str) -> None:
    path = write(tmp_path, f"{architecture}ForCausalLM", tie_word_embeddings=False)
    decoder = AutoModel.from_pretrained(path, dtype=torch.float32)
    decoder.save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["architectures"] == [
        f"{architecture}Model"
    ]
    prompt = prompts()[-1]
    for name in (f"{architecture}Model", f"{architecture}ForCausalLM"):  # as Qwen3-Embedding is
        change_config(path, architectures=[name])
        if not name.endswith("Model"):
            write_modules(path, {"pooling_mode_lasttoken": True})
        llm = LLM(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=32)
        [found] = llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        np.testing.assert_allclose(
            found.outputs.embedding, reference_embedding(decoder, prompt), atol=ATOL
        )
        assert llm._core.ready.description.endswith("; for embeddings")
        with pytest.raises(UnsupportedError, match="does not support generation"):
            llm.generate("a", use_tqdm=False)


def write_modules(path: Path, pooling: dict[str, Any] | None) -> None:
    """Write what sentence-transformers has of a model; without `pooling`, another module."""
    last = ("2_Dense", "Dense") if pooling is None else ("1_Pooling", "Pooling")
    kinds = [("", "Transformer"), last, ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": index, "type": f"sentence_transformers.models.{kind}"}
        for i, (index, kind) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_what_cannot_be_is_refused(path: Path, tmp_path: Path) -> None:
    llm = LLM(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=32)
    for fields, text in (
        ({"n": 2}, "n: must be 1 with return_embedding"),
        ({"best_of": 2}, "best_of: must be 1 with return_embedding"),
        ({"beam_width": 2}, "beam_width: must be 1 with return_embedding"),
    ):
        with pytest.raises(RequestError, match=text):
            llm.generate("a", SamplingParams.parse({"return_embedding": True, **fields}))
    other = write(tmp_path)
    change_config(other, is_causal=False)
    with pytest.raises(UnsupportedError, match=r"^config\.json: is_causal: false is not"):
        LLM(str(other), device="cpu")


@pytest.mark.parametrize(
    ("pooling", "text"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, ""),
        ({"word_embedding_dimension": 64, "pooling_mode": "lasttoken"}, ""),
        ({"pooling_mode_mean_tokens": True}, r"1_Pooling/config\.json: pooling mean is not"),
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "pooling lasttoken and mean is not",
        ),
        ({}, "pooling of no kind is not"),
        ({"pooling_mode": "cls"}, "pooling cls is not"),
        ({"pooling_mode": ["cls", "max"]}, "pooling cls and max is not"),
        (None, r"modules\.json: a module Dense is not supported"),
    ],
)
def test_what_sentence_transformers_says_of_it(
    tmp_path: Path, pooling: dict[str, Any] | None, text: str
) -> None:
    path = write(tmp_path)
    write_modules(path, pooling)
    llm = LLM(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=32)
    if text:
        with pytest.raises(UnsupportedError, match=f"^prompt 0: return_embedding: .*{text}"):
            llm.embed("a", use_tqdm=False)
    else:
        assert llm.embed("a", use_tqdm=False)
    with pytest.raises(UnsupportedError, match="does not support generation"):
        llm.generate("a", use_tqdm=False)
