"""How long forced tokens may keep the loop."""

from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.core import update_from_output
from engine.core.request import Request


def test_the_rest_of_the_sequences_sample_when_a_step_has_no_time_left(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(checkpoint), dtype="float32", max_num_seqs=8)
    params = SamplingParams.parse(
        {"structured_outputs": {"regex": "[ab]{2}x{40}"}, "n": 6, "max_tokens": 60, "seed": 3}
    )
    calls = []
    forced = Request.forced_tokens

    def counted(request: Request) -> list[int]:
        calls.append(request)
        return forced(request)

    monkeypatch.setattr(Request, "forced_tokens", counted)
    [usual] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    num_usual = len(calls)
    monkeypatch.setattr(update_from_output, "_MAX_FORCING_S", 0.0)
    [result] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert len(calls) == num_usual  # none with no time at all
    assert result.outputs == usual.outputs
