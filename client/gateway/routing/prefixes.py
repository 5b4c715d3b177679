"""PrefixTree: the prompts that a server has probably cached, as a tree over block hashes.

It is the approximate tree of SGLang's router (`sgl-router`, cache_aware): it knows what was sent to
a server, not what the server has kept. A hash that is chained over all blocks before it names one
node of the tree, so a flat table of hashes holds the whole of it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from client.protocol import Message, Prompt

BLOCK_BYTES = 256  # about four blocks of the engine's KV cache in text, and 64 token ids
MAX_BLOCKS = 4096  # of one prompt; what follows after 1 MiB does not decide where it goes
_MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES


def prompt_bytes(
    prompt: Prompt | None,
    messages: Sequence[Message] | None,
    chat_parameters: Mapping[str, Any] | None,
) -> bytes:
    """Return bytes that two requests have in common as far as their prompts are the same.

    There are no more than `block_hashes` needs, but for the rest of a message. What cannot be sent
    has none.
    """
    if isinstance(prompt, str):
        return prompt[:_MAX_BYTES].encode(errors="replace")
    try:
        if prompt is not None:
            return array("i", prompt[: _MAX_BYTES // array("i").itemsize]).tobytes()
        # Tools come before the messages, as in chat templates.
        return b"".join(_up_to(_MAX_BYTES, chain([chat_parameters], messages or ())))
    except (TypeError, ValueError, OverflowError):
        return b""


def _up_to(size: int, values: Iterable[Any]) -> Iterator[bytes]:
    """Yield the JSON of values until that is long enough."""
    for value in values:
        made = msgspec.json.encode(value)
        yield made
        if (size := size - len(made)) <= 0:
            return


def block_hashes(prompt: bytes, salt: str = "") -> list[int]:
    """Return one hash for each full block of a prompt; each covers all bytes up to its end.

    Hashes mean something in this process only.

    Args:
        salt: prompts with different salts have no hash in common.
    """
    num_blocks = min(len(prompt) // BLOCK_BYTES, MAX_BLOCKS)
    parent, hashes = hash(salt), []
    for start in range(0, num_blocks * BLOCK_BYTES, BLOCK_BYTES):
        parent = hash((parent, prompt[start : start + BLOCK_BYTES]))
        hashes.append(parent)
    return hashes


class PrefixTree:
    """The prompts that went to one server, by block; the least recently used are forgotten.

    A block is forgotten before those that it follows, so what is left are prefixes.
    """

    def __init__(self, capacity: int) -> None:
        """Make an empty tree of at most `capacity` blocks."""
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[int]) -> int:
        """Return how many of a prompt's blocks, from its beginning, are known."""
        low, high = 0, len(hashes)
        while low < high:  # known blocks come before unknown ones
            middle = (low + high) // 2
            if hashes[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, hashes: Sequence[int]) -> None:
        """Remember a prompt."""
        for block in reversed(hashes[: self._capacity]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the server has lost its cache."""
        self._blocks.clear()
