"""What the machine and the model's shape allow at best."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from client.bench.compare import ceilings
from client.bench.compare.ceilings import Ceilings
from client.bench.compare.floors import Floor, Shape, floor
from client.bench.load.workload import PUBLISHED, Workload, closed
from engine.demo.random_checkpoint import SIZES


def _floor(shape: Shape, workload: Workload, ceilings: Ceilings) -> Floor:
    found = floor(shape, workload, ceilings)
    assert found is not None
    return found


class TestFloors:
    def test_shape_of_the_standard_model(self, tmp_path: Path) -> None:
        _, fields = SIZES["0.4b-tied"]
        assert fields["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps({**fields, "vocab_size": 32000}))
        shape = Shape.of(tmp_path)
        assert shape.layer_parameters + shape.head_parameters == 386_498_560
        assert shape.kv_bytes == 12 * 1024

    def test_of_a_mixture_the_experts_that_a_token_goes_through_count(self, tmp_path: Path) -> None:
        _, fields = SIZES["0.4b-moe"]
        (tmp_path / "config.json").write_text(json.dumps({**fields, "vocab_size": 32000}))
        hidden, layers = fields["hidden_size"], fields["num_hidden_layers"]
        expert = 3 * hidden * fields["moe_intermediate_size"]
        attention = 2 * hidden * 64 * (16 + 4)
        router = hidden * fields["num_experts"]
        parameters = layers * (attention + router + fields["num_experts_per_tok"] * expert)
        assert Shape.of(tmp_path).layer_parameters == parameters

    def test_arithmetic(self) -> None:
        shape = Shape(layer_parameters=900, head_parameters=100, kv_bytes=10, attention_flops=10)
        reads_only = Ceilings(read=1e3, bf16=1e12, int8=1e12)
        # Two turns of three steps each read the weights: 2 s in bf16, 1 s in int8. Attention reads
        # 2 sequences of 4, 5 and 6 tokens: 0.3 s per turn.
        both = _floor(shape, closed("W", 2, 4, 4, 3), reads_only)
        assert both.bf16 == pytest.approx(12 / (2 * (3 * 2 + 0.3)))
        assert both.int8 == pytest.approx(12 / (2 * (3 * 1 + 0.3)))
        computes_only = Ceilings(read=1e12, bf16=1e3, int8=2e3)
        # One request, 4 tokens in and 1 out: the layers for 4 rows, the head for 1, 10 pairs.
        both = _floor(shape, closed("W", 1, 1, 4, 1), computes_only)
        assert both.bf16 == pytest.approx(1 / (2 * (4 * 0.9 + 0.1) + 0.1))
        assert both.int8 == pytest.approx(1 / ((4 * 0.9 + 0.1) + 0.1))

    def test_what_is_shared_is_computed_once(self) -> None:
        shape = Shape(900, 100, 10, 10)
        computes_only = Ceilings(read=1e12, bf16=1e3, int8=1e3)
        both = _floor(shape, closed("W", 1, 2, 4, 1, shared=3), computes_only)
        # 4 rows and 10 pairs in prefill, then one row over 4 tokens.
        assert both.bf16 == pytest.approx(2 / ((7.4 + 0.1) + (2.0 + 0.04)))

    def test_only_streams_of_equal_requests_have_one(self) -> None:
        shape, bounds = Shape(900, 100, 10, 10), Ceilings(1e3, 1e3, 1e3)
        found = [each.name for each in PUBLISHED if floor(shape, each, bounds) is not None]
        assert found == []

    def test_the_ceilings_of_this_machine(self) -> None:
        one = ceilings.measure()
        assert 1e8 < one.read < 1e13
        assert 1e8 < one.bf16 < 1e16
        assert 1e8 < one.int8 < 1e16
        assert ceilings.highest([one, Ceilings(1e15, 1.0, 1.0)]) == replace(one, read=1e15)
