"""The prompts that the offline API takes, in vLLM's forms: texts, token ids, conversations."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from engine.errors import ContextLengthError, RequestError, UnknownParameterError
from engine.protocol.token_ids import TokenIds
from engine.request.sampling_params import SamplingParams
from engine.text import chat_template
from engine.text.chat_parameters import ChatParameters
from engine.text.tokenizer import Tokenizer
from engine.validation.limits import check_cache_salt

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_Ids = TypeVar("_Ids", list[int], TokenIds)

_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """One prompt.

    Attributes:
        text: None if it came as token ids alone.
        cache_salt: only prompts with the same one share cached prefixes; "" is one, too.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: str


def tokenized(
    tokenizer: Tokenizer, prompts: Prompt | Sequence[Prompt], cache_salt: str | None
) -> list[TokenizedPrompt]:
    """Return one prompt or several, each a text, token ids, or an object with one of these.

    Args:
        cache_salt: of prompts that bring none.

    Raises:
        RequestError: with the field of what is no prompt.
    """
    return [
        _tokenized(tokenizer, prompt, cache_salt, f"prompts.{index}")
        for index, prompt in enumerate(_as_list(prompts))
    ]


def truncated(token_ids: _Ids, params: SamplingParams, max_model_len: int) -> _Ids:
    """Return what `truncate_prompt_tokens` leaves of a prompt: its end.

    Raises:
        ContextLengthError: it is to be what `max_tokens` leaves, and that is nothing.
    """
    limit = params.truncate_prompt_tokens
    if limit == -1:
        num_outputs = 1 if params.return_embedding else max(1, params.max_tokens or 1)
        limit = max_model_len - num_outputs
        if limit < 1:
            raise ContextLengthError(
                f"-1 leaves no token of the prompt: max_tokens is {num_outputs}, and max_model_len "
                f"{max_model_len}; lower max_tokens",
                param="truncate_prompt_tokens",
            )
    return token_ids if limit is None else token_ids[-limit:]


def cut(
    prompts: Sequence[TokenizedPrompt], params: Sequence[SamplingParams], max_model_len: int
) -> list[TokenizedPrompt]:
    """Return prompts as `truncate_prompt_tokens` leaves them; the text stays whole."""
    pairs = zip(prompts, params, strict=True)
    return [replace(p, token_ids=truncated(p.token_ids, s, max_model_len)) for p, s in pairs]


def rendered(
    tokenizer: Tokenizer,
    messages: Messages | Sequence[Messages],
    parameters: ChatParameters,
    cache_salt: str | None,
) -> list[TokenizedPrompt]:
    """Return the prompts that the chat template makes of one conversation or several.

    Raises:
        RequestError: a conversation is malformed, or there is no template.
        CheckpointError: the template is broken.
    """
    # What is no list at all is one conversation: `check_messages` reports what it must be.
    is_one = not _is_list(messages) or any(isinstance(each, Mapping) for each in messages[:1])
    texts = [
        chat_template.render_text(
            tokenizer,
            chat_template.check_messages(list(each) if _is_list(each) else each),
            parameters,
        )
        for each in ([messages] if is_one else messages)
    ]
    salt = _salt(cache_salt)
    # A chat template writes the special tokens itself.
    return [
        TokenizedPrompt(text, tokenizer.encode(text, add_special_tokens=False), salt)
        for text in texts
    ]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise _no_prompt("prompts")
    many = list(prompts)
    if many and all(isinstance(token_id, int) for token_id in many):
        return [cast(list[int], many)]
    return cast(list[Prompt], many)


def _tokenized(
    tokenizer: Tokenizer, prompt: Prompt, cache_salt: str | None, param: str
) -> TokenizedPrompt:
    if not isinstance(prompt, Mapping):
        name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        prompt = {name: prompt}
    given = {name: value for name, value in prompt.items() if value is not None}
    for name in given.keys() - set(_FIELDS):
        raise UnknownParameterError("unknown field", param=f"{param}.{name}")
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if not isinstance(text, str | None) or (text is None and token_ids is None):
        raise _no_prompt(param)
    if token_ids is None:
        token_ids = tokenizer.encode(cast(str, text))
    else:  # the text beside them is for the output
        token_ids = _integers(token_ids, param)
    return TokenizedPrompt(text, token_ids, _salt(given.get("cache_salt", cache_salt)))


def _integers(token_ids: Sequence[int], param: str) -> list[int]:
    if isinstance(token_ids, bytes):  # a text that is not decoded, and no token ids
        raise _no_prompt(param)
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError:
        raise _no_prompt(param) from None


def _no_prompt(param: str) -> RequestError:
    return RequestError(
        "must be a string, a list of token ids, or an object with one of them", param=param
    )


def _salt(cache_salt: str | None) -> str:
    return "" if cache_salt is None else check_cache_salt(cache_salt)
