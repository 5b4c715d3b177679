"""Cases, figures and outcomes for tests of the benchmark, without measuring anything."""

from functools import partial
from typing import Any

import torch

from kernels.bench.case import Aim, Case, Work
from kernels.bench.testing import Outcome

MACHINE: dict[str, str | None] = {"gpu": "none", "driver": None}
CEILINGS: dict[str, float | None] = {"copy_gb_s": 4000.0, "bf16_tflop_s": 800.0}
GREEN = Outcome(passed=3, skipped=1, seconds=2.0)
RED = Outcome(passed=2, failed=1, failures=[("test_x", "assert 1 == 2")])


def fake_case(name: str, aim: Aim | None = None, operation: str = "rms_norm") -> Case:
    return Case(operation, name, _work, {"size": 4}, {}, aim)


def _work(size: int, device: torch.device) -> Work:
    x = torch.ones(size, device=device)
    return Work(
        ours=partial(torch.neg, x),
        peers={"same": partial(torch.neg, x), "other": partial(torch.neg, x * 2)},
        compiled={"compiled": partial(torch.neg, x)},
        bytes=4 * size,
    )


def figures_of(micros: float, **others: Any) -> dict[str, Any]:
    return {
        "status": "measured",
        "micros": micros,
        "bytes": 0,
        "flops": 0,
        "peers": {},
        "kernels": [],
        **others,
    }
