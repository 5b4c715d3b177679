"""What the options of `trident bench` choose: workloads and servers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from client.bench.comparison import Comparison
from client.bench.errors import BenchError
from client.bench.load.workload import BY_NAME, GROUPS, Lengths, Workload, named, numbers
from client.bench.load.workload import tiny as in_small
from client.bench.options import Options
from client.bench.report.html import prepare, write_report
from client.bench.report.results import Bounds, as_json
from client.bench.report.tables import tables
from client.bench.servers.arguments import all_named, commands, variants
from client.bench.servers.external import external
from client.bench.servers.peer import peer
from client.bench.servers.random_checkpoint import random_checkpoint
from client.bench.servers.server import Server
from client.bench.servers.trident import TRIDENT, WAYS, trident
from client.commands.server_display import stopped_by_signals
from engine.checkpoint.hub import resolve_checkpoint

_BATCHINGS = ("none", "static", "continuous")  # of transformers, in `servers/baseline.py`
_PER_STREAM = 4  # requests of a stream, by default
_REQUESTS = 100  # of an open loop, by default
_FASTEST = 500  # requests that are answered per second at most


def workloads(options: Options) -> list[Workload]:
    """Return those that are named, and one for each rate or number of streams.

    Raises:
        BenchError: an option is wrong; names it.
    """
    base = Workload(
        "trace" if options.trace is not None else "",
        options.requests or _REQUESTS,
        Lengths.parse("--prompt-tokens", options.prompt_tokens),
        Lengths.parse("--max-tokens", options.max_tokens),
        turns=options.turns,
        poisson=not options.evenly,
        shared=options.shared_tokens,
        history=options.turns > 1,
        n=options.n,
        temperature=options.temperature,
        trace=options.trace,
        duration=options.duration,
    )
    found = [] if options.workload is None else named(options.workload)
    if options.trace is not None:
        found.append(base)
    for each in numbers("--rate", options.rate):
        found.append(replace(base, name=f"{each:g}/s", rate=each))
    for each in numbers("--concurrency", options.concurrency):
        if each != int(each):
            raise BenchError(f"--concurrency: must be whole numbers (got {each:g})")
        # With a duration it ends by time: more sessions than are answered until then.
        more = (
            _PER_STREAM * each if options.duration is None else each + _FASTEST * options.duration
        )
        count = options.requests or int(more)
        found.append(replace(base, name=f"{each:g} streams", concurrency=int(each), sessions=count))
    if not found:
        raise BenchError("--workload, --concurrency, --rate or --trace: give only one of them")
    return [in_small(each) for each in found] if options.tiny else found


def checkpoint(options: Options, console: Console) -> Path:
    """Return the folder of the checkpoint that all serve, or whose tokenizer makes prompts."""
    if options.model is None and not options.url and not options.tiny:
        return random_checkpoint(options.random_model, console)
    return resolve_checkpoint(options.model or "demo", weights=False)


def servers(options: Options, model: Path) -> tuple[list[Server], list[Server]]:
    """Return Tridents and their peers on a checkpoint.

    Raises:
        BenchError, ServerStartError: an option is wrong; names it.
    """
    if options.url:
        return [], [
            external(name, url, model=options.model_name, metrics_url=options.metrics_url)
            for name, url in all_named("--url", options.url).items()
        ]
    ways = options.through.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise BenchError(f"--through: {unknown[0]!r} is unknown; known are {', '.join(WAYS)}")
    others = variants(options.trident or [], taken=[TRIDENT])
    names = [TRIDENT if len(ways) == 1 else f"{TRIDENT}-{way}" for way in ways]
    tridents = [
        *(trident(model, {}, name=n, way=way) for n, way in zip(names, ways, strict=True)),
        *(trident(model, each, name=n, way=ways[0]) for n, each in others.items()),
    ]
    peers = commands(options.peer or [], taken=[*names, *others])
    for batching in filter(None, options.baseline.split(",")):
        if batching not in _BATCHINGS:
            raise BenchError(
                f"--baseline: {batching!r} is unknown; known are {', '.join(_BATCHINGS)}"
            )
        peers[f"transformers, {batching}"] = [
            *(sys.executable, "-P", "-m", "client.bench.servers.baseline"),
            *("{model}", "--port", "{port}", "--batching", batching),
        ]
    return tridents, [peer(name, words, model) for name, words in peers.items()]


def bounds(options: Options) -> Bounds:
    """Return what goodput demands."""
    found = numbers("--goodput", options.goodput)
    if len(found) != 2:
        raise BenchError(f"--goodput: must be two numbers, such as 2,0.2 (got {options.goodput!r})")
    return Bounds(*found)


def list_workloads() -> str:
    """Return the names of all workloads, and what they ask."""
    lines = (f"  {name:17} {each.description}" for name, each in BY_NAME.items())
    groups = (f"  {name:17} {', '.join(w.name for w in each)}" for name, each in GROUPS.items())
    return "\n".join(("Workloads:", *lines, "", "Groups:", *groups))


def run(options: Options, console: Console) -> bool:
    """Measure, print the tables, and write the files.

    Returns:
        whether all figures of Trident were measured; peers are optional, unless alone.

    Raises:
        BenchError, ServerStartError: the message names the next step.
        KeyboardInterrupt: after printing what was measured.
    """
    asked, within = workloads(options), bounds(options)
    model = checkpoint(options, console)
    tridents, others = servers(options, model)
    if options.json is not None:  # now, as a measurement of minutes must not be lost
        try:
            options.json.touch()
        except OSError as error:
            raise BenchError(f"--json: cannot write {options.json}: {error.strerror}") from None
    if options.report is not None:
        prepare(options.report)
    with stopped_by_signals():
        results = Comparison(
            *(tridents, others, model, asked, options.rounds, console),
            processes=options.processes,
        ).run()
    found = as_json(results, within)
    console.print(f"The checkpoint is {model}", highlight=False, markup=False, soft_wrap=True)
    shown = tables(found, options.rounds)
    for each in shown:
        console.print(each, highlight=False, markup=False, soft_wrap=isinstance(each, str))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.report is not None:
        write_report(found, shown, options.report)
    if results.interrupted:
        raise KeyboardInterrupt
    return not any(server.name in results.failures for server in tridents or others)
