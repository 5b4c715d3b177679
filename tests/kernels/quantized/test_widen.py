"""The assembly of `kernels.quantized.widen`, which the interpreter does not run, read step by step.

Only what it has of PTX is understood: https://docs.nvidia.com/cuda/parallel-thread-execution.
"""

import random

import torch
from torch import Tensor

from kernels.quantized import widen
from kernels.quantized.codes import E2M1

_TYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run(assembly: str, *inputs: int) -> tuple[int, int]:
    """Return the two words that it writes."""
    registers = {f"${i}": word for i, word in enumerate(inputs, 2)}
    for statement in assembly.strip(" \n{}").split(";"):
        name, _, rest = statement.strip().partition(" ")
        to, *names = (each.strip() for each in rest.split(","))
        if not name or name == ".reg":
            continue
        values = [registers[each] if each in registers else int(each, 0) for each in names]
        registers[to] = _result(name, *values)
    return registers["$0"], registers["$1"]


def _result(name: str, a: int, b: int = 0, c: int = 0) -> int:
    match name.split("."):
        case "mov", _:
            return a
        case "and", _:
            return a & b
        case "or", _:
            return a | b
        case "shr", _:
            return a >> b
        case "shl", _:
            return a << b & 0xFFFFFFFF
        case "prmt", _:
            both = (a | b << 32).to_bytes(8, "little")
            return int.from_bytes(bytes(both[c >> 4 * i & 7] for i in range(4)), "little")
        case "fma", "rn", kind:
            wide = [floats(word, kind).double() for word in (a, b, c)]
            return word_of((wide[0] * wide[1] + wide[2]).to(_TYPES[kind]))
    raise AssertionError(name)


def floats(word: int, kind: str) -> Tensor:
    return torch.tensor([word], dtype=torch.uint32).view(_TYPES[kind])


def word_of(pair: Tensor) -> int:
    return int(pair.view(torch.uint32))


def test_integers_of_4_bits() -> None:
    draw = random.Random(0)
    for kind, unit, halves in (
        ("bf16x2", 128, (widen._BF16_LOW, widen._BF16_HIGH)),
        ("f16x2", 1024, (widen._FP16_LOW, widen._FP16_HIGH)),
    ):
        for shift in (-64, -8, -7, 0, 1, 8, 63, 64):
            codes = draw.randbytes(4)
            less = word_of(torch.full((2,), shift - 8 - unit, dtype=_TYPES[kind]))
            for half, assembly in enumerate(halves):
                found = run(assembly.value, int.from_bytes(codes, "little"), less, less)
                values = torch.cat([floats(word, kind) for word in found]).tolist()
                assert values == [(code >> 4 * half & 15) - 8 + shift for code in codes]


def test_fp8() -> None:
    for kind, assembly in (("bf16x2", widen._BF16_BYTES), ("f16x2", widen._FP16_BYTES)):
        for first in range(0, 256, 4):
            codes = bytes(range(first, first + 4))
            found = run(assembly.value, int.from_bytes(codes, "little"))
            values = torch.cat([floats(word, kind) for word in found]).float()
            wanted = torch.tensor(list(codes), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            is_number = ~wanted.isnan()  # NaN is not stored in checkpoints
            assert torch.equal(values[is_number], wanted[is_number])


def test_floats_of_4_bits() -> None:
    for kind, halves in (
        ("bf16x2", (widen._BF16_E2M1_LOW, widen._BF16_E2M1_HIGH)),
        ("f16x2", (widen._FP16_E2M1_LOW, widen._FP16_E2M1_HIGH)),
    ):
        for first in range(0, 256, 4):
            codes = bytes(range(first, first + 4))
            for half, assembly in enumerate(halves):
                found = run(assembly.value, int.from_bytes(codes, "little"))
                values = torch.cat([floats(word, kind) for word in found]).tolist()
                assert values == [E2M1[code >> 4 * half & 15] for code in codes]
