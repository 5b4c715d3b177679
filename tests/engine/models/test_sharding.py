"""The ranks of a model compute what it computes alone."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UnsupportedError
from engine.layers.moe import MoE
from engine.models.sharding import max_ranks, shard, split
from engine.models.spec import AttentionSpec, Gated, LayerSpec, ModelSpec, NormSpec, ShardRange
from engine.models.tensor_names import LLAMA_NAMES
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.paged_model import PagedModel
from tests.factories.thread_ranks import ThreadGroup, ThreadGroups

LENGTH = 60  # beyond every window
CHUNKS = [29, 1, 1, LENGTH - 31]


def tokens() -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(160) for _ in range(LENGTH)]


def is_mixture(family: str) -> bool:
    return any("experts" in name for name in FAMILIES[family][1])


def expert_totals(model: PagedModel) -> list[torch.Tensor]:
    return [module.expert_totals for module in model.model.modules() if isinstance(module, MoE)]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, fields = FAMILIES[request.param]
    path: Path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, architecture, **fields)
    return path


def test_ranks_logits_match_the_whole_model(checkpoint: Path) -> None:
    whole = PagedModel(checkpoint, max_model_len=96)
    expected = whole.logits(tokens(), CHUNKS)
    for num_ranks in range(2, min(4, max_ranks(whole.spec)) + 1):

        def rank(group: ThreadGroup) -> torch.Tensor:
            return PagedModel(checkpoint, max_model_len=96, group=group).logits(tokens(), CHUNKS)

        groups = ThreadGroups(num_ranks)
        logits, *_ = groups.run(rank)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert all(trace == groups.traces[0] for trace in groups.traces)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "phi", "qwen3-moe", "gpt-oss"])
def test_ranks_in_bfloat16_err_no_more_than_twice_as_one_process(
    family: str, tmp_path: Path
) -> None:
    architecture, fields = FAMILIES[family]
    write_checkpoint(tmp_path, architecture, **fields)
    exact = PagedModel(tmp_path, max_model_len=96).logits(tokens()).log_softmax(-1)

    def error(group: ThreadGroup | None = None) -> float:
        model = PagedModel(tmp_path, max_model_len=96, dtype=torch.bfloat16, group=group)
        found = model.logits(tokens())
        if found.shape != exact.shape:  # of another rank than 0, which has a part
            return 0.0
        return (found.log_softmax(-1) - exact).square().mean().sqrt().item()

    own = error()
    for num_ranks in (2, 3):
        assert ThreadGroups(num_ranks).run(error)[0] < 2 * own


@pytest.mark.parametrize("family", [name for name in FAMILIES if is_mixture(name)])
def test_ranks_with_whole_experts_match_the_whole_model(family: str, tmp_path: Path) -> None:
    architecture, fields = FAMILIES[family]
    write_checkpoint(tmp_path, architecture, **fields)
    whole = PagedModel(tmp_path, max_model_len=96)
    expected = whole.logits(tokens(), CHUNKS)

    def rank(group: ThreadGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = PagedModel(tmp_path, max_model_len=96, group=group, expert_parallel=True)
        return model.logits(tokens(), CHUNKS), expert_totals(model)

    for num_ranks in range(2, min(4, max_ranks(whole.spec, expert_parallel=True)) + 1):
        groups = ThreadGroups(num_ranks)
        found = groups.run(rank)
        torch.testing.assert_close(found[0][0], expected, rtol=1e-4, atol=1e-4)
        assert all(trace == groups.traces[0] for trace in groups.traces)
        for _, totals in found:  # each rank knows of all choices
            torch.testing.assert_close(totals, expert_totals(whole))


@given(st.integers(1, 200), st.integers(1, 50))
def test_split_has_every_unit_once_and_rank_0_the_fewest(units: int, ranks: int) -> None:
    found = [split(units, ranks, rank) for rank in range(ranks)]
    assert found[0].start == 0
    assert found[-1].stop == units
    assert all(before.stop == after.start for before, after in pairwise(found))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert len(found[0]) == min(map(len, found))


def model(num_kv_heads: int, per_head: int, size: int, vocab_size: int) -> ModelSpec:
    norm = NormSpec("rms", 1e-5)
    attention = AttentionSpec(
        num_heads=num_kv_heads * per_head,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        scale=1.0,
        rope=None,
        rotary_dim=0,
    )
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=64,
        layers=(LayerSpec(attention, Gated(size), norm),),
        norm=norm,
        context_length=64,
        dtype="float32",
        tie_word_embeddings=False,
        eos_token_ids=(),
        tensor_names=LLAMA_NAMES,
    )


@given(
    st.builds(
        model, st.integers(1, 16), st.integers(1, 9), st.integers(1, 4000), st.integers(1, 9000)
    ),
    st.data(),
)
def test_shard_any_model_has_queries_with_their_keys(spec: ModelSpec, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, min(16, max_ranks(spec))))
    ranks = [shard(spec, rank, num_ranks) for rank in range(num_ranks)]
    whole = spec.layers[0].attention
    per_head = whole.num_heads // whole.num_kv_heads
    heads, counted, features, tokens = [], [], [], []
    for rank in ranks:
        attention, mlp = rank.layers[0].attention, rank.layers[0].mlp
        assert attention.num_heads % attention.num_kv_heads == 0
        queries = _of(attention.query_heads, whole.num_heads)
        keys = _of(attention.kv_heads, whole.num_kv_heads)
        assert len(queries) == attention.num_heads > 0
        assert len(keys) == attention.num_kv_heads
        group = attention.num_heads // attention.num_kv_heads
        assert [head // per_head for head in queries] == [
            keys[i // group] for i in range(len(queries))
        ]
        heads += queries
        counted += [] if attention.shares_keys else keys
        features += _of(mlp.features, spec.layers[0].mlp.size)
        tokens += _of(rank.vocabulary, spec.vocab_size)
    assert heads == list(range(whole.num_heads))
    assert counted == list(range(whole.num_kv_heads))
    assert features == list(range(spec.layers[0].mlp.size))
    assert tokens == list(range(spec.vocab_size))


def _of(part: ShardRange | None, full: int) -> list[int]:
    if part is None:
        return list(range(full))
    assert part.full == full
    return list(range(part.start, part.start + part.size))


def test_shard_more_ranks_than_heads_is_refused_with_the_most() -> None:
    with pytest.raises(UnsupportedError, match="at most 4 ") as raised:
        shard(model(2, 2, 100, 400), 0, 5)
    assert raised.value.params == ("tensor_parallel_size",)


def test_shard_one_rank_is_the_whole_model() -> None:
    spec = model(2, 2, 100, 400)
    assert shard(spec, 0, 1) is spec
