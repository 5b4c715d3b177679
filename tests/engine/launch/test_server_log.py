"""Reading tritonserver's log."""

import pytest

from engine.launch import server_log

LOAD_FAILURE = r"""
E1120 16:37:07.834479 57 server.cc:241] "CudaDriverHelper has not been initialized."
2026-11-20 16:55:43.370 INFO trident.engine: loading the weights of /m
E1120 16:37:10.3 57 model_lifecycle.cc:642] "failed to load 'tokenizer' version 1: Internal: TritonModelException: /m: no tokenizer.json\n\nAt:\n  /r/model.py(9): initialize\n"
E1120 16:37:10.4 57 model_lifecycle.cc:642] "failed to load 'detokenizer' version 1: Internal: TritonModelException: /m: no tokenizer.json\n\nAt:\n  /r/model.py(9): initialize\n"
E1120 16:37:10.5 57 model_lifecycle.cc:642] "failed to load 'engine' version 1: Unavailable: TritonModelException: needs \"9 GB\" of memory\n\nAt:\n  /r/model.py(9): initialize\n"
error: creating server: Internal - failed to load all models
"""  # noqa: E501


class TestServerLog:
    def test_parse_lines_of_tritonserver_and_of_ours(self) -> None:
        theirs = server_log.parse('I1120 16:36:59.787646 5560 model.py:10] "a \\"b\\""')
        assert (theirs.severity, theirs.source, theirs.text) == ("I", "model.py", 'a "b"')
        assert not theirs.from_engine
        ours = server_log.parse("2026-11-20 16:55:43.370 WARNING trident.engine: low memory")
        assert (ours.severity, ours.source, ours.text) == ("W", "trident.engine", "low memory")
        assert ours.from_engine
        assert ours.is_problem
        assert server_log.parse("| a | b |").severity == ""

    def test_parse_our_lines_in_json(self) -> None:
        line = (
            '{"ts":"2026-11-20T16:55:43.370Z","level":"WARNING","logger":"trident.engine",'
            '"event":"low memory","fields":{"uid":7}}'
        )
        ours = server_log.parse(line)
        assert (ours.severity, ours.source, ours.text) == (
            "W",
            "trident.engine",
            "low memory uid=7",
        )
        for theirs in ('{"ts":1}', '{"ts":"cut off', '{"ts":[],"level":[],"fields":{},"event":1}'):
            assert server_log.parse(theirs) == server_log.LogLine("", "", theirs)

    def test_an_exception_in_json_is_shown(self) -> None:
        log = (
            '{"ts":"2026-11-20T16:55:43.370Z","level":"ERROR","logger":"trident.engine",'
            '"event":"start-up failed","fields":{"exception":"Traceback (most recent call last):'
            '\\n  File \\"/x.py\\", line 1\\nKeyError: \'torch\'"}}\n'
            "E1120 17:00:00.000000 7 model_lifecycle.cc:642] \"failed to load 'engine' version 1: "
            "Internal: TritonModelException: the engine process ended with status 1 before it was "
            'ready; its log says why"\n'
        )
        assert server_log.failure(log)[0].endswith("its log says why:\nKeyError: 'torch'")

    def test_what_a_machine_without_gpu_says_is_no_problem(self) -> None:
        line = server_log.parse('E1120 16:36:57.3 1 server.cc:241] "CudaDriverHelper has not been"')
        assert not line.is_problem
        assert server_log.parse('E1120 16:36:57.3 1 a.cc:1] "CUDA out of memory"').is_problem

    def test_failure_gives_each_reason_once_in_its_own_words(self) -> None:
        reason, hint = server_log.failure(LOAD_FAILURE)
        assert reason == '/m: no tokenizer.json\nneeds "9 GB" of memory'
        assert "--max-model-len" in hint

    def test_a_reason_that_says_what_to_do_gets_no_other_hint(self) -> None:
        asked = "quantization: the checkpoint is not in awq: it is not quantised; leave it out"
        log = LOAD_FAILURE.replace("/m: no tokenizer.json", asked)
        reason, hint = server_log.failure(log)
        assert reason.startswith(asked)
        assert hint == ""

    def test_an_exception_of_the_engine_process_is_shown(self) -> None:
        log = (
            "Traceback (most recent call last):\n"
            '  File "/x.py", line 1, in <module>\n'
            "ModuleNotFoundError: No module named 'torch'\n"
            "E1120 17:00:00.000000 7 model_lifecycle.cc:642] \"failed to load 'engine' version 1: "
            "Internal: TritonModelException: the engine process ended with status 1 before it was "
            'ready; its log says why"\n'
        )
        reason, _ = server_log.failure(log)
        assert reason.endswith("its log says why:\nModuleNotFoundError: No module named 'torch'")

    @pytest.mark.parametrize(
        ("log", "reason"),
        [
            ("/x/tritonserver: unrecognized option '--foo'\nUsage:", "unrecognized option '--foo'"),
            ("error: creating server: Internal - no\n", "creating server: Internal - no"),
            (
                "tritonserver: error while loading shared libraries: libb64.so",
                "error while loading shared libraries: libb64.so",
            ),
            ("", "tritonserver ended without an error message"),
            (
                "2026-11-20 16:55:43.370 WARNING trident.kernels: no CPU kernels",
                "tritonserver ended without an error message",
            ),
            (  # what a client has sent is not the reason
                "2026-11-20 16:55:43.370 INFO trident.request: request refused "
                'error="guided_regex: regex parse error: (?=a) error: call me"',
                "tritonserver ended without an error message",
            ),
        ],
    )
    def test_other_failures(self, log: str, reason: str) -> None:
        assert server_log.failure(log)[0] == reason


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (0, "", "ended with status 0"),
        (-11, "Signal (11) received.", "was killed by SIGSEGV"),
        (-40, "", "was killed by signal 40"),
        (
            -6,
            "E1128 22:27:40.243 30905 proto_buffer_writer.h:65]    ASSERTION FAILED: !buffer\n",
            "was killed by SIGABRT (ASSERTION FAILED: !buffer)",
        ),
        (
            -6,
            "malloc(): corrupted top size\nSignal (6) received.\n",
            "was killed by SIGABRT (malloc(): corrupted top size)",
        ),
    ],
)
def test_death_is_told_with_last_words_that_say_why(status: int, said: str, told: str) -> None:
    assert server_log.death(status, said) == f"tritonserver {told}"


def test_a_crash_is_known_by_a_line_of_its_own_alone() -> None:
    assert server_log.tells_of_crash("Signal (11) received.\n")
    for line in ("Signal (15) received.", 'request refused error="Signal (11) received."'):
        assert not server_log.tells_of_crash(line)
