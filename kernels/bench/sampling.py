"""Sampling with filters, next to the sort-based torch implementation common in engines.

The torch implementations use exponential races like ours, since torch.multinomial synchronises with
the device. Sampled tokens are random, so results agree if both are among the tokens that the
filters keep; at the tests' tiny shapes both get the same random numbers and must sample the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.bench import sampling_logits
from kernels.bench.case import LLAMA, QWEN, Aim, Call, Case, Work, differs, numel_bytes, randn
from kernels.bench.sampling_logits import slot_tables
from kernels.sampling.draw import sample_tokens
from kernels.sampling.philox import exponentials_reference

_SPREAD = 3.0  # standard deviation of the logits, similar to a model's
_AIM = Aim(micros=250)


def draw(
    rows: int,
    vocab: int,
    temperature: float,
    top_k: int,
    top_p: float,
    same_numbers: bool,
    device: torch.device,
) -> Work:
    """Return sampling from random logits; `same_numbers` gives torch our random numbers."""
    logits = randn(rows, vocab, dtype=torch.float32, device=device) * _SPREAD
    tables = slot_tables(rows, vocab, max_model_len=1, device=device)
    kelvin, mass = tables.temperature.fill_(temperature), tables.top_p.fill_(top_p)
    tables.top_k.fill_(top_k)
    seeds = tables.seeds.copy_(torch.arange(1000, 1000 + rows))
    positions = tables.num_tokens.copy_(torch.arange(rows))
    times = exponentials_reference(seeds, positions.long(), vocab).float() if same_numbers else None
    peers: dict[str, Call] = {}
    compiled: dict[str, Call] = {}
    if not temperature:
        peers["argmax"] = partial(torch.argmax, logits, -1)
    elif top_k or top_p < 1:
        if top_k:
            peers["topk, cumsum, race"] = partial(_topk, logits, kelvin, top_k, mass, times)
        peers["sort, cumsum, race"] = partial(_sort, logits, kelvin, top_k, mass, times)
    else:
        peers["softmax, race"] = partial(_softmax, logits, kelvin, times)
        compiled["compiled"] = partial(_softmax, logits, kelvin, times)
    compare: Callable[[Any, Any], str | None] = differs
    if temperature and not same_numbers:
        compare = partial(_outside, _kept(logits, kelvin, top_k, top_p))
    return Work(
        ours=partial(
            sample_tokens, logits, tables, torch.arange(rows, dtype=torch.int32, device=device)
        ),
        peers=peers,
        compiled=compiled,
        bytes=numel_bytes(logits),
        differs=compare,
    )


def _softmax(logits: Tensor, temperature: Tensor, times: Tensor | None) -> Tensor:
    return _race((logits / temperature[:, None]).softmax(-1), times)


def _topk(
    logits: Tensor, temperature: Tensor, top_k: int, top_p: Tensor, times: Tensor | None
) -> Tensor:
    """Sample if all rows have one top_k, known on the host."""
    values, order = (logits / temperature[:, None]).topk(top_k)
    return _nucleus(values, order, top_p, times)


def _sort(
    logits: Tensor, temperature: Tensor, top_k: int, top_p: Tensor, times: Tensor | None
) -> Tensor:
    values, order = (logits / temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    if top_k:
        rank = torch.arange(logits.shape[1], device=logits.device)
        values = values.masked_fill(rank >= top_k, float("-inf"))
    return _nucleus(values, order, top_p, times)


def _nucleus(values: Tensor, order: Tensor, top_p: Tensor, times: Tensor | None) -> Tensor:
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= top_p[:, None], 0.0)
    place = _race(probs, None if times is None else times.gather(-1, order))
    return order.gather(-1, place[:, None])[:, 0]


def _race(probs: Tensor, times: Tensor | None) -> Tensor:
    if times is None:
        times = torch.empty_like(probs).exponential_()
    return (probs / times).argmax(-1)


def _kept(logits: Tensor, temperature: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return bool [R, V]: tokens that the filters keep, tolerating another summation order."""
    probs, order = (logits / temperature[:, None]).double().softmax(-1).sort(-1, descending=True)
    if top_k:
        probs[:, top_k:] = 0
    before = probs.cumsum(-1) - probs
    kept = (probs > 0) & (before <= top_p * probs.sum(-1, keepdim=True) * (1 + 1e-4))
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _outside(kept: Tensor, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> str | None:
    """Return whose tokens are not among those `kept`, None if all are."""
    for name, (tokens,) in (("ours", ours), ("torch", theirs)):
        outside = int((~kept.gather(1, tokens[:, None])).sum())
        if outside:
            return f"{outside} tokens of {name} that the filters drop"
    return None


def _case(name: str, rows: int, vocab: int, temperature: float, top_k: int, top_p: float) -> Case:
    filtered = bool(top_k)
    return Case(
        operation="sampling",
        name=name,
        build=draw,
        shape={
            "rows": rows,
            "vocab": vocab,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "same_numbers": False,
        },
        tiny={"rows": 4, "vocab": 300, "top_k": 7 if filtered else 0, "same_numbers": True},
        aim=_AIM if filtered and rows == 64 else None,
        compile=temperature > 0 and rows == 64,
    )


_DRAWS = [
    _case(f"{name} {model.label} {rows}", rows, model.vocab, temperature, top_k, top_p)
    for name, temperature, top_k, top_p in (
        ("top-k top-p", 0.7, 50, 0.9),
        ("top-p", 0.7, 0, 0.9),
        ("unfiltered", 0.7, 0, 1.0),
        ("greedy", 0.0, 0, 1.0),
    )
    for model, rows in ((LLAMA, 64), (LLAMA, 256), (LLAMA, 1), (QWEN, 64))
    if model is LLAMA or name == "top-k top-p"
]
CASES = [*_DRAWS, *sampling_logits.CASES]
