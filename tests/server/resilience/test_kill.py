"""A killed process costs only its own requests: a short version of `kill`."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.launch.server import TritonServer
from tests.server.resilience.chorus import Chorus
from tests.server.resilience.conversation import Answer
from tests.server.resilience.desk import Desk
from tests.server.resilience.kill_engine import Round, kill_client, kill_engine, stop_engine
from tests.server.resilience.kill_server import TARGETS, kill_server
from tests.server.resilience.launched import plain
from tests.server.resilience.processes import Footprint
from tests.server.resilience.service import checkpoint

Kind = Callable[[TritonServer, Chorus, random.Random], Coroutine[Any, Any, Round]]


@pytest.fixture(scope="module")
def chorus(killable: TritonServer) -> Chorus:
    chorus = Chorus(16, max_tokens=60)

    async def learn() -> None:
        async with Desk(killable) as desk:
            await chorus.learn(desk)

    asyncio.run(learn())
    return chorus


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with checkpoint() as folder:
        yield folder


@pytest.mark.server
@pytest.mark.parametrize("kind", [kill_engine, stop_engine, kill_client])
def test_streams_end_and_service_goes_on(
    killable: TritonServer, chorus: Chorus, kind: Kind
) -> None:
    assert asyncio.run(kind(killable, chorus, random.Random(1))).problems == []


@pytest.mark.server
def test_nothing_is_left_of_a_killed_server(model: Path, chorus: Chorus) -> None:
    target = ("tritonserver", plain, "tritonserver")
    assert target in TARGETS
    assert kill_server(model, chorus, random.Random(1), *target).problems == []


def test_what_is_left_is_seen(tmp_path: Path) -> None:
    region = tmp_path / "region"
    footprint = Footprint(regions=frozenset({region}), sockets=frozenset({"@nobody-has-this"}))
    assert footprint.remains() == []
    region.touch()
    assert footprint.remains() == [f"shared memory {region}"]


def test_a_truncated_or_wrong_answer_is_never_right() -> None:
    chorus = Chorus(5, max_tokens=3)
    chorus._alone = ["abc"] * 5
    answers = [
        Answer(["abc"], "length", "", ended=True),
        Answer(["ab"], "length", "", ended=True),
        Answer(["ab"], "", "lost", ended=True),
        Answer(["ab"], "", "", ended=True),
        None,
    ]
    wrong = [line.split(":")[0] for line in chorus.wrong(answers, may_fail=True)]
    assert wrong == ["stream 1", "stream 3", "stream 4"]
    assert len(chorus.wrong(answers)) == 4
