"""The blocks of a fake device, in memory of Python."""

from collections import defaultdict
from collections.abc import Sequence


class BlockStore:
    """Device and host blocks; copies as `kernels.block_copy.BlockCopier` does."""

    def __init__(self, block_size: int) -> None:
        self.device: dict[int, list[bytes]] = defaultdict(lambda: [b""] * block_size)
        self.host: dict[int, list[bytes]] = {}
        self.num_swapped_in = 0

    def swap_out(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        _copy(self.device, self.host, sources, destinations)

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        _copy(self.device, self.device, sources, destinations)

    def swap_in(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        _copy(self.host, self.device, sources, destinations)
        self.num_swapped_in += len(sources)


def _copy(
    read: dict[int, list[bytes]],
    written: dict[int, list[bytes]],
    sources: Sequence[int],
    destinations: Sequence[int],
) -> None:
    assert len(set(destinations)) == len(sources) == len(destinations)
    contents = [list(read[block]) for block in sources]
    written.update(zip(destinations, contents, strict=True))
