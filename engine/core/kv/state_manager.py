"""StateManager: the blocks of the layers that keep a state of a sequence, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from engine.core.kv.block_pool import NULL_BLOCK, BlockPool
from engine.core.kv.state_saves import is_trailing, positions_to_save
from engine.core.request import Request

# Blocks that checkpoints leave free, for a sequence that begins or that shares its state.
_LEFT_FREE = 2


class StatePool(BlockPool):
    """Blocks of one state each; the null block is all zeros, the state before the first token.

    A checkpoint is a block that is found by the tokens that its state has consumed, and that no
    step writes any more. All take the same memory, but differ in the tokens that must be computed
    again without them. So they are evicted by GreedyDual (Young, 1994): the one goes first whose
    tokens, counted from the clock of its last use, are least, and the clock advances to it.
    """

    def __init__(self, num_blocks: int) -> None:
        """Create a pool of `num_blocks`, including the null block."""
        super().__init__(num_blocks)
        self._num_tokens = [0] * num_blocks  # saved by each checkpoint
        self._worth = [0] * num_blocks  # of each, by its last use
        self._clock = 0
        self._least: list[tuple[int, int]] = []  # heap of worths and blocks, of which some are old

    def add_checkpoint(self, block_id: int, content_hash: bytes, num_tokens: int) -> None:
        """Let the state in a block be found by its content, and give up its only reference.

        Args:
            num_tokens: that must be computed again without it.
        """
        self.commit(block_id, content_hash)
        self._num_tokens[block_id] = num_tokens
        self.release([block_id])

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block."""
        block_ids = list(block_ids)
        super().release(block_ids)
        for block_id in block_ids:
            if block_id in self._free_cached:
                self._worth[block_id] = self._clock + self._num_tokens[block_id]
                heappush(self._least, (self._worth[block_id], block_id))
        if len(self._least) > 2 * self.num_blocks:
            self._least = [(self._worth[block_id], block_id) for block_id in self._free_cached]
            heapify(self._least)

    def _take_cached(self) -> int:
        while True:
            worth, block_id = heappop(self._least)
            if block_id in self._free_cached and self._worth[block_id] == worth:
                self._clock = worth
                del self._free_cached[block_id]
                return block_id


class StateManager:
    """Gives each sequence a block for its state, and keeps states as checkpoints by content.

    A row of a step reads one block and writes one, which are the same unless another sequence, or
    the prefix cache, has the one that it reads. So no state is ever copied. A checkpoint is written
    by the step that passes its position, and is named when that step has been read: then it is
    known to have run.

    Attributes:
        pool: the blocks.
        interval: checkpoints are after multiples of so many tokens.
    """

    def __init__(self, num_blocks: int, *, interval: int, every: int) -> None:
        """Manage `num_blocks` states, the null block included.

        Args:
            interval: a multiple of the tokens of a KV block.
            every: tokens after which a checkpoint within a prompt pays for its memory; a multiple
                of `interval`.
        """
        assert every % interval == 0
        self.pool = StatePool(num_blocks)
        self.interval = interval
        self._every = every
        self._replaced: list[int] = []  # that the step which is being scheduled reads

    def begin(self, request: Request, block_id: int, position: int) -> None:
        """Let a request start after `position` tokens with the state in a block, a checkpoint."""
        if block_id != NULL_BLOCK:
            self.pool.share([block_id])
        request.kv.state = block_id
        request.kv.checkpoint = position
        request.num_state_tokens = position

    def has_room(self, request: Request, block_id: int) -> bool:
        """Whether there is a block for a waiting request, which begins with the state in another.

        A request with blocks of its own has that already.
        """
        is_taken = request.kv.state == NULL_BLOCK and block_id != NULL_BLOCK
        return self.pool.num_free >= 1 + (is_taken and self.pool.ref_count(block_id) == 0)

    def needs_block(self, request: Request) -> bool:
        """Whether the next step of a request must write another block than it reads."""
        block_id = request.kv.state
        return (
            block_id == NULL_BLOCK
            or self.pool.ref_count(block_id) > 1
            or self.pool.is_cached(block_id)
        )

    def allocate(self, request: Request) -> None:
        """Choose the blocks that the next step of `request` reads and writes.

        There must be a free one if it needs one.
        """
        kv = request.kv
        kv.state_read = kv.state
        if self.needs_block(request):
            taken = self.pool.allocate(1)
            assert taken is not None
            if kv.state != NULL_BLOCK:
                self._replaced.append(kv.state)
            kv.state = taken[0]

    def release_replaced(self) -> None:
        """Give up the blocks that the step just scheduled reads for the last time.

        Whoever gets them writes them in a later step.
        """
        self.pool.release(self._replaced)
        self._replaced.clear()

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` start with the state of `parent`, which has consumed as many tokens."""
        self.begin(child, parent.kv.state, parent.num_state_tokens)
        child.kv.checkpoint = parent.kv.checkpoint

    def free(self, request: Request) -> None:
        """Give up the blocks of a request; checkpoints stay until they are evicted."""
        kv = request.kv
        if kv.state != NULL_BLOCK:
            self.pool.release([kv.state])
        self.pool.release(kv.saves.values())
        kv.state = kv.state_read = NULL_BLOCK
        kv.saves = {}
        kv.trailing = kv.checkpoint = request.num_state_tokens = 0

    def save(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """Return the checkpoints that a step writes which takes the state from `start` to `end`.

        Each is a position and the block that gets the state after so many tokens. There are fewer
        where no block is free.
        """
        positions = positions_to_save(
            start,
            end,
            interval=self.interval,
            num_prompt_tokens=request.num_prompt_tokens,
            wanted=request.kv.wanted,
            every=self._every,
        )
        return self.save_at(request, positions)

    def save_at(self, request: Request, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Return the same for these positions."""
        found: list[tuple[int, int]] = []
        for position in positions:
            if self.pool.num_free <= _LEFT_FREE:
                break
            taken = self.pool.allocate(1)
            assert taken is not None
            found.append((position, taken[0]))
        request.kv.saves |= dict(found)
        return found

    def name(self, request: Request, position: int, content_hash: bytes) -> int:
        """Let a checkpoint be found that a step has written; return the one that it replaces.

        That is the position of the last one of its output, or 0. It replaces none that another
        request has written.
        """
        kv = request.kv
        is_own = self.pool.find(content_hash) is None
        self.pool.add_checkpoint(kv.saves.pop(position), content_hash, position - kv.checkpoint)
        replaced = 0
        if is_trailing(position, request.num_prompt_tokens, kv.wanted, self._every):
            replaced, kv.trailing = kv.trailing, position if is_own else 0
        else:
            kv.checkpoint = position
        return replaced

    def drop(self, content_hash: bytes) -> None:
        """Forget a checkpoint, if there is one with this content and nothing refers to it."""
        block_id = self.pool.find(content_hash)
        if block_id is not None and self.pool.ref_count(block_id) == 0:
            self.pool.share([block_id])
            self.pool.forget([block_id])
            self.pool.release([block_id])

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that the blocks of `requests` account for every reference."""
        self.pool.check_integrity()
        assert not self._replaced
        counts = [0] * self.pool.num_blocks
        for request in requests:
            for block_id in (request.kv.state, *request.kv.saves.values()):
                counts[block_id] += 1
        for block_id in range(1, self.pool.num_blocks):
            assert self.pool.ref_count(block_id) == counts[block_id], f"state {block_id}"
