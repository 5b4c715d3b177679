"""Parallel reading of weights: into place, through staging buffers, and when it goes wrong."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.tensor_files.elements import read_tensor
from engine.checkpoint.tensor_files.headers import SINGLE, read_headers
from engine.checkpoint.tensor_files.stored import StoredTensor
from engine.errors import CheckpointError
from engine.weights.loader import CudaCopier, Span, read_spans, split_into_spans
from engine.weights.matching import Piece

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CASTS = [
    pytest.param(torch.bfloat16, torch.bfloat16, id="as-stored"),
    pytest.param(torch.bfloat16, torch.float32, id="cast"),
]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before  # one of an earlier test may have ended


@dataclass(eq=False)
class LateTransfer:
    """Copies when somebody waits for it, and not before: the latest that a stream may."""

    source: Tensor
    destination: Tensor
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: bool = False

    def synchronize(self) -> None:
        with self.lock:
            if not self.done:
                self.destination.copy_(self.source)
                self.done = True


class LateCopier:
    """Stands for a GPU."""

    pinned = False

    def __init__(self) -> None:
        self.transfers: list[LateTransfer] = []

    def copy(self, source: Tensor, destination: Tensor) -> LateTransfer:
        self.transfers.append(LateTransfer(source, destination))
        return self.transfers[-1]

    def finish(self) -> None:
        for transfer in self.transfers:
            transfer.synchronize()

    @property
    def num_buffers(self) -> int:
        return len({transfer.source.untyped_storage().data_ptr() for transfer in self.transfers})


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def spans_of(
    tensors: dict[str, Tensor], folder: Path, wanted: torch.dtype, max_bytes: int
) -> tuple[list[Span], dict[str, Tensor]]:
    """Return spans that read `tensors` from a file in `folder`, and where they read them to."""
    save_file(tensors, folder / SINGLE)
    stored = read_headers(folder)
    destinations = {
        name: torch.full(tensor.shape, 7.0, dtype=wanted) for name, tensor in tensors.items()
    }
    placed = [Piece.whole(stored[name], place) for name, place in destinations.items()]
    return list(split_into_spans(placed, max_bytes)), destinations


@pytest.fixture
def large(tmp_path: Path) -> dict[str, Tensor]:
    return {f"weight.{i}": randn(300, 41 + i, dtype=torch.bfloat16) + i for i in range(6)}


@settings(max_examples=40)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(FLOATS), st.lists(st.integers(0, 9), max_size=3)), max_size=8
    ),
    wanted=st.sampled_from(FLOATS),
    max_bytes=st.integers(8, 200),
    num_threads=st.integers(1, 4),
    staged=st.booleans(),
)
def test_every_element_arrives_once(
    kinds: list[tuple[torch.dtype, list[int]]],
    wanted: torch.dtype,
    max_bytes: int,
    num_threads: int,
    staged: bool,
) -> None:
    tensors = {f"w{i}": randn(*shape, dtype=dtype) for i, (dtype, shape) in enumerate(kinds)}
    copier = LateCopier() if staged else None
    sizes: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        spans, destinations = spans_of(tensors, Path(folder), wanted, max_bytes)
        read_spans(spans, copier, num_threads=num_threads, on_read=sizes.append)
    for name, tensor in tensors.items():
        assert torch.equal(destinations[name], tensor.to(wanted)), name
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(sizes, default=0) <= max_bytes
    assert copier is None or copier.num_buffers <= 2 * num_threads


def test_spans_follow_the_file(large: dict[str, Tensor], tmp_path: Path) -> None:
    backwards = dict(reversed(large.items()))
    spans, _ = spans_of(backwards, tmp_path, torch.bfloat16, 1000)
    offsets = [span.tensor.offset + 2 * span.start for span in spans]
    assert offsets == sorted(set(offsets))


@pytest.mark.parametrize(("stored", "wanted"), CASTS)
def test_large_pieces_are_cast_whole(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    tensors = {"w": randn(1023, 1025, dtype=stored)}  # more than is read, or cast, at once
    spans, destinations = spans_of(tensors, tmp_path, wanted, 2**24)
    read_spans(spans, None, num_threads=2)
    assert len(spans) == 1
    assert torch.equal(destinations["w"], tensors["w"].to(wanted))


def test_short_reads_are_continued(large: dict[str, Tensor], tmp_path: Path) -> None:
    spans, destinations = spans_of(large, tmp_path, torch.bfloat16, 10_000)
    preadv = os.preadv

    def short(file: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(file, [buffers[0][:333]], offset)

    with patch("engine.checkpoint.tensor_files.elements.os.preadv", short):
        read_spans(spans, None, num_threads=3)
    assert all(torch.equal(destinations[name], tensor) for name, tensor in large.items())


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("stored", "wanted"), CASTS)
def test_a_file_that_becomes_shorter_is_an_error(
    staged: bool, stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    tensors = {f"w{i}": randn(100, 100, dtype=stored) for i in range(5)}
    spans, _ = spans_of(tensors, tmp_path, wanted, 4000)
    os.truncate(tmp_path / SINGLE, spans[-1].tensor.offset + 50)
    with pytest.raises(CheckpointError, match=r"w4: cannot be read .* is shorter now"):
        read_spans(spans, LateCopier() if staged else None, num_threads=2)


def test_an_error_of_the_disk_ends_all_threads_soon(
    large: dict[str, Tensor], tmp_path: Path
) -> None:
    spans, _ = spans_of(large, tmp_path, torch.bfloat16, 1000)
    preadv, reads = os.preadv, []

    def broken(file: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        if len(reads) > 5:
            raise OSError(5, "Input/output error")
        return preadv(file, buffers, offset)

    with (
        patch("engine.checkpoint.tensor_files.elements.os.preadv", broken),
        pytest.raises(CheckpointError, match=r"^weight\.0: cannot be read .* Input/output error"),
    ):
        read_spans(spans, None, num_threads=2)
    assert len(reads) < len(spans) / 4


def test_a_file_that_vanishes_is_an_error(large: dict[str, Tensor], tmp_path: Path) -> None:
    spans, _ = spans_of(large, tmp_path, torch.bfloat16, 1000)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=f"{SINGLE}: cannot be opened: No such file"):
        read_spans(spans, None, num_threads=2)
    with pytest.raises(CheckpointError, match=f"{SINGLE}: cannot be opened: No such file"):
        read_tensor(spans[0].tensor)


def test_reports_come_in_the_calling_thread_and_may_end_it(
    large: dict[str, Tensor], tmp_path: Path
) -> None:
    spans, _ = spans_of(large, tmp_path, torch.bfloat16, 1000)
    threads: list[int] = []

    def report(num_bytes: int) -> None:
        threads.append(threading.get_ident())
        if len(threads) == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        read_spans(spans, None, num_threads=2, on_read=report)
    assert threads == [threading.get_ident()] * 3


@pytest.mark.parametrize("staged", [False, True])
def test_control_c_while_waiting_for_the_disk(
    staged: bool, large: dict[str, Tensor], tmp_path: Path
) -> None:
    spans, _ = spans_of(large, tmp_path, torch.bfloat16, 1000)
    preadv, reads = os.preadv, []

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        if len(reads) == 4:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.02)
        return preadv(file, buffers, offset)

    with (
        patch("engine.checkpoint.tensor_files.elements.os.preadv", slow),
        pytest.raises(KeyboardInterrupt),
    ):
        read_spans(spans, LateCopier() if staged else None, num_threads=2)
    assert len(reads) < len(spans) / 4


def test_a_tensor_by_itself(large: dict[str, Tensor], tmp_path: Path) -> None:
    spans_of(large, tmp_path, torch.bfloat16, 1000)
    stored: StoredTensor = read_headers(tmp_path)["weight.3"]
    assert torch.equal(read_tensor(stored), large["weight.3"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("stored", "wanted"), CASTS)
def test_weights_arrive_on_a_gpu(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    device = torch.device("cuda")
    tensors = {f"w{i}": randn(1000, 500 + i, dtype=stored) + i for i in range(8)}
    _, destinations = spans_of(tensors, tmp_path, wanted, 2**18)
    headers = read_headers(tmp_path)
    on_gpu = {name: place.to(device) for name, place in destinations.items()}
    pairs = [(headers[name], place) for name, place in on_gpu.items()]
    spans = list(split_into_spans(starmap(Piece.whole, pairs), 2**18))
    read_spans(spans, CudaCopier(device), num_threads=4)
    for name, tensor in tensors.items():
        assert torch.equal(on_gpu[name].cpu(), tensor.to(wanted)), name
