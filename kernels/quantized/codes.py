"""Weights of codes of 4 or 8 bits in groups, in the one layout that their product reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import device

Kind = Literal["int4", "table4", "e2m1", "int8", "e4m3"]

# Inputs of a run: the depth of a matrix instruction, and bytes that are read together.
_FEWEST = 16
_MOST = 64
BITS: dict[Kind, int] = {"int4": 4, "table4": 4, "e2m1": 4, "int8": 8, "e4m3": 8}
_CENTRE = {"int4": 8, "int8": 128}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_MOST_WHOLE = 64  # of shifts as int8
# Of other shifts. Steps of a group with less scale beside its offset, or none, change its weights
# less than rounding to bfloat16.
_MOST_SHIFT = 2.0**14
_SCALE_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
_SCALES = (*_SCALE_KINDS, torch.float16, torch.bfloat16)


class Codes(NamedTuple):
    """A weight [N, K]: the values of the codes, plus `shift`, times `scale`, both of a group.

    The weights of several experts are [E, N, K], and so each tensor has a dimension more.

    Attributes:
        packed: uint8 [N, bytes]. Codes of 4 bits are in runs of as many inputs as a matrix product
            takes at once: a byte has one of a run in its low bits, and one of the next in its high
            bits, so that the halves are operands of products as they are.
        kind: the values of codes. `int4` and `int8`: integers from -8 and from -128 on; `table4`:
            those of `table`; `e2m1` and `e4m3`: floats of 4 bits and FP8.
        run: inputs of a run.
        depth: K.
        scale: [N / R, K / group], of R output channels; the smallest of FP8 (E4M3), powers of two
            (E8M0), float16, bfloat16 and float32 that has its values.
        shift: as `scale`, int8 if all are integers of at most 64, else float16; None for zeros.
        table: float32 [16], with `table4` alone; of all experts.
        factor: float32 [N], by which products are multiplied too, or None.
    """

    packed: Tensor
    kind: Kind
    run: int
    depth: int
    scale: Tensor
    shift: Tensor | None = None
    table: Tensor | None = None
    factor: Tensor | None = None

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.depth // self.scale.shape[-1]

    @property
    def num_columns(self) -> int:
        """N."""
        return self.packed.shape[-2]

    @property
    def is_whole(self) -> bool:
        """Whether its shifts, if it has some, are integers."""
        return self.shift is None or self.shift.dtype == torch.int8

    def constants(self, num_columns: int) -> dict[str, Any]:
        """Return what kernels are compiled for, of products with `num_columns` results."""
        return {
            "N": num_columns,
            "K": self.depth,
            "ROWS": self.num_columns // self.scale.shape[-2],
            "GROUP": self.group,
            "KIND": self.kind,
            "SCALES": _SCALE_KINDS.get(self.scale.dtype, "float"),
            "HALVES": 8 // BITS[self.kind],
            "RUN": self.run,
            "NATIVE": not device.INTERPRETED,
        }

    def pointers(self) -> dict[str, Tensor | None]:
        """Return the tensors as arguments of kernels, which read scales of 8 bits as bytes."""
        is_byte = self.scale.dtype in _SCALE_KINDS
        return {
            "packed_ptr": self.packed,
            "scale_ptr": self.scale.view(torch.uint8) if is_byte else self.scale,
            "shift_ptr": self.shift,
            "table_ptr": self.table,
            "factor_ptr": self.factor,
        }


def can_pack(group: int) -> bool:
    """Return whether `pack` takes groups of as many inputs."""
    return group % _FEWEST == 0


def pack(
    steps: Tensor,
    kind: Kind,
    scale: Tensor,
    offset: Tensor | None = None,
    table: Tensor | None = None,
    factor: Tensor | None = None,
) -> Codes:
    """Return the weight `steps` * `scale` + `offset`; or (`steps` - their middle) * `scale`.

    Args:
        steps: uint8 [N, K]: integers from 0 on, indices of `table`, or FP8.
        scale: float32 [N / R, groups], of groups that `can_pack`.
        offset: as `scale`, of integers alone, or None. Divided by the scale it is rounded to
            float16.
        table: float32 [16] of `table4`.
        factor: float32 [N], by which all is multiplied; of floats and tables alone.
    """
    depth = steps.shape[1]
    group = depth // scale.shape[1]
    assert group * scale.shape[1] == depth, "groups that do not fit"
    assert can_pack(group), "groups that are no multiple of a run"
    assert len(steps) % len(scale) == 0, "blocks of rows that do not fit"
    shift = None
    if offset is not None:
        least = offset.abs() / _MOST_SHIFT
        scale = torch.where(scale.abs() < least, least, scale)
        is_zero = (scale == 0) & (offset == 0)
        quotient = (offset / scale + _CENTRE[kind]).masked_fill(is_zero, 0.0)
        shift = _narrow_shift(quotient) if bool(quotient.any()) else None
    run = min(_MOST, group & -group)
    packed = steps
    if BITS[kind] == 4:
        padded = F.pad(steps, (0, -depth % (2 * run))).view(len(steps), -1, 2, run)
        packed = (padded[:, :, 0] | padded[:, :, 1] << 4).flatten(1)
    return Codes(packed.contiguous(), kind, run, depth, _narrow(scale), shift, table, factor)


def stack(experts: Sequence[Codes]) -> Codes:
    """Return the weights of several experts, of the same kind and shape, in one."""
    first = experts[0]
    shifts = [each.shift for each in experts if each.shift is not None]
    if shifts:
        shifts = [torch.zeros_like(shifts[0]) if e.shift is None else e.shift for e in experts]
        dtype = torch.int8 if all(s.dtype == torch.int8 for s in shifts) else torch.float16
        shifts = [shift.to(dtype) for shift in shifts]
    factors = [each.factor for each in experts if each.factor is not None]
    return first._replace(
        packed=torch.stack([each.packed for each in experts]),
        scale=_narrow(torch.stack([each.scale.float() for each in experts])),
        shift=torch.stack(shifts) if shifts else None,
        factor=torch.stack(factors) if factors else None,
    )


def expert(codes: Codes, i: int) -> Codes:
    """Return the weight of one of several experts."""
    return codes._replace(
        packed=codes.packed[i],
        scale=codes.scale[i],
        shift=None if codes.shift is None else codes.shift[i],
        factor=None if codes.factor is None else codes.factor[i],
    )


def unpack(codes: Codes) -> Tensor:
    """Return the weight [N, K] in float32."""
    packed, (num_rows, _) = codes.packed, codes.packed.shape
    if BITS[codes.kind] == 4:
        halves = packed.view(num_rows, -1, codes.run)
        packed = torch.stack((halves & 15, halves >> 4), 2).flatten(1)[:, : codes.depth]
    if codes.table is not None:
        values = codes.table[packed.int()]
    elif codes.kind == "e2m1":
        values = torch.tensor(E2M1, device=packed.device)[packed.int()]
    elif codes.kind == "e4m3":
        values = packed.view(torch.float8_e4m3fn).float()
    else:
        values = packed.float() - _CENTRE[codes.kind]
    if codes.shift is not None:
        values = values + _expand(codes.shift, codes)
    weight = values * _expand(codes.scale, codes)
    return weight if codes.factor is None else weight * codes.factor[:, None]


def _expand(each: Tensor, codes: Codes) -> Tensor:
    """Return a scale or shift of each weight, in float32."""
    rows = each.float().repeat_interleave(len(codes.packed) // len(each), 0)
    return rows.repeat_interleave(codes.group, 1)


def _narrow_shift(shift: Tensor) -> Tensor:
    whole = shift.round()
    # A zero times a scale, divided by it, is that zero to rounding.
    is_whole = (shift - whole).abs() <= 1e-5 * _MOST_WHOLE
    if bool((is_whole & (whole.abs() <= _MOST_WHOLE)).all()):
        return whole.to(torch.int8).contiguous()
    return shift.half().contiguous()


def _narrow(scale: Tensor) -> Tensor:
    """Return `scale` in the smallest type that has its values."""
    for dtype in _SCALES:
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype).contiguous()
    return scale.contiguous()
