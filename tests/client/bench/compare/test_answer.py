"""What one request's answer says, and the figures of all answers."""

import json
from dataclasses import replace
from typing import Any

import pytest

from client.bench.compare.answer import Answer
from client.bench.compare.completions import take
from client.bench.compare.measurement import measurement
from client.bench.cpu import OTHERS, STOLEN
from client.bench.errors import BenchError


class TestEvents:
    def _answer(self, *events: Any) -> Answer:
        answer = Answer(0.0)
        for now, event in enumerate(events):
            take(answer, event if isinstance(event, bytes) else json.dumps(event).encode(), now)
        return answer

    def test_a_count_in_each_chunk_is_believed(self) -> None:
        answer = self._answer(
            {"choices": [{"text": ""}], "usage": {"prompt_tokens": 5, "completion_tokens": 0}},
            {"choices": [{"text": ""}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}},
            {"choices": [{"text": "ab"}], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
            b"[DONE]",
        )
        assert (answer.num_tokens, answer.num_prompt_tokens) == (3, 5)
        assert answer.arrivals == [1, 2]

    def test_without_it_each_text_is_a_token(self) -> None:
        texts = [{"choices": [{"text": text}], "usage": None} for text in ("a", "b", "")]
        answer = self._answer(*texts)
        assert (answer.num_tokens, answer.arrivals) == (2, [0, 1])

    def test_the_usage_at_the_end_corrects_the_count(self) -> None:
        answer = self._answer(
            {"choices": [{"text": "a b"}]},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}},
        )
        assert (answer.num_tokens, answer.arrivals) == (4, [0])

    @pytest.mark.parametrize("event", [{"error": {"message": "out of memory"}}, b"{oops"])
    def test_no_chunk(self, event: Any) -> None:
        with pytest.raises(BenchError, match=r"out of memory|cannot be read"):
            self._answer(event)


class TestAnswer:
    def test_lengths_are_checked(self) -> None:
        good = Answer(0.0, [1.0, 2.0], num_tokens=4, num_prompt_tokens=8)
        assert good.why_unusable(8, 4) == ""
        assert replace(good, num_prompt_tokens=0).why_unusable(8, 4) == ""
        assert "answered with 4 tokens where 5" in good.why_unusable(8, 5)
        assert "counted 8 tokens in a prompt of 9" in good.why_unusable(9, 4)
        assert (good.ttft, good.gaps) == (1.0, [1.0])

    def test_measurement(self) -> None:
        answers = [Answer(10.0, [10.5, 11.0], 3), Answer(10.2, [10.4], 1)]
        used = {OTHERS: 1.0, STOLEN: 0.5}
        one = measurement(answers, cpu_seconds=used, core_seconds=2.0, memory=7)
        assert (one.num_tokens, one.num_responses, one.seconds) == (4, 3, 1.0)
        assert one.ttfts == pytest.approx([0.5, 0.2])
        assert one.gaps == [0.5]
        assert one.tokens_per_second == 4
        assert (one.others, one.stolen) == (0.5, 0.25)
        assert one.is_disturbed
        assert not replace(one, others=0.02).is_disturbed
        assert replace(one, others=0.021).is_disturbed
