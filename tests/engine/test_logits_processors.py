"""Logits processors of an installed package, DRY, and faults, through the offline API."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.config.engine_config import EngineConfig
from engine.core.constraints.dry import Dry, DryArgs
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, RequestError, TridentError
from engine.logits_processors import ProcessorRow
from engine.protocol.messages import AddRequest, RequestFailed
from engine.protocol.token_ids import pack_token_ids
from tests.factories.processors import Counting, install

COUNTING = "tests.factories.processors:Counting"
VOCAB = 400
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of `sys.path` with a package that offers the processor `counting`."""
    folder = install(tmp_path_factory.mktemp("packages"), {"counting": COUNTING})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module", params=[False, True], ids=["step-by-step", "one-step-ahead"])
def llm(checkpoint: Path, packages: Path, request: pytest.FixtureRequest) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_seqs": 8}
    # Too few blocks for 8 long sequences: some are preempted.
    settings |= {"num_gpu_blocks_override": 60, "max_logprobs": VOCAB}
    return LLM(str(checkpoint), **settings, async_scheduling=request.param)


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        llm: LLM = request.getfixturevalue("llm")
        llm.check_integrity()
        assert llm.num_free_blocks == llm.num_blocks


def counting(llm: LLM) -> Counting:
    processor = llm._core._factory._processors._installed["counting"]
    assert isinstance(processor, Counting)
    return processor


def params(*asked: dict[str, Any] | str, **fields: Any) -> SamplingParams:
    processors = [{"name": "counting", "args": a} if isinstance(a, dict) else a for a in asked]
    settings = {"temperature": 1.0, "max_tokens": 12, "seed": 3, "ignore_eos": True}
    return SamplingParams.parse({**settings, "logits_processors": processors, **fields})


def tokens(llm: LLM, *many: SamplingParams) -> list[list[int]]:
    results = llm.generate([PROMPT] * len(many), many, use_tqdm=False)
    return [list(output.token_ids) for result in results for output in result.outputs]


@pytest.mark.parametrize("dense", [False, True])
def test_a_processor_chooses_the_tokens(llm: LLM, dense: bool) -> None:
    asked = params({"first": 390, "dense": dense}, n=2)
    expected = [(390 + i) % VOCAB for i in range(12)]
    assert tokens(llm, asked) == [expected] * 2


def test_others_in_the_batch_are_what_they_are_alone(llm: LLM) -> None:
    plain = [params(seed=seed, top_k=50, logprobs=1) for seed in range(3)]
    alone = [tokens(llm, each)[0] for each in plain]
    calls = counting(llm).calls
    calls.clear()
    asked = [params({"first": 10}), params({"first": 20, "dense": True}, presence_penalty=1.0)]
    found = tokens(llm, *plain, *asked)
    assert found[:3] == alone
    assert found[3:] == [[*range(10, 22)], [*range(20, 32)]]
    assert max(calls) == 2
    calls.clear()
    assert [tokens(llm, each)[0] for each in plain] == alone
    assert not calls, "no step asks for it"


def test_several_processors_add_up(llm: LLM) -> None:
    both = params({"first": 10}, {"first": 10}, {"first": 10, "dense": True})
    assert tokens(llm, both) == [[*range(10, 22)]]


def test_log_probabilities_are_those_of_the_model(llm: LLM) -> None:
    raw = llm.generate([PROMPT], params(logprobs=VOCAB, max_tokens=1), use_tqdm=False)
    asked = params({"first": 33}, logprobs=0, max_tokens=1)
    found = llm.generate([PROMPT], asked, use_tqdm=False)
    [[chosen]] = [o.logprobs for o in found[0].outputs]
    [[every]] = [o.logprobs for o in raw[0].outputs]
    assert chosen[33].logprob == pytest.approx(every[33].logprob, abs=1e-5)


def test_preempted_sequences_go_on_where_they_were(llm: LLM) -> None:
    asked = [params({"first": 7 * i}, max_tokens=60) for i in range(8)]
    results = llm.generate([PROMPT] * 8, asked, use_tqdm=False)
    assert any(result.metrics.num_preemptions for result in results)
    for i, result in enumerate(results):
        expected = [(7 * i + k) % VOCAB for k in range(60)]
        assert list(result.outputs[0].token_ids) == expected


DRY = {"temperature": 0.0, "dry_multiplier": 3.0, "dry_base": 2.0, "dry_sequence_breakers": ["a"]}


def test_dry_takes_the_token_that_is_best_after_its_penalties(llm: LLM) -> None:
    prompt = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6]
    few = {"allowed_token_ids": [5, 6, 7, 8]}  # so that they come again
    asked = params(max_tokens=40, logprobs=VOCAB, **few, **DRY)
    [result] = llm.generate([prompt], asked, use_tqdm=False)
    [output] = result.outputs
    args, text_of = DryArgs(3.0, 2.0, 2, len(prompt) + 40, ("a",)), llm._core.detokenizer.token_text
    num_penalised = 0
    for index, (token, top) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = ProcessorRow(args, np.array([*prompt, *output.token_ids[:index]], dtype=np.int32))
        scores = np.full(VOCAB, -np.inf)
        for allowed in few["allowed_token_ids"]:
            scores[allowed] = top[allowed].logprob
        [penalties] = Dry(text_of).adjust([row])
        if penalties is not None:
            np.add.at(scores, *penalties)
            num_penalised += 1
        assert token == scores.argmax()
    assert num_penalised > 20
    [plain] = llm.generate([prompt], params(max_tokens=40, temperature=0.0, **few), use_tqdm=False)
    assert plain.outputs[0].token_ids != output.token_ids


def test_dry_while_sequences_are_preempted(llm: LLM) -> None:
    alone = tokens(llm, params(max_tokens=60, **DRY))[0]
    results = llm.generate([PROMPT] * 8, [params(max_tokens=60, **DRY)] * 8, use_tqdm=False)
    assert any(result.metrics.num_preemptions for result in results)
    assert all(list(result.outputs[0].token_ids) == alone for result in results)


def test_dry_and_a_grammar(llm: LLM) -> None:
    grammar = {"structured_outputs": {"regex": "(ab)*c{5}"}}
    [result] = llm.generate([PROMPT], params(**DRY, **grammar), use_tqdm=False)
    assert set(result.outputs[0].text) <= {*"abc"}


FAULTS = {
    "raise": "RuntimeError: the processor is broken",
    "nan": "ValueError: a value is NaN or positive infinity",
    "infinity": "ValueError: a value is NaN or positive infinity",
    "outside": r"ValueError: token ids must be 0 to 399, within the vocabulary",
    "lengths": r"ValueError: token ids of shape \[2\] and values of shape \[1\]",
    "floats": "ValueError: token ids must be integers",
    "shape": r"ValueError: values must have shape \[400\] \(got \[399\]\)",
    "dense nan": "ValueError: a value is NaN or positive infinity, or all",
    "nothing left": "ValueError: .*or all are negative infinity",
    "text": "ValueError: values must be numbers",
    "write": "ValueError: assignment destination is read-only",
    "count": "ValueError: 2 adjustments for 1 rows",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_the_error_of_its_request_alone(llm: LLM, fault: str) -> None:
    core = llm._core
    alone = tokens(llm, params(seed=9))[0]
    many = {
        1: params({"first": 5, "fail": fault, "at": 3}, n=2),
        2: params({"first": 50}),
        3: params(seed=9),
    }
    first = 10**6 + 10 * len(counting(llm).calls)  # larger than those before
    for uid, each in many.items():
        fields = each.model_dump(exclude_defaults=True)
        core.add_request(AddRequest(first + uid, pack_token_ids(PROMPT), fields))
    llm._next_uid = first + 10
    found: dict[int, list[int]] = {uid: [] for uid in many}
    failures: list[RequestFailed] = []
    while core.has_unfinished_requests():
        outputs = core.step()
        failures += outputs.failures
        for output in outputs.rows():
            found[output.uid - first] += output.token_ids
    [failed] = failures
    assert (failed.uid, failed.error.code) == (first + 1, "internal")
    begin = "logits_processors.counting: the processor failed: "
    assert re.match(begin + FAULTS[fault], str(TridentError.of(failed.error)))
    assert found[2] == [*range(50, 62)]
    assert found[3] == alone


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            ["other"],
            r"^prompt 0: logits_processors\[0\]\.name: there is no logits processor 'other'; "
            "installed: 'counting'$",
        ),
        (
            [{"name": "counting"}],
            r"^prompt 0: logits_processors\[0\]\.args: first: must be 0 to 399 \(got None\)",
        ),
        (
            ["counting", {"name": "counting", "args": {"first": 1, "x": 1}}],
            r"^prompt 0: logits_processors\[0\]\.args: first",
        ),
        (
            [{"name": "counting", "args": {"first": 1, "fail": "validation"}}],
            r"^prompt 0: logits_processors\[0\]\.args: the processor failed to check its arguments",
        ),
        ([{"args": {}}], r"^logits_processors\[0\]\.name: Field required"),
        ([{"name": "counting", "arg": {}}], r"^logits_processors\[0\]\.arg: unknown field"),
        ("counting", r"^logits_processors: .*tuple"),
        (["counting"] * 9, r"^logits_processors: must have at most 8 elements, not 9"),
    ],
)
def test_what_a_request_asks_for_is_checked_first(llm: LLM, asked: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokens(llm, SamplingParams.parse({"logits_processors": asked}))


def test_processors_are_listed_when_the_engine_starts(
    checkpoint: Path, packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig.parse({"model": str(checkpoint), "dtype": "float32"})
    with caplog.at_level(logging.INFO, "trident.engine"):
        EngineCore(config)
    assert f"logits processor 'counting' ({COUNTING}, trident-processors 1.2)" in caplog.text


@pytest.mark.parametrize("target", ["tests.factories.processors:Missing", "math:pi", "no.such:x"])
def test_a_processor_that_cannot_be_made_ends_the_start(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, {"broken": target})))
    with pytest.raises(ConfigError, match=r"^logits processor 'broken' .* cannot be loaded: "):
        LLM(str(checkpoint), dtype="float32")


def test_two_of_the_same_name_end_the_start(
    checkpoint: Path, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = install(tmp_path / "a", {"counting": COUNTING})
    info = next(other.glob("*.dist-info"))
    info.rename(other / "another-3.dist-info")
    (other / "another-3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: another\nVersion: 3\n"
    )
    monkeypatch.syspath_prepend(str(other))
    with pytest.raises(ConfigError, match="another installed package has"):
        LLM(str(checkpoint), dtype="float32")


def test_a_processor_that_contradicts_the_grammar_fails_the_request(llm: LLM) -> None:
    # The grammar forces tokens, none of which the processor leaves.
    grammar = {"structured_outputs": {"regex": "abcabcabc"}}
    with pytest.raises(RequestError, match="the grammar cannot be followed"):
        tokens(llm, params({"first": 390, "dense": True}, **grammar))
