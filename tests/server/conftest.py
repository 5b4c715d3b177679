"""The real tritonservers that tests share: one for most, on a seeded random checkpoint.

Its tokenizer splits characters over tokens, so that its random output is full of hard cases.

A shared server starts for the first test that uses it, and is stopped after the last. Tests are
sorted by the servers that they use, so that at most three of them run at a time.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from engine.launch.installation import model_repository
from engine.launch.model_configs import UNARY
from engine.launch.security import ADMIN_KEY
from engine.launch.server import TritonServer
from tests.factories.checkpoints import write_checkpoint
from tests.factories.processors import install
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer
from tests.server.caller import Caller
from tests.server.release import released_all
from tests.server.resilience.service import serving

MAX_MODEL_LEN = 512
VLLM_MODEL = "vllm_model"  # vllm_backend's samples call it so
VLLM_KEY = "k" * 20

# Fixtures of the shared servers. Tests of the last one are run last.
SHARED = ("killable", "resilient", "vllm_server", "tool_server", "slow_server", "server")
Share = Callable[[pytest.FixtureRequest, AbstractContextManager[TritonServer]], TritonServer]
_STACKS = pytest.StashKey[dict[str, ExitStack]]()
_LAST_TESTS = pytest.StashKey[dict[str, pytest.Item]]()


def _servers_of(item: pytest.Item) -> set[str]:
    """Return the shared servers that a test uses; a file may have another fixture of that name."""
    names = set(getattr(item, "fixturenames", ()))
    return names.intersection(SHARED) if "share" in names else set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    servers: dict[Path, set[str]] = {}
    for item in items:
        servers.setdefault(item.path, set()).update(_servers_of(item))
    items.sort(key=lambda item: [name in servers[item.path] for name in reversed(SHARED)])


def pytest_collection_finish(session: pytest.Session) -> None:
    last = {name: item for item in session.items for name in _servers_of(item)}
    session.stash[_STACKS], session.stash[_LAST_TESTS] = {}, last


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    for name, stack in list(item.session.stash[_STACKS].items()):
        if item.session.stash[_LAST_TESTS].get(name) is item:
            del item.session.stash[_STACKS][name]
            stack.close()


@contextmanager
def _released(context: AbstractContextManager[TritonServer]) -> Iterator[TritonServer]:
    with context as server:
        yield server
    assert released_all(server)


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> Iterator[Share]:
    """Starts the server of the fixture that asks; when it ends, no request may be left."""
    stacks = request.session.stash[_STACKS]

    def start(
        fixture: pytest.FixtureRequest, context: AbstractContextManager[TritonServer]
    ) -> TritonServer:
        stack = stacks[str(fixture.fixturename)] = ExitStack()
        return stack.enter_context(_released(context))

    yield start
    with ExitStack() as rest:
        for stack in stacks.values():
            rest.push(stack)


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
def server(
    share: Share, request: pytest.FixtureRequest, checkpoint: Path, packages: Path
) -> TritonServer:
    settings = {
        "model": str(checkpoint),
        "dtype": "float32",
        # Too few for 64 streams at once: some will be preempted.
        "num_gpu_blocks_override": 200,
        "max_num_queued_reqs": 70,
    }
    environ = {**os.environ, "PYTHONPATH": str(packages)}
    made = TritonServer(settings, ports=0, start_timeout_s=120, environ=environ)
    return share(request, made)


@pytest.fixture(scope="session")
def slow_server(share: Share, request: pytest.FixtureRequest, checkpoint: Path) -> TritonServer:
    """One whose answers last: a test acts on them before they end, however late it does."""
    settings = {"model": str(checkpoint), "device": "null:50", "max_num_queued_reqs": 70}
    return share(request, TritonServer(settings, ports=0, start_timeout_s=120))


@pytest.fixture(scope="session")
def resilient(share: Share, request: pytest.FixtureRequest) -> TritonServer:
    """One of few sequences, so that requests have to wait, and long answers."""
    return share(request, serving(max_num_seqs=8, num_gpu_blocks_override=2400))


@pytest.fixture(scope="session")
def vllm_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    return Path(shutil.copytree(model_repository(), repository, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def vllm_server(
    share: Share, request: pytest.FixtureRequest, vllm_repository: Path
) -> TritonServer:
    """The unbatched form of the model repository, with the bundled model."""
    arguments = ["--model-config-name=vllm", "--disable-auto-complete-config"]
    arguments += ["--model-control-mode=explicit"]
    arguments += [f"--load-model={VLLM_MODEL}", f"--load-model={UNARY}"]
    made = TritonServer(
        {"dtype": "float32", "served_model_name": VLLM_MODEL},
        arguments=arguments,
        repository=vllm_repository,
        ports=0,
        environ={**os.environ, ADMIN_KEY: VLLM_KEY},
        start_timeout_s=120,
    )
    return share(request, made)


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
