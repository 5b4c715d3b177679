"""The sampler's other kernels: penalties and truncation before it, log-probabilities after it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.bench.case import LLAMA, Case, Work, numel_bytes, randn
from kernels.sampling.adjust_logits import adjust_logits
from kernels.sampling.logprobs import token_logprobs
from kernels.sampling.token_counts import TokenCounts, count_tokens
from kernels.sampling.truncate import truncate_logits
from kernels.slot_tables import BIAS, PENALTIES, SlotTables

_PENALTIES = (1.1, 0.3, 0.2)  # repetition, presence and frequency
_BIASES = 4  # per row
_NUM_TOP = 5
_SIGMAS, _TYPICAL = 3.0, 0.9


def slot_tables(rows: int, vocab: int, *, max_model_len: int, device: torch.device) -> SlotTables:
    """Return empty tables for `rows` sequences."""
    return SlotTables.allocate(
        rows,
        max_model_len=max_model_len,
        max_blocks=1,
        max_stop_token_ids=16,
        max_biases=1024,
        vocab_size=vocab,
        device=device,
    )


def _penalties(rows: int, vocab: int, prompt: int, output: int, device: torch.device) -> Work:
    logits = randn(rows, vocab, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(0)
    said = torch.randint(vocab, (rows, prompt + output), generator=generator).to(device)
    outputs = said[:, prompt:]
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    tables = slot_tables(rows, vocab, max_model_len=prompt + output, device=device)
    tables.token_ids.copy_(said)
    tables.num_tokens.fill_(prompt + output)
    tables.num_prompt_tokens.fill_(prompt)
    tables.features.fill_(BIAS | PENALTIES)
    tables.num_biases.fill_(_BIASES)
    tokens = torch.arange(_BIASES, device=device) * (vocab // _BIASES)
    tables.bias_token_ids[:, :_BIASES] = tokens
    biases = torch.linspace(-1, 1, rows * _BIASES, device=device).view(rows, -1)
    tables.bias_values[:, :_BIASES] = biases
    penalties = (tables.repetition_penalty, tables.presence_penalty, tables.frequency_penalty)
    for column, value in zip(penalties, _PENALTIES, strict=True):
        column.fill_(value)
    counts = TokenCounts.allocate(rows, vocab, device)
    count_tokens(counts, tables, slots)
    # The tables as torch would store them.
    seen = torch.zeros(rows, vocab, dtype=torch.bool, device=device).scatter_(1, said, True)
    ones = torch.ones_like(outputs, dtype=torch.int32)
    produced = torch.zeros_like(counts.output_counts).scatter_add_(1, outputs, ones)
    entries = (slots.long().repeat_interleave(_BIASES), tokens.repeat(rows))
    form = partial(_torch_penalties, logits, entries, biases.flatten(), seen, produced)
    return Work(
        ours=partial(adjust_logits, logits, tables, slots, counts),
        peers={"eager": form},
        compiled={"compiled": form},
        bytes=numel_bytes(*counts) + 2 * 4 * rows * (prompt + output),
        written=(logits,),
    )


def _torch_penalties(
    logits: Tensor,
    entries: tuple[Tensor, Tensor],
    values: Tensor,
    seen: Tensor,
    produced: Tensor,
) -> None:
    repetition, presence, frequency = _PENALTIES
    logits.index_put_(entries, values, accumulate=True)
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, penalised, logits))
    logits.sub_(frequency * produced)
    logits.sub_(presence * (produced > 0))


def _truncation(rows: int, vocab: int, device: torch.device) -> Work:
    logits = randn(rows, vocab, dtype=torch.float32, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    tables = slot_tables(rows, vocab, max_model_len=1, device=device)
    tables.temperature.fill_(1.0)
    tables.top_n_sigma.fill_(_SIGMAS)
    tables.typical_p.fill_(_TYPICAL)
    form = partial(_torch_truncation, logits)
    return Work(
        ours=partial(truncate_logits, logits, tables, slots),
        peers={"eager": form},
        compiled={"compiled": form},
        bytes=2 * numel_bytes(logits),
        written=(logits,),
        differs=_keeps_others,
    )


def _keeps_others(ours: Any, theirs: Any) -> str | None:
    """Return how many tokens one keeps and the other drops, None if rounding may explain it."""
    wrong = int(((ours[0] > -torch.inf) != (theirs[0] > -torch.inf)).sum())
    return None if wrong <= 1e-4 * ours[0].numel() else f"{wrong} tokens"


def _torch_truncation(logits: Tensor) -> None:
    floor = logits.amax(-1, keepdim=True) - _SIGMAS * logits.std(-1, correction=0, keepdim=True)
    logits.masked_fill_(logits < floor, -torch.inf)
    logprobs = logits.log_softmax(-1)
    probs = logprobs.exp()
    surprise = (logprobs + (-probs * logprobs).nan_to_num().sum(-1, keepdim=True)).abs()
    distance, order = surprise.sort(-1)
    last = (probs.gather(-1, order).cumsum(-1) < _TYPICAL).sum(-1, keepdim=True)
    logits.masked_fill_(surprise > distance.gather(-1, last), -torch.inf)


def _logprobs(rows: int, vocab: int, device: torch.device) -> Work:
    logits = randn(rows, vocab, dtype=torch.float32, device=device)
    token_ids = torch.arange(rows, device=device)
    form = partial(_torch_logprobs, logits, token_ids)
    return Work(
        ours=partial(token_logprobs, logits, token_ids, _NUM_TOP),
        peers={"eager": form},
        compiled={"compiled": form},
        bytes=numel_bytes(logits),
    )


def _torch_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    # Ranked by logits: rounding makes some log-probabilities equal.
    ranks = (logits > logits.gather(-1, token_ids[:, None])).sum(-1).int() + 1
    values, tokens = logprobs.topk(_NUM_TOP)
    return chosen[:, 0], ranks, tokens, values


CASES = [
    *(
        Case(
            operation="sampling",
            name=f"penalties {LLAMA.label} {rows}",
            build=_penalties,
            shape={"rows": rows, "vocab": LLAMA.vocab, "prompt": 1024, "output": 256},
            tiny={"rows": 3, "vocab": 300, "prompt": 50, "output": 40},
            compile=rows == 64,
        )
        for rows in (64, 256, 1)
    ),
    *(
        Case(
            operation="sampling",
            name=f"truncation {LLAMA.label} {rows}",
            build=_truncation,
            shape={"rows": rows, "vocab": LLAMA.vocab},
            tiny={"rows": 3, "vocab": 300},
            compile=rows == 64,
        )
        for rows in (64, 1)
    ),
    *(
        Case(
            operation="sampling",
            name=f"logprobs {LLAMA.label} {rows}",
            build=_logprobs,
            shape={"rows": rows, "vocab": LLAMA.vocab},
            tiny={"rows": 3, "vocab": 300},
            compile=rows == 64,
        )
        for rows in (64, 256, 1)
    ),
]
