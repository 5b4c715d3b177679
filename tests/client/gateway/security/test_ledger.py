"""Numbers that processes share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from client.gateway.errors import ApiError
from client.gateway.security.quotas import Ledger, Quotas
from client.gateway.security.tenants import Tenant, Tenants

COUNT = """
import sys
from pathlib import Path
from client.gateway.security.quotas import Ledger
ledger = Ledger(2, Path(sys.argv[1]))
for _ in range(20_000):
    with ledger as numbers:
        numbers[1] += 1
"""
HOLD = """
import sys, time
from pathlib import Path
from client.gateway.security.quotas import Ledger
with Ledger(2, Path(sys.argv[1])) as numbers:
    numbers[0] = 0.5
    print(flush=True)
    time.sleep(60)
"""


def _python(script: str, file: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE)


def test_nothing_is_lost_between_processes(tmp_path: Path) -> None:
    counting = [_python(COUNT, tmp_path / "x") for _ in range(2)]
    for each in counting:
        with each:
            assert each.wait(60) == 0
    with Ledger(2, tmp_path / "x") as numbers:
        assert list(numbers) == [0, 40_000]


def test_who_is_killed_does_not_keep_others_out(tmp_path: Path) -> None:
    with _python(HOLD, tmp_path / "x") as holding:
        assert holding.stdout is not None
        holding.stdout.readline()
        holding.kill()
    with Ledger(2, tmp_path / "x") as numbers:
        assert list(numbers) == [0.5, 0]


def test_without_a_file_nothing_is_shared() -> None:
    with Ledger(1) as numbers:
        numbers[0] = 1.0
    with Ledger(1) as numbers:
        assert numbers[0] == 0


def test_limits_are_those_of_all(tmp_path: Path) -> None:
    now = 1000.0
    tenants = Tenants(
        [Tenant("a", (b"a",), requests_per_minute=3), Tenant("b", (b"b",), tokens_per_minute=10)]
    )
    one, two = (Quotas(tenants, lambda: now, tmp_path / "x") for _ in range(2))
    a, b = tenants.all
    one.admit(a)
    two.admit(a)
    one.admit(a)
    with pytest.raises(ApiError, match="3 requests per minute is reached; try again in 20 s"):
        two.admit(a)
    one.admit(b)
    two.charge(b, 15)
    with pytest.raises(ApiError, match="10 tokens per minute is reached; try again in 30 s"):
        one.admit(b)
    now += 30
    one.admit(b)
    two.admit(a)
