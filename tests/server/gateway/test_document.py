"""Requests made from the gateway's own OpenAPI document are answered as it says, and soon."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import positive_data_acceptance

from engine.launch.server import TritonServer
from tests.server.scraping import assert_idle

pytestmark = pytest.mark.server

TIMEOUT_S = 30
# What is right by the document may still be refused: limits of the model, fields that exclude
# each other, grammars that cannot be compiled.
NOT_CHECKED = [positive_data_acceptance]
USER = {"role": "user", "content": "a"}
# What a request needs to be answered at all, and what then decides whether it is.
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2, "store": False},
    "/v1/messages": {"model": "alias", "messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "alias", "messages": [USER]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def cases(gateway: str) -> st.SearchStrategy[Case]:
    """Requests that are right by the document, and wrong ones; mostly those that have a body."""
    schema = schemathesis.openapi.from_url(f"http://{gateway}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    with_body = [each for each in operations if each.body]
    assert {each.path for each in with_body} >= NEEDED.keys()
    return st.one_of(
        *(
            each.as_strategy(generation_mode=mode)
            for each in with_body
            for mode in GenerationMode
            for _ in range(4)
        ),
        *(each.as_strategy() for each in operations if not each.body for _ in range(2)),
    )


@pytest.mark.parametrize(
    "number",
    [120, pytest.param(5000, marks=[pytest.mark.large, pytest.mark.timeout(1800)])],
)
def test_answers_are_as_the_document_says(
    cases: st.SearchStrategy[Case], server: TritonServer, number: int
) -> None:
    statuses = Counter[str]()

    # The few are always the same: what only many find is no reason to stop others' work.
    checks = list(HealthCheck)

    @settings(max_examples=number, derandomize=number < 1000, suppress_health_check=checks)
    @given(cases, st.data())
    def ask(case: Case, data: st.DataObject) -> None:
        needed = NEEDED.get(case.operation.path)
        if needed is not None and is_right(case):
            names = sorted(case.body.keys() - needed.keys() - {"model", "messages"})
            kept = data.draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
            case.body = {**needed, **{name: case.body[name] for name in kept}}
        answer = case.call_and_validate(timeout=TIMEOUT_S, excluded_checks=NOT_CHECKED)
        statuses[f"{case.operation.label} {answer.status_code}"] += 1

    ask()
    print(dict(sorted(statuses.items())))
    seen = {label.rpartition(" ")[2] for label in statuses}
    assert {"200", "400", "404"} <= seen
    if number > 1000:
        assert all(statuses[f"POST {path} {status}"] for path in NEEDED for status in (200, 400))
    assert_idle(server)


def is_right(case: Case) -> bool:
    return (
        case.meta is not None
        and case.meta.generation.mode is GenerationMode.POSITIVE
        and isinstance(case.body, dict)
    )
