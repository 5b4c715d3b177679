"""Families beside Llama's, through the real server: transformers' greedy tokens, sent at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from engine.launch.server import TritonServer
from tests.factories.families import FAMILIES
from tests.factories.greedy import VOCAB, GreedyCheckpoint
from tests.server.caller import Caller
from tests.server.release import released_all

MAX_TOKENS = 16


@pytest.mark.server
@pytest.mark.large
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt-oss", "mixtral"])
def test_greedy_tokens(name: str, tmp_path: Path) -> None:
    architecture, fields = FAMILIES[name]
    lengths = (3, 25, 40, 31, 60, 5)
    reference = GreedyCheckpoint(
        tmp_path, architecture, lengths=lengths, max_tokens=MAX_TOKENS, **fields
    )
    settings = {"model": str(tmp_path), "dtype": "float32", "block_size": 4, "max_num_seqs": 4}
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": MAX_TOKENS}
    with (
        TritonServer(settings, ports=0, start_timeout_s=120) as server,
        closing(Caller(server.grpc_url, server.http_url, model="engine")) as caller,
        ThreadPoolExecutor(len(lengths)) as pool,
    ):

        def ask(prompt: list[int]) -> list[int]:
            given = {"input_ids": prompt, "sampling_parameters": json.dumps(sampling)}
            found: list[int] = caller.one(**given)["token_ids"]
            return found

        found = list(pool.map(ask, reference.prompts))
        assert found == [answer.token_ids for answer in reference.answers]
        assert all(0 <= token < VOCAB for row in found for token in row)
    assert released_all(server)
