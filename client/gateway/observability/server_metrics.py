"""The metrics of the servers, read from each and shown together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import aiohttp

_TIMEOUT = aiohttp.ClientTimeout(5.0)


async def scrape(addresses: Mapping[str, str]) -> dict[str, str | None]:
    """Return what each server says of itself in Prometheus' form; None of one that does not answer.

    Args:
        addresses: the server's name, and `host:port` of its metrics.
    """
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        texts = await asyncio.gather(*(_text(session, each) for each in addresses.values()))
    return dict(zip(addresses, texts, strict=True))


async def _text(session: aiohttp.ClientSession, address: str) -> str | None:
    try:
        async with session.get(f"http://{address}/metrics") as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


def together(texts: Mapping[str, str]) -> str:
    """Return the metrics of several servers as those of one, whose samples name their `server`.

    Each family stands there once, as Prometheus' form demands: with what the first server that has
    it says of it, and the samples of all. A single server's are left as they are.
    """
    if len(texts) == 1:
        return next(iter(texts.values()))
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for server, text in texts.items():
        label = 'server="{}"'.format(server.replace("\\", r"\\").replace('"', r"\""))
        known = frozenset(heads)
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if family not in known:
                    heads.setdefault(family, []).append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, label))
    return "\n".join(_lines(heads, samples))


def _lines(heads: Mapping[str, list[str]], samples: Mapping[str, list[str]]) -> Iterable[str]:
    for family in dict.fromkeys((*heads, *samples)):
        yield from heads.get(family, ())
        yield from samples.get(family, ())
    yield ""  # the last line has an end too


def _labelled(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
