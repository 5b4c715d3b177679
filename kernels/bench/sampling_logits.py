"""The sampler's other kernels: penalties before sampling, log-probabilities after it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.bench.case import LLAMA, Case, Work, numel_bytes, randn
from kernels.sampling.adjust_logits import LogitBias, Penalties, adjust_logits
from kernels.sampling.logprobs import token_logprobs
from kernels.sampling.token_counts import TokenCounts, count_output, mark_prompt

_PENALTIES = (1.1, 0.3, 0.2)  # repetition, presence and frequency
_BIASES = 4  # per row
_NUM_TOP = 5


def _penalties(rows: int, vocab: int, prompt: int, output: int, device: torch.device) -> Work:
    logits = randn(rows, vocab, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(0)
    said = torch.randint(vocab, (rows, prompt + output), generator=generator).to(device)
    prompts, outputs = said.split((prompt, output), dim=1)
    counts = TokenCounts.allocate(rows, vocab, device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    mark_prompt(counts, slots, starts * prompt, prompts.flatten())
    count_output(counts, slots.repeat_interleave(output), outputs.flatten())
    tokens = torch.arange(_BIASES, dtype=torch.int32, device=device) * (vocab // _BIASES)
    bias = LogitBias(
        start_loc=starts * _BIASES,
        token_ids=tokens.repeat(rows),
        values=torch.linspace(-1, 1, rows * _BIASES, device=device),
    )
    penalties = Penalties(
        slots, *(torch.full((rows,), value, device=device) for value in _PENALTIES)
    )
    # The tables as torch would store them.
    seen = torch.zeros(rows, vocab, dtype=torch.bool, device=device).scatter_(1, said, True)
    ones = torch.ones_like(outputs, dtype=torch.int32)
    produced = torch.zeros_like(counts.output_counts).scatter_add_(1, outputs, ones)
    entries = (slots.long().repeat_interleave(_BIASES), bias.token_ids.long())
    form = partial(_torch_penalties, logits, entries, bias.values, seen, produced, penalties)
    return Work(
        ours=partial(adjust_logits, logits, bias, penalties, counts),
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
    penalties: Penalties,
) -> None:
    logits.index_put_(entries, values, accumulate=True)
    repetition = penalties.repetition[:, None]
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, penalised, logits))
    logits.sub_(penalties.frequency[:, None] * produced)
    logits.sub_(penalties.presence[:, None] * (produced > 0))


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
            name=f"logprobs {LLAMA.label} {rows}",
            build=_logprobs,
            shape={"rows": rows, "vocab": LLAMA.vocab},
            tiny={"rows": 3, "vocab": 300},
            compile=rows == 64,
        )
        for rows in (64, 256, 1)
    ),
]
