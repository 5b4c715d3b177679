"""The null device: an engine whose steps take a set time, and whose tokens are made up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.offline.llm import LLM
from engine.protocol.messages import AddRequest, SequenceOutput
from engine.protocol.token_ids import pack_token_ids
from engine.request.sampling_params import SamplingParams
from tests.factories.errors import refuses
from tests.factories.outputs import listed


def make_core(checkpoint: Path, device: str = "null", **settings: Any) -> EngineCore:
    return EngineCore(EngineConfig.parse({"model": str(checkpoint), "device": device, **settings}))


def add(uid: int, prompt: list[int], params: dict[str, Any]) -> AddRequest:
    return AddRequest(uid, pack_token_ids(prompt), params)


def run(core: EngineCore) -> dict[int, list[SequenceOutput]]:
    outputs: dict[int, list[SequenceOutput]] = {}
    while core.has_unfinished_requests():
        for output in listed(core.step()):
            assert isinstance(output, SequenceOutput)
            outputs.setdefault(output.uid, []).append(output)
    core.check_integrity()
    return outputs


def token_ids(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.mark.parametrize("is_ahead", [True, False])
def test_requests_end_at_their_length_with_text_that_does_not_depend_on_the_batch(
    checkpoint: Path, is_ahead: bool
) -> None:
    core = make_core(checkpoint, max_num_seqs=4, async_scheduling=is_ahead)
    for uid in range(6):
        params = {"max_tokens": 40 + uid, "seed": 5}
        core.add_request(add(uid, [10 + uid] * (1 + 7 * uid), params))
    together = run(core)
    assert {uid: len(token_ids(each)) for uid, each in together.items()} == {
        uid: 40 + uid for uid in range(6)
    }
    assert {each[-1].finish_reason for each in together.values()} == {"length"}
    core.add_request(add(9, [3, 4], {"max_tokens": 45, "seed": 5}))
    alone = token_ids(run(core)[9])
    assert alone == token_ids(together[5])
    visible = [core.tokenizer.token_text(token_id) for token_id in alone]
    assert all(text and "\ufffd" not in text for text in visible)
    assert len(set(alone)) > 20


def test_it_stops_only_where_the_request_asks_for_it(checkpoint: Path) -> None:
    core = make_core(checkpoint)
    core.add_request(add(0, [3], {"max_tokens": 100, "seed": 1}))
    ids = token_ids(run(core)[0])
    assert not set(core.generation_defaults.eos_token_ids) & set(ids)
    stop_ids, text = [ids[10]], core.tokenizer.decode(ids[18:20])
    core.add_request(add(1, [3], {"max_tokens": 99, "seed": 1, "stop_token_ids": stop_ids}))
    core.add_request(add(2, [3], {"max_tokens": 100, "seed": 1, "stop": [text]}))
    outputs = run(core)
    assert token_ids(outputs[1]) == ids[:11]
    assert outputs[1][-1].stop_reason == ids[10]
    assert outputs[2][-1].stop_reason == text


def test_log_probabilities_and_samples_have_their_usual_form(checkpoint: Path) -> None:
    llm = LLM(model=str(checkpoint), device="null")
    params = {"max_tokens": 5, "n": 2, "logprobs": 3, "seed": 0}
    (output,) = llm.generate("ab", SamplingParams(**params), use_tqdm=False)
    assert [len(each.token_ids) for each in output.outputs] == [5, 5]
    for each in output.outputs:
        assert each.logprobs is not None
        assert all(len(position) >= 3 for position in each.logprobs)


def test_a_step_takes_the_time_that_is_set_and_no_processor(checkpoint: Path) -> None:
    core = make_core(checkpoint, "null:20")
    core.add_request(add(0, [3], {"max_tokens": 25}))
    began, cpu = time.monotonic(), time.process_time()
    run(core)
    took, used = time.monotonic() - began, time.process_time() - cpu
    assert took >= 25 * 0.020
    assert used < took / 2


def test_it_reads_no_weights_and_has_no_kv_cache(checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    core = make_core(tmp_path, max_num_seqs=1024)
    # All sequences at full length, although no such cache could be allocated for a large model.
    assert core.ready.num_blocks - 1 == 1024 * 128 // 16
    assert make_core(tmp_path, num_gpu_blocks_override=50).ready.num_blocks == 50


def test_a_preempted_sequence_goes_on_as_it_would_have(checkpoint: Path) -> None:
    core = make_core(checkpoint, num_gpu_blocks_override=12, swap_space=0.001)
    for uid in range(6):
        core.add_request(add(uid, [3 + uid], {"max_tokens": 90, "seed": uid}))
    outputs = run(core)
    assert core.scheduler.num_preemptions > 0
    alone = make_core(checkpoint)
    alone.add_request(add(0, [3], {"max_tokens": 90, "seed": 5}))
    assert token_ids(outputs[5]) == token_ids(run(alone)[0])


def test_the_start_says_what_it_is(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(checkpoint, "null:2.5")
    said = "NO MODEL IS COMPUTED: null device, 2.5 ms per step, made-up tokens"
    assert core.ready.description.startswith(said)
    assert [r.levelname for r in caplog.records if said in r.getMessage()] == ["WARNING"]


@pytest.mark.parametrize(
    "device", ["nul", "null:", "null:-1", "null:nan", "null:inf", "null:1e9", "null:1ms", "cuda:1"]
)
def test_nonsense_is_refused_by_name(device: str) -> None:
    with refuses("invalid_setting", "device", match=r"must be auto, cpu, cuda, or null.*\(got '"):
        EngineConfig.parse({"device": device})


@pytest.mark.parametrize(("device", "step_s"), [("null", 0.0), ("null:0.5", 5e-4), ("cpu", None)])
def test_the_step_time_is_part_of_the_device(device: str, step_s: float | None) -> None:
    assert EngineConfig.parse({"device": device}).null_step_s == step_s
