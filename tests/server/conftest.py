"""One real tritonserver for most tests, on a seeded random checkpoint.

Its tokenizer splits characters over tokens, so that its random output is full of hard cases.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from engine.launch.server import TritonServer
from tests.factories.checkpoints import write_checkpoint
from tests.factories.processors import install
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer
from tests.server.caller import Caller
from tests.server.release import released_all

MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = byte_level_tokenizer()
    write_checkpoint(
        folder,
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return save_tokenizer(tokenizer, folder)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package, which offers a logits processor."""
    target = "tests.factories.processors:Counting"
    return install(tmp_path_factory.mktemp("packages"), {"counting": target})


@pytest.fixture(scope="session")
def server(checkpoint: Path, packages: Path) -> Iterator[TritonServer]:
    settings = {
        "model": str(checkpoint),
        "dtype": "float32",
        # Too few for 64 streams at once: some will be preempted.
        "num_gpu_blocks_override": 200,
        "max_num_queued_reqs": 70,
    }
    environ = {**os.environ, "PYTHONPATH": str(packages)}
    with TritonServer(settings, ports=0, start_timeout_s=120, environ=environ) as server:
        yield server
    assert released_all(server)


@pytest.fixture(scope="session")
def slow_server(checkpoint: Path) -> Iterator[TritonServer]:
    """One whose answers last: a test acts on them before they end, however late it does."""
    settings = {"model": str(checkpoint), "device": "null:50", "max_num_queued_reqs": 70}
    with TritonServer(settings, ports=0, start_timeout_s=120) as server:
        yield server
    assert released_all(server)


@pytest.fixture(scope="session")
def slow_caller(slow_server: TritonServer) -> Iterator[Caller]:
    caller = Caller(slow_server.grpc_url, slow_server.http_url)
    yield caller
    caller.close()


@pytest.fixture(scope="module")
def caller(server: TritonServer) -> Iterator[Caller]:
    """Ask the server of the file: that of most tests, or one of its own."""
    caller = Caller(server.grpc_url, server.http_url)
    yield caller
    caller.close()


@pytest.fixture(scope="module")
def quiet_log(server: TritonServer) -> Iterator[None]:
    """Nothing that the tests of a file send is worth a traceback."""
    before = len(server.log)
    yield
    assert "internal error" not in server.log[before:]
    assert "Traceback" not in server.log[before:]


@pytest.fixture(scope="module")
def stub(server: TritonServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
