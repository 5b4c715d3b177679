"""What sums over ranks must do on any device, seen from one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.collectives.peers import Peers
from kernels.collectives.rank_sum import rank_sum, rank_sum_norm, reference
from kernels.rms_norm import rms_norm_add

SHAPES = [(1, 1), (3, 70), (1, 4096), (37, 1000)]
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def different_bits(peers: Peers, dtypes: list[torch.dtype]) -> Iterator[str]:
    """Yield which sums and norms have other bits than they must have; all ranks call it."""
    for shape in SHAPES:
        for dtype in dtypes:
            *parts, residual = _parts(peers, shape, dtype, seed=0)
            x, weight = parts[peers.rank], residual[0].contiguous()
            total = reference(parts).to(dtype)
            expected = rms_norm_add(total, residual, weight, 1e-5)
            normed = rank_sum_norm(x, residual, weight, 1e-5, peers, unit_offset=False)
            found = {
                "one shot": torch.equal(rank_sum(x, peers), total),
                "two shots": torch.equal(rank_sum(x, peers, is_two_shot=True), total),
                "norm": torch.equal(normed[0], expected[0]),
                "norm's sum": torch.equal(normed[1], expected[1]),
            }
            yield from (f"{name} of {shape}, {dtype}" for name, equal in found.items() if not equal)


def different_replays(
    peers: Peers, dtype: torch.dtype, capture: Capture, num_replays: int
) -> Iterator[str]:
    """Yield which replays of a graph of sums and a norm give other bits; all ranks call it.

    It has an odd number of meetings: a graph must not depend on how many were before.

    Args:
        capture: returns what runs the work that it is given again, on the same tensors.
    """
    shape = (3, 896)
    *_, residual = first = _parts(peers, shape, dtype, seed=0)
    x, weight = first[peers.rank].clone(), residual[0].contiguous()
    results = [torch.empty_like(x) for _ in range(4)]

    def work() -> None:
        normed, total = rank_sum_norm(x, residual, weight, 1e-5, peers, unit_offset=False)
        sums = (rank_sum(x, peers, is_two_shot=is_two_shot) for is_two_shot in (False, True))
        for result, found in zip(results, (*sums, normed, total), strict=True):
            result.copy_(found)
        rank_sum(x, peers)

    replay = capture(work)
    for number in range(num_replays):
        *parts, _ = _parts(peers, shape, dtype, seed=1 + number)
        x.copy_(parts[peers.rank])
        replay()
        total = reference(parts).to(dtype)
        expected = (total, total, *rms_norm_add(total, residual, weight, 1e-5))
        if not all(torch.equal(*pair) for pair in zip(results, expected, strict=True)):
            yield f"replay {number}"


def _parts(peers: Peers, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return what each rank has to sum, as all of them know, and a residual."""
    generator = torch.Generator().manual_seed(seed)
    where = peers.counts.device
    return [torch.randn(shape, generator=generator).to(where, dtype) for _ in range(peers.size + 1)]
