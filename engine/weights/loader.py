"""Entry points: initialise a model's weights from a checkpoint, read in parallel, or at random."""

from __future__ import annotations

import io
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.checkpoint.lora.tensors import LowRank, read_adapter
from engine.checkpoint.tensor_files.elements import open_file, read_elements, read_into, read_tensor
from engine.checkpoint.tensor_files.headers import read_headers
from engine.checkpoint.tensor_files.stored import FLOATS, StoredTensor
from engine.config.setting_types import LoadFormat
from engine.errors import CheckpointError
from engine.layers.attention import Attention
from engine.models.causal_lm import CausalLM
from engine.models.tensor_names import HEAD, TensorNames
from engine.weights.dummy import fill_with_random_weights
from engine.weights.matching import (
    Destination,
    Piece,
    adds_to_sum,
    destinations,
    match_tensors,
    rank_destinations,
    require_float,
)

log = logging.getLogger("trident.engine")

_SPAN_BYTES = 2**24

# A piece that is cast on the host stays in the CPU cache between reading and casting.
_CAST_ELEMENTS = 2**19
# Up to this size PyTorch casts in the calling thread. Larger casts go to its own thread pool, whose
# threads wait for each other while our readers occupy the cores.
_SERIAL_ELEMENTS = 2**15

# Tensor name relative to a layer's attention -> the `Attention` buffers that it fills.
_KV_SCALE_TARGETS: dict[str, tuple[str, ...]] = {
    **{
        name.format(x=x): (f"{x}_scale",)
        for x in "kv"
        for name in (
            "{x}_scale",  # llm-compressor
            "attn.{x}_scale",  # vLLM
            "{x}_proj.{x}_scale",  # ModelOpt
            "{x}_proj.output_scale",  # AutoFP8, Quark
        )
    },
    "kv_scale": ("k_scale", "v_scale"),  # early AutoFP8
    # Scales of queries and probabilities, which are not quantised here.
    **dict.fromkeys(
        (
            *("q_scale", "attn.q_scale", "q_proj.q_scale", "q_proj.output_scale"),
            *("prob_scale", "attn.prob_scale", "prob_output_scale"),
        ),
        (),
    ),
}
_ATTENTION_PREFIX = ".self_attn."


class Transfer(Protocol):
    """A copy in progress."""

    def synchronize(self) -> None:
        """Wait until the source may be overwritten."""


class Copier(Protocol):
    """Copies weights from a host buffer to their destination, casting them to its dtype."""

    pinned: bool  # whether the buffers must be page-locked

    def copy(self, source: Tensor, destination: Tensor) -> Transfer:
        """Start to copy `source` on the host to `destination`, of the same shape."""

    def finish(self) -> None:
        """Wait until all copies are done."""


class CudaCopier:
    """Copies to a GPU on a separate stream, so that no thread waits for PCIe; casts on the GPU."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The parameters' memory may still be in use by earlier work of the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, source: Tensor, destination: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            if source.dtype != destination.dtype:  # a copy that also casts would cast on the host
                source = source.to(self._device, non_blocking=True)
            destination.copy_(source, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return done

    def finish(self) -> None:
        self._stream.synchronize()


@dataclass(slots=True)
class Buffer:
    """Host memory, uint8 [n]; `pending` is the copy that may still be reading from it."""

    memory: Tensor
    pending: Transfer | None = None


class Staging:
    """A pool of host buffers of `num_bytes`. Not thread-safe.

    It has as many buffers as are lent at the same time, and lends the one sent longest ago, whose
    transfer is the most likely to be done.
    """

    def __init__(self, copier: Copier, num_bytes: int) -> None:
        self._copier = copier
        self._num_bytes = num_bytes
        self._free: deque[Buffer] = deque()

    def lend(self) -> Buffer:
        """Return a buffer; the caller must wait for `pending` before writing to it."""
        if self._free:
            return self._free.popleft()
        pinned = self._copier.pinned
        return Buffer(torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=pinned))

    def send(self, buffer: Buffer, dtype: torch.dtype, destination: Tensor) -> None:
        """Start to copy a buffer's first elements, of type `dtype`, to `destination`; reuse it.

        The copy may continue after the return, until `finish`.
        """
        source = (
            buffer.memory[: destination.numel() * dtype.itemsize]
            .view(dtype)
            .view(destination.shape)
        )
        buffer.pending = self._copier.copy(source, destination)
        self._free.append(buffer)

    def finish(self) -> None:
        """Wait until all copies are done."""
        self._copier.finish()


def is_kv_scale(name: str) -> bool:
    """Return whether a checkpoint's tensor of that name is an fp8 scale of attention."""
    return _ATTENTION_PREFIX in name and name.partition(_ATTENTION_PREFIX)[2] in _KV_SCALE_TARGETS


def load_kv_scales(model: nn.Module, scales: Sequence[StoredTensor], names: TensorNames) -> None:
    """Set the KV scales of the attention layers of `model` from its checkpoint.

    Args:
        names: how the checkpoint names our modules.
        scales: each with one element, or with one per KV head of its layer.

    Raises:
        CheckpointError: a scale is not positive, has another size, belongs to no layer of the
            model, occurs twice or cannot be read; the model is then unchanged.
    """
    modules = {
        names.of(path, prefix): module
        for path, module in model.named_modules()
        for prefix in names.prefixes
    }
    values: dict[str, tuple[Tensor, Tensor]] = {}
    for stored in scales:
        prefix, _, suffix = stored.name.partition(_ATTENTION_PREFIX)
        path = prefix + _ATTENTION_PREFIX[:-1]
        attention = modules.get(path)
        if not isinstance(attention, Attention):
            raise CheckpointError(
                "belongs to a layer that config.json does not describe", param=stored.name
            )
        for target in _KV_SCALE_TARGETS[suffix]:
            if f"{path}.{target}" in values:
                raise CheckpointError(
                    f"sets {path}.{target}, which another tensor sets too", param=stored.name
                )
            buffer = attention.get_buffer(target)
            value = _read_kv_scale(stored, attention.all_heads[1])
            first = attention.first_kv_head
            values[f"{path}.{target}"] = buffer, value[first : first + len(buffer)]
    for buffer, value in values.values():
        buffer.copy_(value)


def _read_kv_scale(stored: StoredTensor, num_kv_heads: int) -> Tensor:
    """Return a scale as float32 [num_kv_heads]."""
    require_float(stored)
    if stored.num_elements not in (1, num_kv_heads):
        raise CheckpointError(
            f"must hold one scale, or one for each of {num_kv_heads} KV heads (got shape "
            f"{list(stored.shape)})",
            param=stored.name,
        )
    value = read_tensor(stored).flatten().float()
    if not bool((value.isfinite() & (value > 0)).all()):
        raise CheckpointError(f"must be positive (got {value.tolist()})", param=stored.name)
    return value.expand(num_kv_heads)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive elements of a stored tensor, and the destination of all or some of them.

    Attributes:
        start: the first element.
        destination: of any shape and strides.
        rows: shape of what is read, of which `destination` takes the `window`.
    """

    tensor: StoredTensor
    start: int
    destination: Tensor
    rows: tuple[int, ...]
    window: tuple[slice, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements that are read."""
        return math.prod(self.rows)

    @property
    def is_whole(self) -> bool:
        """Whether the destination takes all that is read."""
        return self.num_elements == self.destination.numel()

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the file."""
        return self.tensor.bytes_of(self.num_elements)

    @property
    def num_staged_bytes(self) -> int:
        """Number of bytes of its elements on the host, before they are cast."""
        return self.destination.numel() * self.tensor.dtype.itemsize


def split_into_spans(pieces: Iterable[Piece], max_bytes: int) -> Iterator[Span]:
    """Cut pieces of tensors into spans of at most `max_bytes`, in file order.

    One whose destination is strided, or has a part of each row, is cut into whole rows.
    """
    for stored, to, shape, start in sorted(pieces, key=_position):
        num_elements = max_bytes // stored.dtype.itemsize
        is_whole_rows = shape[1:] == to.shape[1:]
        row = math.prod(shape[1:])
        first = start[0] * row if start else 0
        if is_whole_rows and to.is_contiguous():
            for part in torch.split(to.view(-1), num_elements):
                yield Span(stored, first, part, tuple(part.shape), (slice(None),))
                first += part.numel()
            continue
        sizes = zip(start[1:], to.shape[1:], strict=True)
        inner = tuple(slice(at, at + size) for at, size in sizes)
        for part in torch.split(to, max(1, num_elements // row)):
            rows = (len(part), *shape[1:])
            yield Span(stored, first, part, rows, (slice(None), *inner))
            first += len(part) * row


def _position(piece: Piece) -> tuple[Path, int, tuple[int, ...]]:
    return piece.stored.file, piece.stored.offset, piece.start


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
        if span.tensor.is_in_blocks or not span.is_whole:
            memory.view(span.tensor.dtype).view(span.destination.shape).copy_(_elements(file, span))
        else:
            read_into(memory, file, span.tensor, span.start)
    elif not (span.is_whole and span.destination.is_contiguous()):
        span.destination.copy_(_elements(file, span))
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


def _elements(file: io.FileIO, span: Span) -> Tensor:
    """Return what the destination takes, in its shape."""
    elements = read_elements(file, span.tensor, span.start, span.num_elements)
    return elements.view(span.rows)[span.window].view(span.destination.shape)


def match_changes(
    changes: Mapping[str, LowRank],
    placed: Sequence[Piece],
    names: TensorNames,
    elsewhere: Collection[str] = (),
) -> dict[str, LowRank]:
    """Return an adapter's changes by the checkpoint's names of the tensors.

    Args:
        changes: by the names that the modules had in training.
        placed: what is to be loaded.
        names: how the checkpoint names our tensors.
        elsewhere: tensors that other ranks have, whose changes are left out.

    Raises:
        CheckpointError: the checkpoint has no such tensor of floats, or it has another shape.
    """
    floats = FLOATS.values()
    stored = {piece.stored.name: piece.stored for piece in placed if piece.tensor.dtype in floats}
    prefix = names.find_prefix(stored)
    found: dict[str, LowRank] = {}
    for trained, change in changes.items():
        # transformers names parts of models with a vision part otherwise than their files do.
        spellings = [
            prefix + trained.removeprefix(p) for p in names.prefixes if trained.startswith(p)
        ]
        name = next((each for each in (trained, *spellings) if each in stored), None)
        if name is None:
            if not {trained, *spellings}.isdisjoint(elsewhere):
                continue
            raise CheckpointError(
                f"the base has no {trained} of floats to merge it into; if the base is quantised, "
                "set base_model_name_or_path in adapter_config.json to one that is not",
                param=change.a.name,
            )
        is_head = name == names.of(HEAD, prefix)
        change = replace(change, transposed=names.transposed and not is_head)
        if (shape := stored[name].shape) != change.shape:
            raise CheckpointError(
                f"is for a weight of shape {list(change.shape)}, but the base's "
                f"{name} has {list(shape)}",
                param=change.a.name,
            )
        found[name] = change
    return found


def initialise_weights(
    model: CausalLM,
    checkpoint: Path,
    *,
    load_format: LoadFormat,
    seed: int,
    whole: CausalLM | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_layer: Callable[[nn.Module], None] | None = None,
) -> None:
    """Fill the parameters of `model` on their device.

    Args:
        checkpoint: folder of the weights; ignored for dummy weights.
        load_format: `auto`: `load_weights`; `dummy`: `fill_with_random_weights`.
        seed: of dummy weights.
        whole: of a rank, the model that it is a part of, which may have shapes alone.
        on_progress: called in this thread with (bytes done, total bytes), finally with both equal.
        on_layer: called in this thread with each decoder layer as soon as it is filled, before the
            next one is, and may replace what is in it. For a CPU, where what is not filled takes no
            memory yet.

    Raises:
        CheckpointError: as `load_weights`.
    """
    if load_format == "dummy":
        fill_with_random_weights(
            model, seed, whole=whole, on_progress=on_progress, on_layer=on_layer
        )
    else:
        load_weights(model, checkpoint, whole=whole, on_progress=on_progress, on_layer=on_layer)


def load_weights(
    model: CausalLM,
    path: Path,
    *,
    whole: CausalLM | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_layer: Callable[[nn.Module], None] | None = None,
) -> None:
    """Fill the parameters of `model` from the checkpoint folder `path`, cast to their dtype.

    Of a rank, `whole` is the model that it is a part of, which may have shapes alone.

    Scales of an fp8 KV cache, if the checkpoint has them, are stored in the attention layers. What
    an adapter changes is merged into the parameters, before anything is made of them.

    `on_progress` is called in this thread with (bytes read, total bytes), finally with both equal;
    `on_layer` is as in `initialise_weights`. All reader threads have ended on return, also after an
    error.

    Raises:
        CheckpointError: a file is missing or corrupt, or a tensor is missing, unknown or of a
            wrong shape; the model is then unchanged, unless a file breaks while it is read.
    """
    placed, kv_scales, changes = _match(model, path, whole)
    if changes:
        log.info("merging an adapter into %d weights", len(changes))
    load_kv_scales(model, kv_scales, model.spec.tensor_names)
    if model.spec.rank:
        for name, target in destinations(model, model.spec.tensor_names).items():
            if adds_to_sum(model.spec, name):  # once, by rank 0
                target.tensor.zero_()
    total = sum(span.num_bytes for span in split_into_spans(placed, _SPAN_BYTES))
    loaded = 0

    def advance(num_bytes: int) -> None:
        nonlocal loaded
        loaded += num_bytes
        if on_progress is not None:
            on_progress(loaded, total)

    device = model.model.embed_tokens.weight.device
    copier = CudaCopier(device) if device.type == "cuda" else None
    parts = _by_layer(model, placed) if on_layer is not None else [(None, placed)]
    del placed  # a part's destinations live no longer than it takes to fill them
    while parts:
        layer, part = parts.pop(0)
        files = sorted({piece.stored.file.name for piece in part})
        changed = [
            (changes[each.stored.name], each) for each in part if each.stored.name in changes
        ]
        # What is quantised on a GPU is read on the host.
        on_host = [piece for piece in part if piece.tensor.device.type == "cpu"]
        elsewhere = [piece for piece in part if piece.tensor.device.type != "cpu"]
        del part
        for batch, its_copier in ((on_host, None), (elsewhere, copier)):
            spans = list(split_into_spans(batch, _SPAN_BYTES))
            batch.clear()
            if spans:
                num_threads = _num_threads(device)
                read_spans(spans, its_copier, num_threads=num_threads, on_read=advance)
            del spans
        for change, piece in changed:
            change.merge_into(piece.tensor, piece.stored, piece.shape, piece.window)
        del changed
        if layer is not None and on_layer is not None:
            try:
                on_layer(layer)
            except CheckpointError as error:  # a value that only the conversion reads
                where = f"{error.message} (in {', '.join(files)})"
                raise error.reworded(where, param=error.params) from None


def _by_layer(model: CausalLM, placed: list[Piece]) -> list[tuple[nn.Module | None, list[Piece]]]:
    """Return the pieces of each decoder layer in turn, then all others.

    A destination is a part of a parameter: they have the same memory.
    """
    owners = {
        parameter.untyped_storage().data_ptr(): i
        for i, layer in enumerate(model.model.layers)
        for parameter in layer.parameters()
    }
    others = len(model.model.layers)
    parts: list[list[Piece]] = [[] for _ in range(others + 1)]
    for piece in placed:
        parts[owners.get(piece.tensor.untyped_storage().data_ptr(), others)].append(piece)
    return list(zip([*model.model.layers, None], parts, strict=True))


def check_weights(model: CausalLM, path: Path) -> None:
    """Raise `CheckpointError` if the headers of the checkpoint folder `path` do not fit `model`.

    Its parameters may be on the meta device.
    """
    _match(model, path)


def _match(
    model: CausalLM, path: Path, whole: CausalLM | None = None
) -> tuple[list[Piece], list[StoredTensor], dict[str, LowRank]]:
    """Return the tensors to load with their destinations, and the scales of a KV cache.

    And what an adapter changes of the tensors, by the name of each.
    """
    stored = read_headers(path)
    names = model.spec.tensor_names
    kv_scales = [
        stored.pop(name) for name in [*stored] if is_kv_scale(name) and not names.is_ignored(name)
    ]
    tied = model.lm_head is None
    targets: Mapping[str, Destination | None] = (
        destinations(model, names) if whole is None else rank_destinations(model, whole)
    )
    placed = match_tensors(stored, targets, names, tied=tied)
    adapter = read_adapter(path)
    changes: dict[str, LowRank] = {}
    if adapter is not None:
        prefix = names.find_prefix(stored)
        elsewhere = {names.of(name, prefix) for name, target in targets.items() if target is None}
        changes = match_changes(adapter.low_rank, placed, names, elsewhere)
    return placed, kv_scales, changes


def _num_threads(device: torch.device) -> int:
    """Return the number of reader threads, which mostly wait for the disk or copy page cache.

    A GPU can take more than one core copies; a few threads saturate host memory.
    """
    return min(2 * len(os.sched_getaffinity(0)), 8 if device.type == "cuda" else 4)
