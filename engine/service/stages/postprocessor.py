"""The detokenizer stage: from the engine's chunks of tokens to the output tensors of a response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.prompt_logprobs import positions
from engine.protocol import NULL_LOGPROBS, Chunk, DetokenizerInput, RequestStats, TokenLogprobs
from engine.service.link import DetokenizerEnd, ForgedMessageError
from engine.service.outputs import Array, chunk_tensors, prompt_logprobs_in, strings
from engine.service.stages.preprocessor import load_tokenizer
from engine.text.detokenizer import Detokenizer
from engine.text.section_format import SectionFormat
from engine.text.section_reader import SectionReader
from engine.text.tokenizer import Tokenizer
from engine.token_ids import unpack_token_ids

_LEAST_LOGPROB = -9999.0  # JSON has no infinity

Figure = Callable[[RequestStats, int], float]  # of a sequence, and the size of its KV blocks
_FIGURES: dict[str, Figure] = {
    "num_cached_tokens": lambda stats, _: stats.num_cached_tokens,
    "kv_cache_reused_blocks": lambda stats, block_size: stats.num_cached_tokens // block_size,
    "arrival_time_ns": lambda stats, _: stats.arrival_time * 1e9,
    "first_scheduled_time_ns": lambda stats, _: stats.first_scheduled_time * 1e9,
    "first_token_time_ns": lambda stats, _: stats.first_token_time * 1e9,
    "last_token_time_ns": lambda stats, _: stats.finished_time * 1e9,
}

_DECODER = msgspec.msgpack.Decoder(DetokenizerInput)
_NOT_OURS = "detokenizer_input: is for the responses of the engine; call the model ensemble"


def decode_message(data: memoryview, link: DetokenizerEnd) -> DetokenizerInput:
    """Return what the engine sent to the detokenizer; nothing is decoded that it did not make.

    Raises:
        RequestError: the engine stub of this server did not make the message.
    """
    try:
        return _DECODER.decode(link.open(data))
    except ForgedMessageError:
        raise RequestError(_NOT_OURS) from None


class Postprocessor:
    """Turns tokens into text. Keeps no state between responses."""

    def __init__(
        self, tokenizer: Tokenizer, section_format: SectionFormat, block_size: int
    ) -> None:
        """`block_size` is the engine's, in tokens."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._sections = SectionReader(self._detokenizer, section_format)
        self._block_size = block_size

    @classmethod
    def from_config(cls, config: EngineConfig) -> Postprocessor:
        """Load the tokenizer that `config` names; raises `TridentError` if it cannot be loaded."""
        tokenizer = load_tokenizer(config)
        section_format = SectionFormat(tokenizer, config.reasoning_parser, config.tool_call_parser)
        return cls(tokenizer, section_format, config.block_size)

    def __call__(self, message: DetokenizerInput) -> dict[str, Array]:
        """Return the output tensors: `text_output`, and what else was asked for.

        Each has one element per chunk; `output_log_probs` one per token, chunk after chunk.
        """
        chunks, wanted = message.chunks, message.outputs
        outputs = {
            "text_output": strings(
                [self._text(chunk, message.skip_special_tokens) for chunk in chunks]
            ),
            **chunk_tensors(chunks, wanted),
        }
        for name in wanted:
            if name == "num_input_tokens":
                outputs[name] = np.array([message.num_prompt_tokens], dtype=np.int32)
            elif name == "logprobs":
                outputs[name] = strings([self._logprobs(chunk) for chunk in chunks])
            elif name == "sections":
                skip = message.skip_special_tokens
                outputs[name] = strings([self._sections_of(chunk, skip) for chunk in chunks])
            elif name == "prompt_logprobs":
                outputs.update(self._prompt_logprobs(chunks))
            elif name == NULL_LOGPROBS:
                outputs.setdefault("logprobs", strings(["null"] * len(chunks)))
            elif name in _FIGURES and any(chunk.details.stats is not None for chunk in chunks):
                outputs[name] = self._figures(chunks, _FIGURES[name])
        return outputs

    def _text(self, chunk: Chunk, skip_special_tokens: bool) -> str:
        return chunk.text_prefix + self._detokenizer.text(
            _decodable("window_ids", chunk.window_ids),
            _decodable("token_ids", chunk.token_ids),
            chunk.details,
            skip_special_tokens=skip_special_tokens,
        )

    def _sections_of(self, chunk: Chunk, skip_special_tokens: bool) -> str:
        """Return JSON: the parts of `Section`s in the text."""
        sections = self._sections.read(
            unpack_token_ids(chunk.window_ids).tolist(),
            unpack_token_ids(chunk.token_ids).tolist(),
            chunk.details,
            skip_special_tokens=skip_special_tokens,
        )
        return msgspec.json.encode(sections).decode()

    def _logprobs(self, chunk: Chunk) -> str:
        """Return JSON: per new token, `{token_id: {logprob, rank, decoded_token}}`."""
        positions = [self._position(position) for position in chunk.details.logprobs or []]
        return msgspec.json.encode(positions).decode()

    def _prompt_logprobs(self, chunks: list[Chunk]) -> dict[str, Array]:
        """Return the output `prompt_logprobs`, if it is due: JSON, `null` and as in `logprobs`."""
        found = prompt_logprobs_in(chunks)
        if found is None:
            return {}
        entries = [None, *map(self._position, positions(found))]
        return {"prompt_logprobs": strings([msgspec.json.encode(entries).decode()])}

    def _position(self, position: TokenLogprobs) -> dict[str, dict[str, Any]]:
        entries = zip(position.token_ids, position.logprobs, position.ranks, strict=True)
        return {
            str(token_id): {
                "logprob": max(logprob, _LEAST_LOGPROB),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in entries
        }

    def _figures(self, chunks: list[Chunk], figure: Figure) -> Array:
        """Return one figure of the sequences that have finished; 0 for others."""
        stats = [chunk.details.stats for chunk in chunks]
        values = [0 if each is None else int(figure(each, self._block_size)) for each in stats]
        return np.array(values, dtype=np.int64)


def _decodable(field: str, data: bytes) -> list[int]:
    """Return packed token ids as the list that the tokenizer library takes.

    Raises:
        RequestError: they are not whole, or one is negative; the text names `field`.
    """
    ids: list[int] = unpack_token_ids(data, field).tolist()
    if ids and min(ids) < 0:  # of few ids, sooner found here than by NumPy
        raise RequestError(f"{field}: token id {min(ids)} is negative")
    return ids
