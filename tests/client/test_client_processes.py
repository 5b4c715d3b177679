"""Clients that are made in one place and used in another: loops, threads, forked processes."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import client
from client import AsyncTridentClient, ConfigurationError, TridentClient
from tests.client.fake_triton import HELLO, FakeTriton

ROOT = Path(client.__file__).parents[1]


def _python(script: str, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", script, url]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )


class TestEventLoops:
    def test_made_outside_of_a_loop(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        made = AsyncTridentClient(triton.url)

        async def use() -> str:
            async with made:
                return (await made.generate("a")).text

        assert asyncio.run(use()) == "Hello world"

    def test_one_loop_after_another(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        script = (
            "import asyncio, sys\n"
            "from client import AsyncTridentClient\n"
            "made = AsyncTridentClient(sys.argv[1])\n"
            "for _ in range(3):\n"
            "    print(asyncio.run(made.generate('a')).text)\n"
        )
        ended = _python(script, triton.url)
        assert (ended.returncode, ended.stdout) == (0, "Hello world\n" * 3)
        # gRPC itself may say there that one of its events came after the end of a loop.
        assert "/client/" not in ended.stderr

    def test_not_two_loops_at_once(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        made = AsyncTridentClient(triton.url)

        async def use() -> None:
            await made.generate("a")
            await asyncio.to_thread(asyncio.run, elsewhere())
            await made.close()

        async def elsewhere() -> None:
            with pytest.raises(ConfigurationError, match="another event loop"):
                await made.generate("a")

        asyncio.run(use())

    def test_closed_before_its_first_use(self) -> None:
        asyncio.run(AsyncTridentClient("localhost:9").close())


class TestForks:
    def test_made_before_and_used_after(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        script = (
            "import os, sys\n"
            "from client import TridentClient\n"
            "made = TridentClient(sys.argv[1])\n"
            "if os.fork() == 0:\n"
            "    print(made.generate('a').text, flush=True)\n"
            "    os._exit(0)\n"
            "os.wait()\n"
            "print(made.generate('a').text)\n"
        )
        ended = _python(script, triton.url)
        assert (ended.stdout, ended.stderr) == ("Hello world\n" * 2, "")

    @pytest.mark.parametrize("kind", ["TridentClient", "AsyncTridentClient"])
    def test_used_before_says_so_after(self, triton: FakeTriton, kind: str) -> None:
        """A channel of gRPC in a forked process would never answer."""
        triton.pieces = HELLO
        script = (
            "import asyncio, os, sys, warnings\n"
            "import client\n"
            "warnings.simplefilter('ignore', DeprecationWarning)  # of fork with threads\n"
            f"made = client.{kind}(sys.argv[1])\n"
            "runner = asyncio.Runner()\n"
            "def generate():\n"
            "    answer = made.generate('a')\n"
            "    return answer if isinstance(made, client.TridentClient) else runner.run(answer)\n"
            "generate()\n"
            "if os.fork() == 0:\n"
            "    try:\n"
            "        generate()\n"
            "    except client.ConfigurationError as error:\n"
            "        print(error, flush=True)\n"
            "    os._exit(0)\n"
            "os.wait()\n"
        )
        ended = _python(script, triton.url)
        assert "the client was used before this process was forked" in ended.stdout


def test_threads_that_begin_together_share_one_channel(triton: FakeTriton) -> None:
    triton.pieces = HELLO
    texts: list[str] = []
    start = threading.Barrier(8)
    with TridentClient(triton.url) as shared:

        def generate() -> None:
            start.wait()
            texts.append(shared.generate("a").text)

        threads = [threading.Thread(target=generate) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == ["Hello world"] * 8
    assert len({call.peer for call in triton.calls}) == 1
