"""Requests that want the tokenizer alone: text or messages to tokens, and tokens to text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.service.outputs import strings
from engine.service.stages.preprocessor import Preprocessor
from engine.service.tensors import InputReader, Tensors
from engine.text.chat_parameters import ChatParameters
from engine.validation.limits import MAX_PROMPT_TOKENS


def tokenize_tensors(tensors: Tensors, preprocess: Preprocessor) -> dict[str, NDArray[Any]] | None:
    """Return the answer to a request with `tokenize` or `detokenize`; None if it has neither.

    Raises:
        RequestError: it is wrong; the text names the input.
    """
    inputs = InputReader(tensors)
    if inputs.boolean("tokenize"):
        return _tokenize(inputs, preprocess)
    if inputs.boolean("detokenize"):
        if "input_ids" not in inputs:
            raise RequestError("is missing", param="input_ids")
        ids = inputs.token_ids("input_ids", MAX_PROMPT_TOKENS)
        return {"text": strings([preprocess.detokenize(ids)])}
    return None


def _tokenize(inputs: InputReader, preprocess: Preprocessor) -> dict[str, NDArray[Any]]:
    text, messages = inputs.string("text_input"), inputs.string("messages")
    if (text is None) == (messages is None):
        raise RequestError("needs either text_input or messages", param="tokenize")
    ids = preprocess.tokenize(
        text,
        messages,
        ChatParameters.parse(inputs.string("chat_parameters") or ""),
        add_special_tokens=inputs.boolean("add_special_tokens"),
    )
    return {
        "input_ids": ids,
        "token_texts": strings(preprocess.token_texts(ids)),
        "max_model_len": np.array([preprocess.max_model_len], dtype=np.int32),
    }
