"""The detokenizer stage: from the engine's chunks of tokens to the output tensors of a response."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.checkpoint.hub import resolve_checkpoint
from engine.config.engine_config import EngineConfig
from engine.errors import RequestError
from engine.protocol.messages import NULL_LOGPROBS, Chunk, DetokenizerInput, TokenLogprobs
from engine.protocol.prompt_logprobs import positions
from engine.protocol.token_ids import unpack_token_ids
from engine.service.link import DetokenizerEnd, ForgedMessageError
from engine.service.outputs import Array, prompt_logprobs_in, strings
from engine.text.detokenizer import Detokenizer
from engine.text.load_tokenizer import load_tokenizer
from engine.text.output_parsing.chunk_parser import ChunkParser
from engine.text.output_parsing.parser_spec import ParserSpec
from engine.text.tokenizer import Tokenizer

_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_LEAST_LOGPROB = -9999.0  # JSON has no infinity

_DECODER = msgspec.msgpack.Decoder(DetokenizerInput)
_NOT_OURS = "detokenizer_input: is set by the engine stage; call the ensemble model"


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

    def __init__(self, tokenizer: Tokenizer, parser_spec: ParserSpec) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._chunk_parser = ChunkParser(self._detokenizer, parser_spec)

    @classmethod
    def from_config(cls, config: EngineConfig, tokenizer: Tokenizer | None = None) -> Postprocessor:
        """Load the tokenizer that `config` names, unless `tokenizer` is it.

        Raises `TridentError` if it cannot be loaded.
        """
        tokenizer = tokenizer or load_tokenizer(
            config, resolve_checkpoint(config.model, weights=False)
        )
        parser_spec = ParserSpec(tokenizer, config.reasoning_parser, config.tool_call_parser)
        return cls(tokenizer, parser_spec)

    def __call__(self, message: DetokenizerInput) -> dict[str, Array]:
        """Return `text_output`, with one element per chunk, and what else needs a tokenizer."""
        chunks, skip = message.chunks, message.skip_special_tokens
        outputs = {"text_output": strings([self._text(chunk, skip) for chunk in chunks])}
        for name in message.outputs:
            if name == "logprobs":
                outputs[name] = strings([self._logprobs(chunk) for chunk in chunks])
            elif name == "sections":
                outputs[name] = strings([self._parsed_json(chunk, skip) for chunk in chunks])
            elif name == "prompt_logprobs":
                outputs.update(self._prompt_logprobs(chunks))
            elif name == NULL_LOGPROBS:
                outputs.setdefault("logprobs", strings(["null"] * len(chunks)))
        return outputs

    def _text(self, chunk: Chunk, skip_special_tokens: bool) -> str:
        return chunk.text_prefix + self._detokenizer.text(
            _decodable("window_ids", chunk.window_ids),
            _decodable("token_ids", chunk.token_ids),
            chunk.details,
            skip_special_tokens=skip_special_tokens,
        )

    def _parsed_json(self, chunk: Chunk, skip_special_tokens: bool) -> str:
        """Return JSON: the parts of `Section`s in the text."""
        parsed = self._chunk_parser.read(
            unpack_token_ids(chunk.window_ids).tolist(),
            unpack_token_ids(chunk.token_ids).tolist(),
            chunk.details,
            skip_special_tokens=skip_special_tokens,
        )
        return msgspec.json.encode(parsed).decode()

    def _logprobs(self, chunk: Chunk) -> str:
        """Return JSON: per new token, `{token_id: {logprob, rank, decoded_token}}`.

        A token that is a part of a character has its `bytes` too, which its text does not show.
        """
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
                **self._told(token_id),
            }
            for token_id, logprob, rank in entries
        }

    def _told(self, token_id: int) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        if _PART_OF_A_CHARACTER in text:
            raw = self._detokenizer.token_bytes(token_id)
            if raw is not None:
                return {"decoded_token": text, "bytes": list(raw)}
        return {"decoded_token": text}


def _decodable(field: str, data: bytes) -> list[int]:
    """Return packed token ids as the list that the tokenizer library takes.

    Raises:
        RequestError: they are not whole, or one is negative; the text names `field`.
    """
    ids: list[int] = unpack_token_ids(data, field).tolist()
    if ids and min(ids) < 0:  # of few ids, sooner found here than by NumPy
        raise RequestError(f"token id {min(ids)} is negative", param=field)
    return ids
