"""Tests and measures ranks: their sums, a step on its way to them, their tokens and whole steps.

On two GPUs and more: which of them read each other's memory, sums by NCCL and by our kernels, and
steps beside those of one GPU. Elsewhere: sums in shared memory beside gloo's, and steps on the CPU.
The exit status is 1 if ranks give other sums or tokens than they must, or something fails.

python -m engine.bench.ranks
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.bench import ceilings, floors
from engine.bench.checkpoint import write_checkpoint
from engine.bench.kernels.shapes import SHAPES, TINY
from engine.bench.steps import Steps
from engine.bench.tables import markdown
from engine.core.ragged import ragged
from engine.core.schedule import BlockWrites, SchedulerOutput
from engine.core.schedule_builder import NO_NEW_REQUESTS
from engine.ranks.exchange import ONE_SHOT_BYTES, CollectiveGroup
from engine.ranks.shared_memory import SharedMemoryGroup, allocate_shared_memory
from engine.ranks.symmetric_memory import reaches
from engine.ranks.wire import Step, decode_step, encode_step
from kernels.collectives.rank_sum import MOST_BYTES, rank_sum, reference

T = TypeVar("T")

_Times = list[float]
_SIZES = ((1, 4096), (16, 4096), (64, 4096), (512, 4096))
_PATIENCE_S, _LIMIT_S = 60.0, 900.0  # of a rank for others; of a part
_WIRE_ROWS = 256
_WIDTH = 4096  # values of a row that GPUs sum, in bfloat16
_GPU_BYTES = tuple(2**power for power in range(13, 25))
_CALLS, _REPLAYS = 20, 20  # in a graph, and of it
_GPU_BATCHES = (1, 16, 256)
_CONTEXT = 512  # tokens of each sequence in a decode step
_SHAPES = {shape.label: shape for shape in (*SHAPES, TINY)}


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
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(_SHAPES[label], Path(folder))
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


class Sums(NamedTuple):
    """Sums of so many bytes at one rank: microseconds by who makes them, and who adds wrongly."""

    num_bytes: int
    times: dict[str, float]
    wrong: list[str]


def _processes(call: Callable[..., T], ranks: int, *arguments: Any) -> list[T]:
    """Return what `call` returns for each rank, in a fresh process, all at the same time.

    In one that had ranks before, a model would not get symmetric memory.
    """
    with multiprocessing.get_context("spawn").Pool(ranks) as pool:  # which it kills in the end
        calls = [(rank, *arguments) for rank in range(ranks)]
        return pool.starmap_async(call, calls, chunksize=1).get(_LIMIT_S)


def time_group(rank: int, size: int, store: str, kind: str, all_bytes: Sequence[int]) -> list[Sums]:
    """Be a rank with a GPU, or with a CPU and gloo; time sums, and compare them with others'.

    Args:
        store: a file, for which there is a folder.
    """
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    file = os.open(store, os.O_RDWR | os.O_CREAT)
    group = CollectiveGroup(file, rank, size, device=device, patience_s=_PATIENCE_S)
    peers = group.peers
    group.use_peers(None)
    found = []
    for num_bytes in all_bytes:
        shape = max(num_bytes // 2 // _WIDTH, 1), min(num_bytes // 2, _WIDTH)
        seeds = (torch.Generator().manual_seed(seed) for seed in range(size))
        parts = [torch.randn(shape, generator=seed).to(device, torch.bfloat16) for seed in seeds]
        ways: dict[str, Callable[[Tensor], Tensor]] = {_backend_name(kind): group.sum}
        if peers is not None and num_bytes <= MOST_BYTES:
            ways["one shot"] = partial(rank_sum, peers=peers)
            ways["two shots"] = partial(rank_sum, peers=peers, is_two_shot=True)
        times, wrong, total = {}, [], reference(parts)
        for name, call in ways.items():
            summed = call(parts[rank].clone())
            is_ours = call is not group.sum
            is_right = (
                torch.equal(summed, total.bfloat16()) if is_ours else _is_close(summed, total)
            )
            if not is_right:
                wrong.append(f"{size} ranks, {num_bytes} bytes, {name}")
            zeros = torch.zeros_like(summed)  # which may be overwritten by their sum
            times[name] = _sum_microseconds(partial(call, zeros), kind)
        found.append(Sums(num_bytes, times, wrong))
    return found


def _backend_name(kind: str) -> str:
    return "NCCL" if kind == "cuda" else "gloo"


def _is_close(found: Tensor, total: Tensor) -> bool:
    """Return whether a sum in bfloat16 is as good as rounding after each addition allows."""
    return bool(((found.float() - total).abs().amax() <= 2**-5 * total.abs().amax()).item())


def _sum_microseconds(call: Callable[[], object], kind: str) -> float:
    """Return the time of a sum; on GPUs in a graph of many, as in a step."""
    if kind != "cuda":
        return _microseconds(call, 10)[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / (_CALLS * _REPLAYS)


def group_sums(size: int, kind: str, all_bytes: Sequence[int]) -> tuple[str, list[str]]:
    """Return the table of sums of `size` ranks by who makes them, and what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = _processes(time_group, size, size, str(Path(folder) / "store"), kind, all_bytes)
    names = [_backend_name(kind), "one shot", "two shots"]
    rows = [
        (f"{num_bytes:,}", *(f"{times[name]:.1f}" if name in times else "-" for name in names))
        for num_bytes, times, _ in ranks[0]
    ]
    text = markdown((f"{size} ranks, bytes", *(f"{name}, us" for name in names)), rows)
    wrong = [each for found in ranks for sums in found for each in sums.wrong]
    return f"{text}\n\n{crossover(ranks[0], size)}", wrong


def crossover(found: Sequence[Sums], size: int) -> str:
    """Return up to how many bytes which of our sums was the fastest, and up to how many it serves.

    Larger ones count as slower from the first that is on.
    """
    if not any(len(each.times) > 1 for each in found):
        return "No symmetric memory: all sums are the backend's."
    limits = dict.fromkeys(("one shot", "two shots"), 0)
    for num_bytes, times, _ in found:
        fastest = min(times, key=lambda name: times[name])
        if fastest not in limits:
            break
        limits[fastest] = num_bytes
    one_shot = MOST_BYTES if size == 2 else ONE_SHOT_BYTES
    return (
        f"One shot was the fastest up to {limits['one shot']:,} bytes and serves up to "
        f"{one_shot:,}; two shots up to {limits['two shots']:,}, and serve up to {MOST_BYTES:,}."
    )


def _connections(_rank: int, count: int) -> str:
    """Return the table of GB/s between GPUs that read each other's memory."""
    rows = []
    for i, device in enumerate(devices := [torch.device("cuda", i) for i in range(count)]):
        cells = [
            f"{_copy_rate(device, other) / 1e9:.0f}" if i != j and reaches(device, j) else "-"
            for j, other in enumerate(devices)
        ]
        rows.append((str(device), *cells))
    return markdown(("GB/s from, to", *map(str, devices)), rows)


def _copy_rate(source: torch.device, target: torch.device) -> float:
    x = torch.zeros(2**28, dtype=torch.uint8, device=source)
    y = torch.empty_like(x, device=target)
    y.copy_(x)
    torch.cuda.synchronize(target)
    begin = time.perf_counter()
    for _ in range(8):
        y.copy_(x)
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(target)
    return 8 * x.nbytes / (time.perf_counter() - begin)


def _greedy_tokens(_rank: int, settings: Mapping[str, Any]) -> list[list[int]]:
    from engine import LLM, SamplingParams

    draw = random.Random(0)
    prompts = [draw.choices(range(1000, 2000), k=length) for length in (1, 40, 7, 300)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = LLM(**settings).generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def parity(sizes: Sequence[int], kind: str, checkpoint: str) -> tuple[str, list[str]]:
    """Return whether ranks give the greedy tokens of one process, in float32, and which do not."""
    settings = {
        "model": checkpoint,
        "device": kind,
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_memory_bytes": 2**28,
    }
    tokens = {
        size: _processes(_greedy_tokens, 1, {**settings, "tensor_parallel_size": size})[0]
        for size in (1, *sizes)
    }
    wrong = [
        f"{size} ranks give other tokens than one" for size in sizes if tokens[size] != tokens[1]
    ]
    numbers = ", ".join(map(str, sizes))
    return f"Tokens of {numbers} ranks: {'; '.join(wrong) or 'those of one process'}.", wrong


def _step_milliseconds(_rank: int, settings: Mapping[str, Any], batches: Sequence[int]) -> _Times:
    engine, times = Steps(settings), []
    for batch in batches:
        engine.fill(batch, _CONTEXT)
        engine.run(10, batch)
        begin = time.perf_counter()
        engine.run(50, batch)
        times.append(20 * (time.perf_counter() - begin))
        engine.clear()
    return times


def _ceilings(_rank: int, kind: str) -> dict[str, float]:
    return ceilings.measure(torch.device(kind))


def rank_steps(label: str, sizes: Sequence[int], batches: Sequence[int], kind: str) -> str:
    """Return the table of decode steps of one rank and of several, each beside its floor.

    That is the floor of one device (`floors.py`) by the number of ranks: sums take no time.
    """
    shape, (limits,) = _SHAPES[label], _processes(_ceilings, 1, kind)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape, Path(folder))
        settings = {
            "model": folder,
            "load_format": "dummy",
            "device": kind,
            "dtype": "bfloat16",
            "max_model_len": 2 * _CONTEXT,
            "max_num_seqs": max(batches),
            "kv_cache_memory_bytes": max(batches) * 2 * _CONTEXT * shape.kv_bytes_per_token,
            "enable_prefix_caching": False,
        }
        times = {
            size: _processes(
                _step_milliseconds, 1, {**settings, "tensor_parallel_size": size}, batches
            )[0]
            for size in (1, *sizes)
        }
    rows = []
    for i, batch in enumerate(batches):
        floor = 1000 * floors.decode_seconds(shape, batch, batch * _CONTEXT, limits)
        cells = (f"{found[i]:.2f} ({floor / size:.2f})" for size, found in times.items())
        rows.append((f"{batch} rows", *cells))
    return markdown((f"{label}, ms per step (floor)", *(f"{size} ranks" for size in times)), rows)


def _parts(
    count: int, options: argparse.Namespace
) -> Iterator[Callable[[], tuple[str, list[str]]]]:
    """Yield what is measured with `count` GPUs: each returns a text, and what is wrong."""
    from engine.demo.random_checkpoint import write_random_checkpoint  # takes long

    sizes = sorted({*(2**power for power in range(1, 7) if 2**power <= count), max(count, 2)})
    kind = "cuda" if count >= 2 else "cpu"
    if kind == "cuda":
        yield lambda: (_processes(_connections, 1, count)[0], [])
        for size in sizes:
            yield partial(group_sums, size, kind, _GPU_BYTES)
        yield lambda: (rank_steps(options.model, sizes, _GPU_BATCHES, kind), [])
    else:
        yield lambda: (sums(), [])
        yield lambda: (steps(options.model, (1, 16), options.prompt, options.rounds), [])
    yield lambda: (wire(), [])
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint("0.1b", Path(folder))
        yield partial(parity, sizes, kind, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.ranks", description=__doc__)
    parser.add_argument("--model", choices=_SHAPES, default="0.5b", help="shape (default: 0.5b)")
    parser.add_argument(
        "--rounds", type=int, default=9, help="of each measurement of steps, on a CPU"
    )
    parser.add_argument("--prompt", type=int, default=1024, help="tokens, on a CPU (default: 1024)")
    options = parser.parse_args(arguments)
    if (count := torch.cuda.device_count()) < 2:
        print(f"{count} GPUs are here: nothing of what two need is tested. On the CPU:\n")
    wrong: list[str] = []
    for part in _parts(count, options):
        try:
            text, found = part()
        except Exception as error:  # the other parts go on
            text, found = "", [f"{type(error).__name__}: {error}"]
        wrong += found
        print(text or found[0], end="\n\n", flush=True)
    print("\n".join(f"WRONG: {each}" for each in wrong) or "All of this is right.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
