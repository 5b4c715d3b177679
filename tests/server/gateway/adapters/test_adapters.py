"""Other packages' clients hold conversations with tools, of two turns, streamed and not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.server, pytest.mark.large]

FOLDER = Path(__file__).parent
PYTHON = Path(".venv/adapters/bin/python").absolute()


@pytest.mark.parametrize("script", ["with_langchain.py", "with_litellm.py", "with-ai-sdk.js"])
def test_a_conversation_with_tools(
    tool_gateway: str, tool_tokenizer: Any, blanks: dict[str, int], script: str
) -> None:
    is_python = script.endswith(".py")
    program = str(PYTHON) if is_python else shutil.which("node")
    if program is None or not (PYTHON if is_python else FOLDER / "node_modules").exists():
        pytest.skip("needs packages of its own (make adapters)")
    bias = {**blanks, **_banned(tool_tokenizer)}
    command = [program, str(FOLDER / script), f"http://{tool_gateway}/v1", json.dumps(bias)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def _banned(hf_tokenizer: Any) -> dict[str, int]:
    """Let the random model call at once, and without arguments that no schema knows."""
    texts = Tokenizer(hf_tokenizer)
    commas = [i for i in texts.text_token_ids() if "," in texts.token_text(i)]
    return {str(i): -100 for i in (hf_tokenizer.convert_tokens_to_ids("<think>"), *commas)}
