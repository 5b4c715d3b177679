"""Work goes on in another process after a fault or a hang, and no result is lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.bench.gpu.supervisor import Supervisor, meanwhile

_WORKER = """
import json, sys, time
request = json.load(sys.stdin)
say = lambda **message: print("@@ " + json.dumps(message), flush=True)
print("noise")
for key in request["keys"]:
    say(begins=key)
    if "hang" in key:
        time.sleep(60)
    if "die" in key:
        sys.exit("illegal memory access")
    say(ends=key, status="measured", seconds=1.0)
"""


def supervise(
    keys: Sequence[str] | None, command: Sequence[str] | str = _WORKER, seconds: float = 60.0
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    if isinstance(command, str):
        command = (sys.executable, "-c", command)
    deadline = time.time() + seconds
    Supervisor(command, keys, deadline, found.__setitem__, silence=4.0, grace=0.5).run()
    return found


def test_work_goes_on_after_a_fault_and_after_a_hang() -> None:
    found = supervise(["a", "die", "b", "hang", "c"])
    assert {key for key in found if found[key]["status"] == "measured"} == {*"abc"}
    reason = "its process ended with code 1: illegal memory access"
    assert found["die"] == {"status": "failed", "reason": reason}
    assert found["hang"] == {"status": "failed", "reason": "no word for 4 s"}


def test_a_process_that_outlasts_the_deadline_is_killed() -> None:
    program = _WORKER.replace(
        "time.sleep(60)", "[print(i, flush=True) or time.sleep(.1) for i in range(600)]"
    )
    start = time.monotonic()
    found = supervise(["a", "hang", "b"], program, seconds=2.0)
    assert time.monotonic() - start < 20
    assert found["a"]["status"] == "measured"
    assert found["hang"] == {"status": "left out", "reason": "it did not end in time"}
    assert found["b"] == {"status": "left out", "reason": "no time was left"}


def test_a_process_that_cannot_work_is_not_started_for_ever() -> None:
    found = supervise(["a", "b"], "raise SystemExit('no GPU')")
    assert set(found) == {"a", "b"}
    assert all(each["status"] == "failed" and "no GPU" in each["reason"] for each in found.values())


def test_work_is_done_meanwhile(tmp_path: Path) -> None:
    program = (
        "import json, pathlib, sys, time\n"
        "keys = json.load(sys.stdin)['keys']\n"
        "time.sleep(60 if 'hang' in keys else 0.1)\n"
        f"(pathlib.Path({str(tmp_path)!r}) / keys[0]).touch()\n"
    )
    start = time.monotonic()
    command = (sys.executable, "-c", program)
    with meanwhile([(command, [key]) for key in ("a", "hang", "b")], time.time() + 2):
        pass
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}
    assert time.monotonic() - start < 20


def test_tests_are_shared_out_and_go_on_after_one_that_kills_its_process(tmp_path: Path) -> None:
    many = "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_i(i): assert i < %d\n"
    files = {
        "test_some": many % 4 + "def test_s(): pytest.skip('why')\n",
        "test_dies": "def test_ends():\n    import os\n    os._exit(7)\ndef test_after(): pass\n",
        "test_torn": "import no_such_module\n",
    }
    paths = []
    for name, content in files.items():
        paths.append(tmp_path / f"{name}.py")
        paths[-1].write_text(content)
    worker = (sys.executable, "-m", "engine.bench.gpu.pytest_worker")
    arguments = [str(tmp_path), *map(str, paths)]
    shares = [supervise(None, (*worker, share, *arguments)) for share in ("0/2", "1/2")]
    assert not shares[0].keys() & shares[1].keys()
    found = shares[0] | shares[1]
    status = {key: each["status"] for key, each in found.items()}
    assert status == {
        **{f"test_some.py::test_i[{i}]": "passed" for i in range(4)},
        "test_some.py::test_i[4]": "failed",
        "test_some.py::test_s": "skipped",
        "test_dies.py::test_ends": "failed",
        "test_dies.py::test_after": "passed",
        "test_torn.py": "failed",
    }
    assert "assert 4 < 4" in found["test_some.py::test_i[4]"]["reason"]
    assert "def test_i(i): assert i < 4" in found["test_some.py::test_i[4]"]["details"]
    assert "code 7" in found["test_dies.py::test_ends"]["reason"]
    assert "no_such_module" in found["test_torn.py"]["details"]
