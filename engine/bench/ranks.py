"""Measures ranks on a CPU: their sums beside gloo's, a step on its way to them, and whole steps.

python -m engine.bench.ranks
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from engine.bench.checkpoint import write_checkpoint
from engine.bench.kernels.shapes import SHAPES, TINY
from engine.bench.steps import Steps
from engine.bench.tables import markdown
from engine.core.ragged import ragged
from engine.core.schedule import BlockWrites, SchedulerOutput
from engine.core.schedule_builder import NO_NEW_REQUESTS
from engine.ranks.shared_memory import SharedMemoryGroup, allocate_shared_memory
from engine.ranks.wire import Step, decode_step, encode_step

_Times = list[float]
_SIZES = ((1, 4096), (16, 4096), (64, 4096), (512, 4096))
_PATIENCE_S = 60.0
_WIRE_ROWS = 256


def _microseconds(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Return the tenth percentile and the median of the times of `count` calls."""
    for _ in range(max(1, count // 10)):
        call()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    deciles = statistics.quantiles(times, n=10)
    return deciles[0], statistics.median(times)


def _time_sums(rank: int, memory: int, store: str, results: Connection) -> None:
    """Time the same sums by shared memory and by gloo; send the rows of rank 0."""
    torch.set_num_threads(1)
    group = SharedMemoryGroup(memory, rank, 2, patience_s=_PATIENCE_S)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = []
    for shape in _SIZES:
        x, count = torch.randn(shape), 1000 if shape[0] < 64 else 100
        ours = _microseconds(partial(group.sum, x), count)
        gloo = _microseconds(partial(dist.all_reduce, x), count)
        rows.append((shape, ours, gloo))
    dist.destroy_process_group()
    if rank == 0:
        results.send(rows)


def sums() -> str:
    """Return the table of sums of two ranks."""
    memory = allocate_shared_memory(2)
    context = multiprocessing.get_context("fork")  # the memory has no name to open it by
    mine, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_time_sums, args=(rank, memory, store, theirs))
            for rank in range(2)
        ]
        for each in ranks:
            each.start()
        found = mine.recv()
        for each in ranks:
            each.join()
    os.close(memory)
    rows = []
    for (height, width), ours, gloo in found:
        cells = (f"{value:,.0f}" for value in (*ours, *gloo))
        rows.append((f"{height} x {width}", *cells, f"{gloo[0] / ours[0]:.0f}"))
    head = ("float32, us", "ours, p10", "median", "gloo, p10", "median", "gloo / ours")
    return markdown(head, rows)


def wire() -> str:
    """Return what a decode step costs on its way to another rank."""
    rows = np.arange(_WIRE_ROWS, dtype=np.int32)
    some = rows[:: _WIRE_ROWS // 16]
    no_blocks = np.zeros((0, 2), dtype=np.int32)
    step = SchedulerOutput(
        rows,
        np.ones_like(rows),
        np.ones(len(rows), dtype=np.bool_),
        rows,
        len(rows),
        NO_NEW_REQUESTS,
        BlockWrites(some, 0 * some, some, ragged([[block] for block in some.tolist()])),
        no_blocks,
        no_blocks,
        no_blocks,
    )
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Step)
    content = encoder.encode(encode_step(step))
    encode = _microseconds(lambda: encoder.encode(encode_step(step)), 3000)
    decode = _microseconds(lambda: decode_step(decoder.decode(content)), 3000)
    values = (len(content), *(f"{value:.1f}" for value in (*encode, *decode)))
    head = ("rows", "bytes", "encode, us, p10", "median", "decode, p10", "median")
    return markdown(head, [(str(len(rows)), *map(str, values))])


def steps(label: str, batches: Sequence[int], prompt: int, rounds: int) -> str:
    """Return the table of steps of one process and of two ranks, measured in turn."""
    shapes = {shape.label: shape for shape in (*SHAPES, TINY)}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shapes[label], Path(folder))
        settings = {
            "model": folder,
            "load_format": "dummy",
            "device": "cpu",
            "dtype": "bfloat16",
            "max_model_len": prompt + 512,
            "max_num_batched_tokens": prompt,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 2**29,
        }
        engines = [Steps({**settings, "tensor_parallel_size": size}) for size in (1, 2)]
        table: list[tuple[str, ...]] = []
        for batch in batches:
            ratios, times = _Times(), (_Times(), _Times())
            for engine in engines:
                engine.fill(batch, 32)
            for _ in range(rounds):
                for i, engine in enumerate(engines):
                    begin = time.perf_counter()
                    engine.run(10, batch)
                    times[i].append(100 * (time.perf_counter() - begin))
                ratios.append(times[0][-1] / times[1][-1])
            for engine in engines:
                engine.clear()
            table.append(_row(f"decode, {batch} rows", times, ratios))
        ratios, times = _Times(), (_Times(), _Times())
        for number in range(rounds):
            for i, engine in enumerate(engines):
                engine.add(engine.prompts([prompt], seed=number), max_tokens=1)
                begin = time.perf_counter()
                engine.core.step()
                times[i].append(1000 * (time.perf_counter() - begin))
                engine.clear()
            ratios.append(times[0][-1] / times[1][-1])
        table.append(_row(f"prompt of {prompt}", times, ratios))
    return markdown((f"{label}, ms per step", "one process", "two ranks", "ratio of speed"), table)


def _row(name: str, times: Sequence[_Times], ratios: _Times) -> tuple[str, ...]:
    medians = (f"{statistics.median(each):.1f}" for each in times)
    return (name, *medians, f"{statistics.median(ratios):.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.ranks", description=__doc__)
    parser.add_argument("--model", default="0.5b", help="label of a shape (default: 0.5b)")
    parser.add_argument("--rounds", type=int, default=9, help="of each measurement of steps")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens (default: 1024)")
    options = parser.parse_args(arguments)
    print(sums(), wire(), sep="\n\n")
    print()
    print(steps(options.model, (1, 16), options.prompt, options.rounds))


if __name__ == "__main__":
    main()
