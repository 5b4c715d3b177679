"""The `trident bench` commands."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from client.commands.connection_options import Url
from client.connection import address

app = typer.Typer(
    help="Measure a server: its own overhead, other servers, NVIDIA's tools.",
    rich_markup_mode=None,
)

# Unknown options are passed on to the tool.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Streams = Annotated[int, typer.Option("--streams", min=1, help="Concurrent requests.")]
Requests = Annotated[int, typer.Option("--requests", min=1, help="Total number of requests.")]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, help="Tokens of each answer, exactly.")
]


@app.command()
def stages(
    model: Annotated[str, typer.Option(help="Checkpoint folder, hub id, or demo.")] = "demo",
    random_model: Annotated[
        str | None,
        typer.Option(help="Use a seeded random checkpoint: 0.1b or 0.4b (cached)."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="null:MS computes no model: each stream is due a token every MS milliseconds, and "
            "what the stages carry of it is measured. Default: the engine's own."
        ),
    ] = None,
    streams: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "1,16,64",
    seconds: Annotated[
        float, typer.Option(min=0.1, help="With null:MS: seconds to measure.")
    ] = 10.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    waves: Annotated[int, typer.Option(min=1, help="Waves of requests per round.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Alternations of engine and ensemble.")] = 2,
    model_repository: Annotated[
        Path | None, typer.Option(help="Model repository; default: Trident's own.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure tokens per second through the ensemble against the engine alone.

    Starts them alternately with the settings of engine.json and TRIDENT_* variables, and sends
    both the same requests.
    """
    from client.bench import paced
    from client.bench.random_checkpoint import random_checkpoint
    from client.bench.stages import run
    from client.bench.workload import Workload

    console = Console()
    if random_model is not None:
        model = str(random_checkpoint(random_model, console))
    workload = Workload(_numbers(streams), prompt_tokens, max_tokens, waves, rounds)
    if device is not None and device.startswith("null"):
        paced.run(
            model,
            device,
            workload,
            console,
            seconds=seconds,
            repository=model_repository,
            json_file=json,
        )
        return
    run(model, workload, console, device=device, repository=model_repository, json_file=json)


@app.command()
def gateway(
    model: Annotated[str, typer.Option(help="Checkpoint folder, hub id, or demo.")] = "demo",
    streams: Annotated[str, typer.Option(help="Numbers of concurrent requests.")] = "1,16,64,256",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    waves: Annotated[int, typer.Option(min=1, help="Waves of requests per round.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of all.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Processes of the gateway.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure tokens per second through the gateway against gRPC to the ensemble.

    Starts a server with its gateway, and sends both the same kind of requests in turns.
    """
    from client.bench.gateway.benchmark import run
    from client.bench.workload import Workload

    workload = Workload(_numbers(streams), prompt_tokens, max_tokens, waves, rounds)
    run(model, workload, Console(), workers=workers, json_file=json)


@app.command()
def compare(
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COMMAND",
            help="Another server: {model} is the checkpoint's folder, {port} a free port. "
            "May be given several times.",
        ),
    ] = None,
    peer_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="Base URL of that server's API, up to /v1; default: {port} on this machine.",
        ),
    ] = None,
    trident: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SETTING=VALUE",
            help="Also measure Trident with other settings; separate several by spaces.",
        ),
    ] = None,
    workloads: Annotated[
        str | None, typer.Option(help="Workloads to run, of W1,W2,W3,W4,W5; default: all.")
    ] = None,
    growth: Annotated[
        Path | None,
        typer.Option(
            help="Run 1 to 128 streams, and prompts of 256 to 8192 tokens, instead; plot to "
            "this PNG file."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per server.")] = 3,
    random_model: Annotated[
        str,
        typer.Option(help="The random checkpoint: a size of engine.demo.random_checkpoint."),
    ] = "0.4b-tied",
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Check the setup, on the bundled model and a few tokens.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare Trident with OpenAI-compatible servers, one at a time on the same cores.

    All serve one seeded random checkpoint (bf16; cached) and get the same prompts. Trident's
    settings are those of engine.json and TRIDENT_* variables.
    """
    from client.bench.compare.comparison import run
    from client.bench.compare.peer import parse_peers
    from client.bench.compare.plot import GrowthPlot
    from client.bench.compare.trident import TRIDENT, parse_variants
    from client.bench.compare.workload import GROWTH, STANDARD, TINY, TINY_GROWTH
    from client.bench.random_checkpoint import random_checkpoint
    from engine.demo import CHECKPOINT_DIR

    console = Console()
    variants = parse_variants(trident or [])
    peers = parse_peers(peer or [], peer_url or [], taken=[TRIDENT, *variants])
    plot = None
    by_name = {workload.name: workload for workload in (TINY if tiny else STANDARD)}
    names = list(by_name)
    if workloads is not None:
        if growth is not None:
            raise typer.BadParameter("workloads: --growth has its own")
        names = [name.strip().upper() for name in workloads.split(",")]
    if unknown := [name for name in names if name not in by_name]:
        raise typer.BadParameter(f"workloads: there is no {', '.join(unknown)}")
    chosen = [by_name[name] for name in dict.fromkeys(names)]
    if growth is not None:
        grown = TINY_GROWTH if tiny else GROWTH
        plot = GrowthPlot(growth, grown)
        chosen = list(grown.workloads)
    model = CHECKPOINT_DIR if tiny else random_checkpoint(random_model, console)
    if not run(model, peers, chosen, rounds, console, variants=variants, json_file=json, plot=plot):
        raise typer.Exit(1)


@app.command("perf-analyzer", context_settings=_PASS_ON)
def perf_analyzer(
    context: typer.Context,
    url: Url = "localhost:8001",
    streams: Streams = 16,
    requests: Requests = 128,
    max_tokens: MaxTokens = 64,
) -> None:
    """Run NVIDIA's perf_analyzer against a running server.

    Uses the one on PATH, or installs one below $XDG_CACHE_HOME/trident/tools. Flags that are not
    listed here are passed on: --concurrency-range 1:64:8, --percentile 99,
    -H triton-grpc-protocol-admin-key:KEY ...
    """
    from client.bench.perf_analyzer import run
    from client.bench.tools import Load

    load = Load(streams, requests, max_tokens)
    raise typer.Exit(run(address(url)[0], load, context.args, Console()))


@app.command("genai-perf", context_settings=_PASS_ON)
def genai_perf(
    context: typer.Context,
    url: Url = "localhost:8001",
    backend: Annotated[
        Literal["tensorrtllm", "vllm"],
        typer.Option(help="Request format: that of this Triton backend."),
    ] = "tensorrtllm",
    streams: Streams = 16,
    requests: Requests = 128,
    max_tokens: MaxTokens = 64,
    tokenizer: Annotated[
        str, typer.Option(help="Of the served model: folder, hub id, or demo.")
    ] = "demo",
) -> None:
    """Run NVIDIA's genai-perf against a running server.

    Installs it below $XDG_CACHE_HOME/trident/tools first (about 1 GB). Flags that are not listed
    here are passed on: --request-rate 5,
    --synthetic-input-tokens-mean 512, --artifact-dir FOLDER,
    --header triton-grpc-protocol-admin-key:KEY ...
    """
    from client.bench.genai_perf import run
    from client.bench.tools import Load

    load = Load(streams, requests, max_tokens)
    raise typer.Exit(run(address(url)[0], backend, load, tokenizer, context.args, Console()))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"streams: must be numbers such as 1,16,64 (got {text!r})")
    return numbers
