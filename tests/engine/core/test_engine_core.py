"""What the engine hands out step by step."""

import shutil
import time
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import CheckpointError, QueueFullError
from engine.service.messages import AddRequest, SequenceOutput


def make_core(checkpoint: Path, **settings: object) -> EngineCore:
    return EngineCore(
        EngineConfig.parse({"model": str(checkpoint), "dtype": "float32", **settings})
    )


def request(uid: int, max_tokens: int = 9, **fields: object) -> AddRequest:
    params = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return AddRequest(uid, [5, 6, 7], {**params, **fields})


def run(core: EngineCore) -> list[SequenceOutput]:
    outputs = []
    while core.has_unfinished_requests():
        outputs += core.step()
    core.check_integrity()
    return outputs


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 9), (4, [1, 4, 4]), (20, [1, 8])])
def test_chunks_have_the_streams_interval_but_the_first_token_comes_at_once(
    checkpoint: Path, interval: int, sizes: list[int]
) -> None:
    core = make_core(checkpoint, stream_interval=interval)
    core.add_request(request(1))
    assert [len(output.token_ids) for output in run(core)] == sizes


def test_without_streaming_everything_comes_at_the_end(checkpoint: Path) -> None:
    core = make_core(checkpoint)
    streamed, whole = request(1), request(2)
    core.add_request(streamed)
    core.add_request(AddRequest(2, whole.prompt_token_ids, whole.sampling_params, stream=False))
    outputs = run(core)
    (answer,) = [output for output in outputs if output.uid == 2]
    assert answer.token_ids == [i for o in outputs if o.uid == 1 for i in o.token_ids]


def test_a_full_queue_refuses_the_next_one_only(checkpoint: Path) -> None:
    core = make_core(checkpoint, max_num_queued_reqs=2)
    core.add_request(request(1))
    core.add_request(request(2))
    with pytest.raises(QueueFullError, match="Maximum queue size of 2 requests"):
        core.add_request(request(3))
    assert {output.uid for output in run(core)} == {1, 2}


def test_a_deadline_ends_what_waits_and_what_runs(checkpoint: Path) -> None:
    core = make_core(checkpoint, max_num_seqs=1)
    params = {"max_tokens": 100, "ignore_eos": True}
    for uid in (1, 2):
        core.add_request(AddRequest(uid, [5, 6], params, timeout_s=0.2))
    core.add_request(request(3))
    core.step()
    time.sleep(0.25)
    finished = {o.uid: o.finish_reason for o in run(core) if o.finish_reason is not None}
    assert finished == {1: "abort", 2: "abort", 3: "length"}


def test_an_end_token_that_the_model_does_not_have_is_refused_at_the_start(
    checkpoint: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "generation_config.json").write_text('{"eos_token_id": [0, 400]}')
    with pytest.raises(CheckpointError, match=r"eos_token_id: 400 must be below .* 400$"):
        make_core(broken)


def test_statistics_of_a_request(checkpoint: Path) -> None:
    core = make_core(checkpoint, block_size=4)
    prompt = list(range(10, 30))
    for uid in (1, 2):
        core.add_request(AddRequest(uid, prompt, {"max_tokens": 3, "ignore_eos": True}))
        (stats,) = [output.stats for output in run(core) if output.stats is not None]
        assert (stats.num_prompt_tokens, stats.num_output_tokens) == (20, 3)
        assert stats.num_cached_tokens == (16 if uid == 2 else 0)
        times = [
            stats.arrival_time,
            stats.first_scheduled_time,
            stats.first_token_time,
            stats.finished_time,
        ]
        assert times == sorted(times)
