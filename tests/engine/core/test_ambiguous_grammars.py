"""A grammar whose masks cost more and more ends its own request, and delays no other."""

from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import RequestError
from engine.protocol.messages import AddRequest, RequestFailed, SequenceOutput
from engine.protocol.token_ids import pack_token_ids
from tests.factories.cores import MakeCore, request
from tests.factories.late_grammars import LateWorkers
from tests.factories.outputs import listed

# The trial follows a capital letter, after which the text is over.
_AMBIGUOUS = 'start: /[A-Z]/ | "z" s\ns: s s s s s | s s s s | s s s | s s | /[a-z ]/'


def _run(core: EngineCore) -> dict[int, list[SequenceOutput | RequestFailed]]:
    found: dict[int, list[SequenceOutput | RequestFailed]] = {}
    while core.has_unfinished_requests():
        outputs = core.step()
        for each in [*listed(outputs), *outputs.failures]:
            found.setdefault(each.uid, []).append(each)
    core.check_integrity()
    core.check_idle()
    return found


def test_step_ambiguous_grammar_ends_its_request_alone(make_core: MakeCore) -> None:
    core = make_core()
    [z] = core.tokenizer.encode("z", add_special_tokens=False)
    hostile = {"structured_outputs": {"grammar": _AMBIGUOUS}, "logit_bias": {z: 100.0}}
    core.add_request(request(1, 100, min_tokens=90, temperature=1.0, **hostile))
    core.add_request(request(2, 40))
    core.add_request(request(3, 40, structured_outputs={"regex": "[a-z ]{30}"}))
    found = _run(core)
    failure = found[1][-1]
    assert isinstance(failure, RequestFailed)
    assert failure.error.code == RequestError.code
    assert "the grammar cannot be followed" in failure.error.message
    assert "too ambiguous" in failure.error.message or "Too many items" in failure.error.message
    for uid, reason in ((2, "length"), (3, "stop")):
        last = found[uid][-1]
        assert isinstance(last, SequenceOutput)
        assert last.finish_reason == reason


@pytest.mark.parametrize("is_ahead", [False, True])
def test_step_late_masks_change_no_token(checkpoint: Path, is_ahead: bool) -> None:
    """Where all steps wait, where few do, and where sequences are preempted meanwhile."""
    asked = [
        {"structured_outputs": {"regex": "([a-f]{2}x{9}){1,9}!"}, "n": 3, "logprobs": 1},
        {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}},
        {"ignore_eos": True},
    ]
    outputs = []
    for is_late, blocks in (([False], 200), ([True, True, False], 200), ([True, False], 40)):
        settings = {"async_scheduling": is_ahead, "max_num_seqs": 8, "block_size": 4}
        fields = {"model": str(checkpoint), "dtype": "float32", "deterministic": True, **settings}
        core = EngineCore(EngineConfig.parse({**fields, "num_gpu_blocks_override": blocks}))
        workers = LateWorkers(is_late)
        core.scheduler._output_updater._mask_workers = workers
        for uid, each in enumerate(asked, start=1):
            params = {"max_tokens": 40, "temperature": 1.0, "seed": 3, **each}
            core.add_request(AddRequest(uid, pack_token_ids([5, 6, 7]), params, stream=False))
        found = _run(core)
        outputs.append(
            {
                (uid, each.index): (each.token_ids, each.finish_reason, each.logprobs)
                for uid, many in found.items()
                for each in many
                if isinstance(each, SequenceOutput)
            }
        )
        assert (workers.num_late > 0) == any(is_late)
        assert core.scheduler.num_preemptions == 0 or blocks == 40
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0]) == 5
