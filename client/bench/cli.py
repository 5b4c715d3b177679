"""The `trident bench` commands."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Measure servers under load, beside each other, and what the stages cost.",
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def load(
    context: typer.Context,
    workload: Annotated[
        str,
        typer.Option(help="Names between commas, or standard (W1 to W5), published, growth."),
    ] = "standard",
    concurrency: Annotated[
        str | None, typer.Option(help="Numbers of streams, a workload each: 1,16,64.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests or sessions per second, a workload each: 0.5,2.")
    ] = None,
    evenly: Annotated[
        bool, typer.Option("--evenly", help="With --rate: equally far apart, not at random.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="A file of requests with their times, in Mooncake's form.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests, or sessions; default: 4 per stream, or 100."),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds after which no request is sent.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Of each prompt: N, LOW-HIGH or lognormal:MEDIAN:SIGMA.")
    ] = "128",
    max_tokens: Annotated[str, typer.Option(help="Of each answer, exactly; the same.")] = "64",
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Of the prompt, the same for all requests.")
    ] = 0,
    turns: Annotated[
        int, typer.Option(min=1, help="Of each session; a turn repeats all before it.")
    ] = 1,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers per request.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="A server that runs: http://HOST:PORT/v1 of OpenAI's API, or of Trident "
            "grpc://HOST:PORT or http://HOST:PORT/v2. Trident is not started then.",
        ),
    ] = None,
    metrics_url: Annotated[
        str, typer.Option(help="With --url: where the server's metrics are read.")
    ] = "",
    model_name: Annotated[
        str, typer.Option(help="With --url: its model; default: the first that it lists.")
    ] = "",
    chat: Annotated[bool, typer.Option("--chat", help="With --url: ask for chats.")] = False,
    through: Annotated[
        str, typer.Option(help="Ways to Trident: grpc, http, completions, chat, between commas.")
    ] = "grpc",
    trident: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SETTING=VALUE",
            help="Also measure Trident with other settings; separate several by spaces.",
        ),
    ] = None,
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
    baseline: Annotated[
        str | None,
        typer.Option(help="Also transformers: none (one at a time), static, continuous batching."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder, hub id, or demo, instead of a random one."),
    ] = None,
    random_model: Annotated[
        str,
        typer.Option(help="The random checkpoint: a size of engine.demo.random_checkpoint."),
    ] = "0.4b-tied",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per server, in turns.")] = 3,
    processes: Annotated[
        int, typer.Option(min=0, help="Of the load generator; 0: as many as it needs.")
    ] = 0,
    goodput: Annotated[
        str, typer.Option(help="Bounds of goodput: seconds to the first token, and per token.")
    ] = "2,0.2",
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Check the setup, on the bundled model and a few tokens.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a report to this folder: HTML, PNG plots, JSON.")
    ] = None,
) -> None:
    """Measure servers under load, one at a time on the same cores.

    Without --url Trident is started on a seeded random checkpoint, with the settings of engine.json
    and TRIDENT_* variables, and all peers beside it on the same one.
    """
    if context.invoked_subcommand is not None:
        return
    from client.bench.chosen import Free, Servers, run

    free = Free(
        *(concurrency, rate, evenly, trace, requests, duration),
        *(prompt_tokens, max_tokens, shared_tokens, turns, n, temperature),
    )
    servers = Servers(
        *(url or [], metrics_url, model_name, chat, through.split(",")),
        *(trident or [], peer or [], peer_url or [], (baseline or "").split(",")),
    )
    if not run(
        *(workload, free, servers, (model or "demo") if tiny else model, random_model),
        rounds=rounds,
        processes=processes,
        goodput=goodput,
        tiny=tiny,
        json_file=json,
        folder=report,
        console=Console(),
    ):
        raise typer.Exit(1)


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
def diff(
    before: Annotated[Path, typer.Argument(help="What --json wrote.")],
    after: Annotated[Path, typer.Argument(help="What it wrote of another run.")],
) -> None:
    """Compare two saved runs, and say which differences are more than noise."""
    from client.bench.compare.diff import table

    Console().print(table(before, after))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"streams: must be numbers such as 1,16,64 (got {text!r})")
    return numbers
