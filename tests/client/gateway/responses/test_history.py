"""What a request refers to of stored responses is bounded before it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.gateway.in_process import InProcess
from tests.factories.costs import peak_of

PATH = "/v1/responses"
TEXT = "a" * 2**20


@pytest.fixture(scope="module")
def gateway() -> Iterator[InProcess]:
    with InProcess() as made:
        yield made


def create(gateway: InProcess, **body: Any) -> dict[str, Any]:
    status, answer = gateway.ask(PATH, {"store": True, **body})
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    assert found["store"]
    return found


def error(gateway: InProcess, **body: Any) -> dict[str, Any]:
    before = gateway.num_bytes
    status, answer = gateway.ask(PATH, body)
    assert status == 400
    assert gateway.num_bytes == before
    found: dict[str, Any] = json.loads(answer)["error"]
    return found


def reference(response: dict[str, Any]) -> dict[str, Any]:
    return {"id": response["output"][0]["id"]}


def test_item_referred_to_twice_is_refused(gateway: InProcess) -> None:
    same = reference(create(gateway, input="a"))
    found = error(gateway, input=[{"role": "user", "content": "b"}, same, same])
    assert found["param"] == "input[2].id"
    assert "must be of another item than input[1].id" in found["message"]


def test_items_of_several_responses_are_found_in_the_order_of_the_input(
    gateway: InProcess,
) -> None:
    made = [create(gateway, input=f"question {i}") for i in range(3)]
    references = [reference(made[i]) for i in (2, 0, 1)]
    last = create(gateway, input=[*references, {"role": "user", "content": "b"}])
    status, listed = gateway.get(f"{PATH}/{last['id']}/input_items?order=asc")
    assert status == 200
    assert [each["id"] for each in json.loads(listed)["data"]][:3] == [r["id"] for r in references]


def test_item_that_is_not_there_is_named(gateway: InProcess) -> None:
    there = reference(create(gateway, input="a"))
    assert error(gateway, input=[there, {"id": "msg_1"}])["param"] == "input[1].id"


def test_earlier_response_above_the_size_of_a_body_is_refused(gateway: InProcess) -> None:
    made = create(gateway, input=TEXT * 6)
    made = create(gateway, input=TEXT * 3, previous_response_id=made["id"])
    made = create(gateway, input=TEXT * 2, previous_response_id=made["id"])
    found = error(gateway, input="b", previous_response_id=made["id"])
    assert found["param"] == "previous_response_id"
    assert "at most 10485760 are allowed in all" in found["message"]


def test_items_above_the_size_of_a_body_are_refused(gateway: InProcess) -> None:
    ids = []
    for _ in range(11):
        made = create(gateway, input=[{"role": "user", "content": TEXT}])
        _, listed = gateway.get(f"{PATH}/{made['id']}/input_items")
        ids.append(json.loads(listed)["data"][0]["id"])
    found = error(gateway, input=[{"id": each} for each in ids])
    assert found["param"] == "input[1].id"  # the last ones are looked up first
    assert "at most 10485760 are allowed in all" in found["message"]


def test_items_of_a_conversation_above_their_limit_are_refused(gateway: InProcess) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    made = create(gateway, input=[{"role": "user", "content": "a"}, *[call] * 10_000])
    found = error(gateway, input=[call] * 7000, previous_response_id=made["id"])
    assert found["param"] == "input"
    assert found["message"] == (
        "input: the conversation has 17002 items; at most 16384 are allowed"
    )


def test_annotations_and_logprobs_of_input_are_dropped(gateway: InProcess) -> None:
    beside = {"annotations": [{"type": "a"}], "logprobs": [{"token": "a"}]}
    part = {"type": "output_text", "text": "a", **beside}
    items = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "b"}]
    made = create(gateway, input=items)
    _, listed = gateway.get(f"{PATH}/{made['id']}/input_items?order=asc")
    kept = json.loads(listed)["data"][0]["content"][0]
    assert kept == {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}


def test_items_are_listed_without_reading_all_of_them(gateway: InProcess) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    made = create(gateway, input=[{"role": "user", "content": "a"}, *[call] * 10_000])
    path = f"{PATH}/{made['id']}/input_items?limit=2"
    assert peak_of(lambda: gateway.get(path)) < 4 * 2**20  # all of them as objects: 6 MiB
