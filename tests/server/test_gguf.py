"""A GGUF file through the real server: the answers of the weights that its blocks stand for."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from itertools import takewhile
from pathlib import Path

import pytest
from openai import OpenAI
from transformers import PreTrainedTokenizerFast

from client import cli
from engine import LLM, SamplingParams
from engine.demo import CHECKPOINT_DIR
from engine.launch.errors import ServerStartError
from engine.launch.server import TritonServer
from tests.factories.gguf_files import write_gguf
from tests.factories.tokenizers import save_tokenizer
from tests.server.caller import Caller
from tests.server.release import released_all

pytestmark = pytest.mark.server

QUESTIONS = ("What is 2 + 3?", "Count from 1 to 10.", "Tell me a story about a fox.")
MAX_TOKENS = 30


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundled checkpoint."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "plain"
    shutil.copytree(CHECKPOINT_DIR, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    return save_tokenizer(tokenizer, folder)


@pytest.mark.large
def test_answers_to_chats(plain: Path) -> None:
    path = plain.with_name("bundled.gguf")
    changes = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.eos_token_id": 2}
    write_gguf(path, plain, ("Q8_0", "Q5_0", "Q8_0", "F16"), **changes)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    expected = [
        result.outputs[0].text
        for result in LLM(str(plain), dtype="float32").chat(chats, sampling, use_tqdm=False)
    ]
    assert "5" in expected[0]
    with (
        TritonServer({"model": str(path), "dtype": "float32"}, ports=0) as server,
        closing(Caller(server.grpc_url, server.http_url)) as caller,
    ):
        found = [
            caller.text(
                messages=json.dumps(chat),
                temperature=0.0,
                max_tokens=MAX_TOKENS,
                exclude_input_in_output=True,
            )
            for chat in chats
        ]
    assert found == expected
    assert released_all(server)


def test_trident_serve(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain.with_name("bundled.gguf")
    changes = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.eos_token_id": 2}
    write_gguf(path, plain, ("Q8_0",), **changes)
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    with subprocess.Popen(
        [sys.executable, "-m", "client.cli", "serve", str(path), "--dtype=float32", *ports],
        cwd=Path(cli.__file__).parents[1],
        env={**os.environ, "XDG_STATE_HOME": str(plain.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = list(takewhile(lambda line: "Ctrl-C stops" not in line, process.stdout))
            (address,) = re.findall(r"OpenAI +(http://\S+)", "".join(lines))
            with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
                model = next(iter(client.models.list())).id
                answer = client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": QUESTIONS[0]}], temperature=0
                )
            assert "5" in (answer.choices[0].message.content or "")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def test_a_broken_file_is_named(plain: Path) -> None:
    path = plain.with_name("broken.gguf")
    write_gguf(path, plain, ("Q8_0",))
    path.write_bytes(path.read_bytes()[:-100_000])
    with pytest.raises(ServerStartError, match=r"broken\.gguf: is truncated: .*tensor"):
        TritonServer({"model": str(path)}, ports=0).start()
