"""What takes the place of measuring: no torch, so that processes begin at once."""

import os
import time
from typing import Any


def ceilings(device: object) -> dict[str, float]:
    return {"read": 1e10, "bf16": 1e12}


def measure(name: str, tiny: bool, key: str, limits: dict[str, float]) -> dict[str, Any]:
    if "B = 8" in key:
        time.sleep(60)
    if "1 x 64" in key:
        os.abort()
    if "8 x 8" in key:
        raise RuntimeError("no such luck")
    return {"seconds": 1.0, "floor": 0.5}
