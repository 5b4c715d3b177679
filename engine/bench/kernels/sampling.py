"""Sampling, next to the sort-based torch implementation common in engines, and what surrounds it.

The torch implementations use exponential races like ours, since torch.multinomial synchronises with
the device. Sampled tokens are random, so results agree if both are among the tokens that the
filters keep.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.bench.kernels.case import Aim, Call, Case, Work, differs, numel_bytes, randn
from engine.bench.kernels.shapes import LLAMA_8B, QWEN_0_5B
from kernels.sampling.adjust_logits import adjust_logits
from kernels.sampling.draw import sample_tokens
from kernels.sampling.logprobs import token_logprobs
from kernels.sampling.token_counts import TokenCounts, count_tokens
from kernels.sampling.truncate import truncate_logits
from kernels.step.sampling_columns import BIAS, PENALTIES
from kernels.step.seq_slot_tables import SeqSlotTables

_SPREAD = 3.0  # standard deviation of the logits, similar to a model's
_BIASES = 4  # per row
_NUM_TOP = 5


def _inputs(
    rows: int, vocab: int, device: torch.device, max_model_len: int = 1
) -> tuple[Tensor, SeqSlotTables, Tensor]:
    """Return logits, tables, and the slot of each row."""
    tables = SeqSlotTables.allocate(
        rows,
        max_model_len=max_model_len,
        max_blocks=1,
        max_stop_token_ids=16,
        max_biases=1024,
        vocab_size=vocab,
        device=device,
    )
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    return randn(rows, vocab, dtype=torch.float32, device=device), tables, slots


def draw(
    rows: int, vocab: int, temperature: float, top_k: int, top_p: float, device: torch.device
) -> Work:
    """Return sampling from random logits."""
    logits, tables, slots = _inputs(rows, vocab, device)
    logits *= _SPREAD
    kelvin, mass = tables.temperature.fill_(temperature), tables.top_p.fill_(top_p)
    tables.top_k.fill_(top_k)
    tables.seeds.copy_(torch.arange(1000, 1000 + rows))
    ours = partial(sample_tokens, logits, tables, slots)
    peer: dict[str, Call] = {"argmax": partial(torch.argmax, logits, -1)}
    if top_k or top_p < 1:
        peer = {"sort, cumsum, race": partial(_sort, logits, kelvin, top_k, mass)}
    elif temperature:
        peer = {"softmax, race": partial(_softmax, logits, kelvin)}
    kept = _kept(logits, kelvin, top_k, top_p) if temperature else None
    return Work(
        ours,
        peer,
        compiled=next(iter(peer.values())),
        bytes=numel_bytes(logits),
        differs=differs if kept is None else partial(_outside, kept),
    )


def _softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    return _race((logits / temperature[:, None]).softmax(-1))


def _sort(logits: Tensor, temperature: Tensor, top_k: int, top_p: Tensor) -> Tensor:
    scaled = logits / temperature[:, None]
    # One top_k of all rows, known on the host, makes this the fastest.
    values, order = scaled.topk(top_k) if top_k else scaled.sort(dim=-1, descending=True)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    rank = _race(probs.masked_fill(before >= top_p[:, None], 0.0))
    return order.gather(-1, rank[:, None])[:, 0]


def _race(probs: Tensor) -> Tensor:
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


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
        if outside := int((~kept.gather(1, tokens[:, None])).sum()):
            return f"{outside} tokens of {name} that the filters drop"
    return None


def _penalties(rows: int, vocab: int, prompt: int, output: int, device: torch.device) -> Work:
    logits, tables, slots = _inputs(rows, vocab, device, max_model_len=prompt + output)
    generator = torch.Generator().manual_seed(0)
    tables.token_ids.copy_(torch.randint(vocab, (rows, prompt + output), generator=generator))
    tables.num_tokens.fill_(prompt + output)
    tables.num_prompt_tokens.fill_(prompt)
    tables.features.fill_(BIAS | PENALTIES)
    tables.num_biases.fill_(_BIASES)
    tables.bias_token_ids[:, :_BIASES] = torch.arange(_BIASES) * (vocab // _BIASES)
    tables.bias_values[:, :_BIASES] = 1.0
    tables.repetition_penalty.fill_(1.1)
    tables.presence_penalty.fill_(0.3)
    tables.frequency_penalty.fill_(0.2)
    counts = TokenCounts.allocate(rows, vocab, device)
    count_tokens(counts, tables, slots)
    return Work(
        ours=partial(adjust_logits, logits, tables, slots, counts),
        bytes=numel_bytes(*counts) + 2 * 4 * rows * (prompt + output),
        written=(logits,),
    )


def _truncation(rows: int, vocab: int, device: torch.device) -> Work:
    logits, tables, slots = _inputs(rows, vocab, device)
    tables.temperature.fill_(1.0)
    tables.top_n_sigma.fill_(3.0)
    tables.typical_p.fill_(0.9)
    return Work(
        ours=partial(truncate_logits, logits, tables, slots),
        bytes=2 * numel_bytes(logits),
        written=(logits,),
    )


def _logprobs(rows: int, vocab: int, device: torch.device) -> Work:
    logits = randn(rows, vocab, dtype=torch.float32, device=device)
    token_ids = torch.arange(rows, device=device)
    form = partial(_torch_logprobs, logits, token_ids)
    return Work(
        ours=partial(token_logprobs, logits, token_ids, _NUM_TOP),
        peers={"eager": form},
        compiled=form,
        bytes=numel_bytes(logits),
    )


def _torch_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    # Ranked by logits: rounding makes some log-probabilities equal.
    ranks = (logits > logits.gather(-1, token_ids[:, None])).sum(-1).int() + 1
    values, tokens = logprobs.topk(_NUM_TOP)
    return chosen[:, 0], ranks, tokens, values


_DRAWS: dict[str, dict[str, Any]] = {
    "top-k top-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "top-p": {"temperature": 0.7, "top_k": 0, "top_p": 0.9},
    "unfiltered": {"temperature": 0.7, "top_k": 0, "top_p": 1.0},
    "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
}
CASES = [
    Case(
        operation="sampling",
        name=f"{name} {model.label} {rows}",
        build=draw,
        shape={"rows": rows, "vocab": model.vocab, **filters},
        tiny={"rows": 4, "vocab": 300, "top_k": min(filters["top_k"], 7)},
        aim=Aim(seconds=250e-6) if filters["top_k"] and rows == 64 else None,
        compile=name != "greedy" and rows == 64,
    )
    for name, filters in _DRAWS.items()
    for model, rows in ((LLAMA_8B, 64), (LLAMA_8B, 256), (LLAMA_8B, 1), (QWEN_0_5B, 64))
    if model is LLAMA_8B or name == "top-k top-p"
]
CASES += [
    Case(
        operation="sampling",
        name=f"{name} {LLAMA_8B.label} {rows}",
        build=build,
        shape={"rows": rows, "vocab": LLAMA_8B.vocab, **others},
        tiny={"rows": 3, "vocab": 300, **dict.fromkeys(others, 40)},
        compile=rows == 64,
    )
    for name, build, others in (
        ("penalties", _penalties, {"prompt": 1024, "output": 256}),
        ("truncation", _truncation, {}),
        ("logprobs", _logprobs, {}),
    )
    for rows in (64, 256, 1)
]
