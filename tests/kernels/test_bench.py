"""The kernels' tests run in parallel processes; no result is lost if one of them is killed."""

import time
from pathlib import Path

import pytest

from kernels.bench import shard, testing
from kernels.bench.operations import OPERATIONS, Operation, owner
from kernels.bench.testing import Outcome
from tests.kernels.bench_support import GREEN, RED


def _folder(tmp_path: Path, **files: str) -> Path:
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
    return tmp_path


def test_tests_are_counted_by_operation(tmp_path: Path) -> None:
    many = "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_i(i): assert i < %d\n"
    folder = _folder(
        tmp_path,
        test_good=many % 9,
        test_good_more="import pytest\ndef test_s(): pytest.skip('why')\n",
        test_plan="def test_plan(): pass\n",
        test_plan_more="def test_more(): pass\n",
        test_goodness="def test_shared(): pass\n",
        test_bad=many % 4 + "def test_ends():\n    import os\n    os._exit(7)\n",
        test_red=many % 3,
        test_torn="import no_such_module\n",
        test_bench="def test_never(): assert False\n",
    )
    said: list[str] = []
    counts: list[int] = []
    operations = [
        Operation("good", shards=2),
        Operation("red", requires=("plan",)),
        Operation("bad"),
    ]
    found = testing.run(
        testing.kernel_suites(operations, folder),
        time.time() + 60,
        say=said.append,
        changed=lambda outcomes: counts.append(sum(each.passed for each in outcomes.values())),
        workers=4,
    )
    assert set(found) == {"good", "goodness", "plan", "red", "bad", "torn"}
    assert found["plan"].passed == 2
    assert (found["good"].passed, found["good"].failed, found["good"].skipped) == (5, 0, 1)
    assert found["good"].green
    assert found["goodness"].green
    assert (found["red"].passed, found["red"].failed, found["red"].left) == (3, 2, 0)
    assert sorted(name for name, _ in found["red"].failures) == ["test_i[3]", "test_i[4]"]
    assert "assert 3 < 3" in dict(found["red"].failures)["test_i[3]"]
    assert "def test_i(i): assert i < 3" in found["red"].details[0]
    # A process that dies within a test has failed, whatever passed before.
    assert (found["bad"].passed, found["bad"].left) == (4, 1)
    assert "code 7" in found["bad"].failures[-1][1]
    assert not found["torn"].green
    assert "no_such_module" in found["torn"].details[0]
    assert len(said) == 6
    assert counts == sorted(counts)
    assert counts[-1] == sum(each.passed for each in found.values())


def test_what_has_passed_is_kept_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"test_slow": "import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\n"}
    suites = testing.kernel_suites([], _folder(tmp_path, **files))
    start = time.monotonic()

    def ended() -> Outcome:
        return testing.run(suites, time.time() + 4, say=lambda _: None)["slow"]

    late = ended()
    assert time.monotonic() - start < 30
    assert (late.passed, late.failed, late.left) == (1, 0, 1)
    assert late.green
    assert str(late) == "1 passed, 0 failed, 0 skipped, 1 not run in time"
    # One that runs for too long has hung, and does not just lack time.
    monkeypatch.setattr(testing, "HUNG_S", 0.1)
    hung = ended()
    assert (hung.passed, hung.failed) == (1, 1)
    assert "test_b did not end in" in hung.failures[0][1]
    assert not hung.green
    assert testing.run(suites, time.time() - 1, say=lambda _: None)["slow"] == Outcome()


def test_shards_take_every_test_once() -> None:
    class Config:
        def __init__(self, value: str) -> None:
            self.value = value

        def getoption(self, name: str) -> str:
            assert name == "--shard"
            return self.value

    taken: list[int] = []
    for index in range(3):
        items = list(range(10))
        shard.pytest_collection_modifyitems(Config(f"{index}/3"), items)  # type: ignore[arg-type]
        taken += items
    assert sorted(taken) == list(range(10))


def test_a_test_file_belongs_to_the_operation_it_names() -> None:
    names = ["paged", "paged_decode", "rotary"]
    files = {
        "test_paged_decode.py": "paged_decode",
        "test_paged_decode_properties.py": "paged_decode",
        "test_paged_x.py": "paged",
        "test_rotaryx.py": "rotaryx",
        "paged_decode/test_x.py": "paged_decode",
        "other/test_paged.py": "other",
    }
    assert {file: owner(Path(file), names) for file in files} == files


def test_an_operation_is_refused_for_its_own_tests_and_those_it_needs() -> None:
    operation = Operation("paged", requires=("plan",))
    assert testing.refusals(operation, {"paged": GREEN, "plan": GREEN}) is None
    refusals = {
        "tests of paged: 1 failed": {"paged": RED, "plan": GREEN},
        "tests of plan: 1 failed": {"paged": GREEN, "plan": RED},
        "tests of paged: none passed": {"paged": Outcome(skipped=3), "plan": GREEN},
        "tests of plan: none passed": {"paged": GREEN},
    }
    for reason, tests in refusals.items():
        assert testing.refusals(operation, tests) == reason


def test_required_operations_have_tests() -> None:
    named = {path.name for path in testing.TESTS.iterdir()}
    for operation in OPERATIONS:
        for name in (operation.name, *operation.requires):
            assert {f"test_{name}.py", name} & named
