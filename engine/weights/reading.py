"""Parallel reading of tensors from files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.tensor_files.elements import open_file, read_elements, read_into
from engine.checkpoint.tensor_files.stored import StoredTensor
from engine.weights.staging import Buffer, Copier, Staging

# A piece that is cast on the host stays in the CPU cache between reading and casting.
_CAST_ELEMENTS = 2**19
# Up to this size PyTorch casts in the calling thread. Larger casts go to its own thread pool, whose
# threads wait for each other while our readers occupy the cores.
_SERIAL_ELEMENTS = 2**15


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive elements of a stored tensor, and their destination."""

    tensor: StoredTensor
    start: int  # first element
    destination: Tensor  # of any shape and strides

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the file."""
        return self.tensor.bytes_of(self.destination.numel())

    @property
    def num_staged_bytes(self) -> int:
        """Number of bytes of its elements on the host, before they are cast."""
        return self.destination.numel() * self.tensor.dtype.itemsize


def split_into_spans(
    placed: Iterable[tuple[StoredTensor, Tensor]], max_bytes: int
) -> Iterator[Span]:
    """Cut tensors into spans of at most `max_bytes`, in file order.

    Args:
        placed: tensors, each with a destination. A strided one is cut into whole rows.
    """
    for tensor, place in sorted(placed, key=lambda pair: (pair[0].file, pair[0].offset)):
        start = 0
        num_elements = max_bytes // tensor.dtype.itemsize
        if place.is_contiguous():
            parts = torch.split(place.view(-1), num_elements)
        else:
            parts = torch.split(place, max(1, num_elements * len(place) // place.numel()))
        for part in parts:
            yield Span(tensor, start, part)
            start += part.numel()


def read_spans(
    spans: Sequence[Span],
    copier: Copier | None,
    *,
    num_threads: int,
    on_read: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Fill the destinations of `spans`, using `num_threads` threads.

    At most two spans per thread are in flight, which bounds the memory. `on_read` is called in the
    calling thread with the bytes of each span that has been read. On return, also after an error,
    all threads have ended and no copy is in flight.

    Args:
        copier: copies data to its destination; None if that is on the host.

    Raises:
        CheckpointError: a file cannot be opened or read, or is too short.
    """
    waiting = iter(spans)
    under_way: dict[Future[None], tuple[Span, Buffer | None]] = {}
    with ExitStack() as stack:
        files: dict[Path, io.FileIO] = {}
        for span in spans:
            if span.tensor.file not in files:
                files[span.tensor.file] = stack.enter_context(open_file(span.tensor.file))
        staging = None
        if copier is not None:
            staging = Staging(copier, max((span.num_staged_bytes for span in spans), default=0))
            stack.callback(staging.finish)
        pool = stack.enter_context(ThreadPoolExecutor(num_threads, thread_name_prefix="weights"))
        # Leaving the block, for whatever reason, waits for the few spans in flight.
        while True:
            for span in islice(waiting, 2 * num_threads - len(under_way)):
                buffer = None if staging is None else staging.lend()
                future = pool.submit(_read_span, files[span.tensor.file], span, buffer)
                under_way[future] = span, buffer
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                span, buffer = under_way.pop(future)
                future.result()
                if staging is not None and buffer is not None:
                    staging.send(buffer, span.tensor.dtype, span.destination)
                on_read(span.num_bytes)


def _read_span(file: io.FileIO, span: Span, buffer: Buffer | None) -> None:
    """Read a span into `buffer` unchanged or, without a buffer, into its destination."""
    if buffer is not None:
        if buffer.pending is not None:
            buffer.pending.synchronize()
        memory = buffer.memory[: span.num_staged_bytes]
        if span.tensor.is_in_blocks:
            elements = read_elements(file, span.tensor, span.start, span.destination.numel())
            memory.copy_(elements.view(torch.uint8))
        else:
            read_into(memory, file, span.tensor, span.start)
    elif not span.destination.is_contiguous():
        elements = read_elements(file, span.tensor, span.start, span.destination.numel())
        span.destination.copy_(elements.view(span.destination.shape))
    elif span.destination.dtype == span.tensor.dtype and not span.tensor.is_in_blocks:
        read_into(span.destination.view(torch.uint8), file, span.tensor, span.start)
    else:
        start = span.start
        for part in torch.split(span.destination, _CAST_ELEMENTS):
            elements = read_elements(file, span.tensor, start, part.numel())
            start += part.numel()
            for to, source in zip(
                torch.split(part, _SERIAL_ELEMENTS),
                torch.split(elements, _SERIAL_ELEMENTS),
                strict=True,
            ):
                to.copy_(source)
