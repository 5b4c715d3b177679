"""A LoRA adapter through the real server: every stage finds its base, and its own chat template."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from engine.demo import CHECKPOINT_DIR
from engine.launch.server import TritonServer
from tests.factories.adapters import write_adapter
from tests.server.caller import Caller

CHAT = [{"role": "user", "content": "What is 12 + 7?"}]


@pytest.mark.server
def test_an_adapter_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32)
    write_adapter(
        adapter, model, CHECKPOINT_DIR, r=1, lora_alpha=0.1, target_modules=["o_proj"]
    ).save_pretrained(merged)
    for folder in (adapter, merged):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(CHECKPOINT_DIR / name, folder / name)
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }} Answer:")
    sampling = SamplingParams(temperature=0, max_tokens=20)
    expected, base = (
        LLM(str(path), dtype="float32").chat(CHAT, sampling, use_tqdm=False)[0].outputs[0].text
        for path in (merged, CHECKPOINT_DIR)
    )
    with (
        TritonServer({"model": str(adapter), "dtype": "float32"}, ports=0) as server,
        closing(Caller(server.grpc_url, server.http_url)) as caller,
    ):
        answer = caller.one(
            messages=json.dumps(CHAT), temperature=0.0, max_tokens=20, exclude_input_in_output=True
        )
    assert answer["text_output"] == [expected]
    assert expected != base
