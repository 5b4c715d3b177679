"""What the options of `trident bench` choose: workloads and servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from client.bench.comparison import run as compare
from client.bench.errors import BenchError
from client.bench.load.lengths import Lengths, numbers
from client.bench.load.workload import BY_NAME, GROUPS, Workload, named
from client.bench.load.workload import tiny as in_small
from client.bench.report.results import Bounds
from client.bench.servers.arguments import all_named
from client.bench.servers.engine_alone import EngineAlone
from client.bench.servers.external import External
from client.bench.servers.peer import Peer, PeerCommand, parse_peers
from client.bench.servers.random_checkpoint import random_checkpoint
from client.bench.servers.server import Server
from client.bench.servers.trident import ENGINE, TRIDENT, WAYS, Trident, parse_variants
from engine.hub import resolve_checkpoint

_BASELINES = ("none", "static", "continuous")
_PER_STREAM = 4  # requests of a stream, unless told
_REQUESTS = 100  # of an open loop, unless told


@dataclass(frozen=True)
class Free:
    """A workload of one's own; the options of `trident bench`."""

    concurrency: str | None
    rate: str | None
    evenly: bool
    trace: Path | None
    requests: int | None
    duration: float | None
    prompt_tokens: str
    max_tokens: str
    shared_tokens: int
    turns: int
    n: int
    temperature: float

    def workloads(self) -> list[Workload]:
        """Return one for each rate or number of streams; none if neither is given.

        Raises:
            BenchError: an option is wrong; names it.
        """
        if [self.concurrency, self.rate, self.trace].count(None) < 2:
            raise BenchError("--concurrency, --rate and --trace: give one of them")
        base = Workload(
            "trace" if self.trace is not None else "",
            self.requests or _REQUESTS,
            Lengths.parse("--prompt-tokens", self.prompt_tokens),
            Lengths.parse("--max-tokens", self.max_tokens),
            turns=self.turns,
            poisson=not self.evenly,
            shared=self.shared_tokens,
            history=self.turns > 1,
            n=self.n,
            temperature=self.temperature,
            trace=self.trace,
            duration=self.duration,
        )
        if self.trace is not None:
            return [base]
        if self.rate is not None:
            rates = numbers("--rate", self.rate)
            return [replace(base, name=f"{each:g}/s", rate=each) for each in rates]
        if self.concurrency is None:
            return []
        found = []
        for each in numbers("--concurrency", self.concurrency):
            if each != int(each):
                raise BenchError(f"--concurrency: must be whole numbers (got {each:g})")
            # With a duration it ends by time: more sessions than can be asked.
            most = 1000 if self.duration is not None else _PER_STREAM
            count = self.requests or int(each) * most
            found.append(
                replace(base, name=f"{each:g} streams", concurrency=int(each), sessions=count)
            )
        return found


@dataclass(frozen=True)
class Servers:
    """The servers; the options of `trident bench`."""

    urls: list[str]
    metrics_url: str
    model_name: str
    through: list[str]
    tridents: list[str]
    peers: list[str]
    baselines: list[str]

    def made(self, model: Path) -> tuple[list[Server], list[Server]]:
        """Return Tridents and their peers on a checkpoint.

        Raises:
            BenchError, ServerStartError: an option is wrong; names it.
        """
        if self.urls:
            return [], [
                External(name, url, model=self.model_name, metrics_url=self.metrics_url)
                for name, url in all_named("--url", self.urls).items()
            ]
        if unknown := [way for way in self.through if way not in (ENGINE, *WAYS)]:
            raise BenchError(f"--through: {unknown[0]!r} is none of {', '.join((ENGINE, *WAYS))}")
        variants = parse_variants(self.tridents)
        is_one = len(self.through) == 1
        names = [TRIDENT if is_one else f"{TRIDENT}-{way}" for way in self.through]
        tridents = [
            *(_trident(model, {}, *each) for each in zip(names, self.through, strict=True)),
            *(_trident(model, each, name, self.through[0]) for name, each in variants.items()),
        ]
        peers = parse_peers(self.peers, taken=[*names, *variants])
        peers += [_baseline(each) for each in self.baselines if each]
        return tridents, [Peer(peer, model) for peer in peers]


def _trident(model: Path, settings: Mapping[str, str], name: str, way: str) -> Server:
    if way == ENGINE:
        return EngineAlone(model, settings, name=name)
    return Trident(model, settings, name=name, way=way)


def _baseline(batching: str) -> PeerCommand:
    if batching not in _BASELINES:
        raise BenchError(f"--baseline: {batching!r} is none of {', '.join(_BASELINES)}")
    module = (sys.executable, "-m", "client.bench.servers.baseline")
    return PeerCommand(
        f"transformers, {batching}",
        (*module, "{model}", "--port", "{port}", "--batching", batching),
    )


def list_workloads() -> str:
    """Return the names of all workloads, and what they ask."""
    lines = (f"  {name:17} {each.description}" for name, each in BY_NAME.items())
    groups = (f"  {name:17} {', '.join(w.name for w in each)}" for name, each in GROUPS.items())
    return "\n".join(("Workloads:", *lines, "", "Groups:", *groups))


def run(
    names: str | None,
    free: Free,
    servers: Servers,
    model: str | None,
    random_model: str,
    *,
    rounds: int,
    processes: int,
    goodput: str,
    tiny: bool,
    json_file: Path | None,
    folder: Path | None,
    console: Console,
) -> bool:
    """Measure what the options choose; return as `comparison.run`.

    Raises:
        BenchError, ServerStartError: the message says what to do.
    """
    bounds = numbers("--goodput", goodput)
    if len(bounds) == 1:
        bounds = (bounds[0], bounds[0])
    workloads = [*free.workloads(), *([] if names is None else named(names))]
    if not workloads:
        raise BenchError("--workload, --concurrency, --rate or --trace: give one of them")
    if tiny:
        workloads = [in_small(each) for each in workloads]
    if model is None and not servers.urls:
        folder_of_model = random_checkpoint(random_model, console)
    else:
        folder_of_model = resolve_checkpoint(model or "demo", weights=False)
    tridents, others = servers.made(folder_of_model)
    return compare(
        *(folder_of_model, tridents, others, workloads, rounds, console),
        bounds=Bounds(*bounds[:2]),
        processes=processes,
        json_file=json_file,
        folder=folder,
    )
