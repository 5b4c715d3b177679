"""Limits on the size of one request, for every field that a client sends.

Each is far above what applications send, and low enough that a request at the limit delays the
engine's next step by less than 50 ms and takes at most some tens of MB. Other fields are bounded by
their type, by `max_model_len` or by the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.errors import ContextLengthError, RequestError

MAX_SEQUENCES = 256  # `n`, `best_of`
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10  # in either direction; beyond it a score would leave the range of a float

# `stop` and `bad_words`. The search for stop strings takes 300 bytes per character, and bad words
# are tokenised in the engine's loop: 1 us per character.
MAX_WORDS = 256
MAX_WORD_CHARACTERS = 1024
MAX_WORDS_CHARACTERS = 8192  # of all words of a list together

# Lists of token ids, applied to the logits in each step.
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 16384

MAX_ABSOLUTE_LOGIT_BIAS = 100.0  # OpenAI's

MAX_DRY_TOKENS = 2**15  # that `dry_penalty_last_n` reaches back
# `dry_sequence_breakers`; as many characters as llama.cpp reads.
MAX_DRY_BREAKERS = 32
MAX_DRY_BREAKER_CHARACTERS = 40

MAX_LOGITS_PROCESSORS = 8

MAX_SAMPLING_FIELDS = 64  # of a JSON object or the request parameters; there are about 40
MAX_SAMPLING_CHARACTERS = 2**19
MAX_CHAT_CHARACTERS = 2**21  # of `chat_parameters`; real sets of tools have 100 KB
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_REQUEST_ID_CHARACTERS = 256
MAX_CACHE_SALT_CHARACTERS = 1024
MAX_TENANT_CHARACTERS = 256

# Prompt tokens of all sequences of a request: each sequence has its own block table.
MAX_PROMPT_TOKENS = 2**22
# Output tokens of all sequences of a request.
MAX_OUTPUT_TOKENS = 2**22
# Log-probabilities in a response that is not streamed, which the detokenizer turns into text.
MAX_LOGPROBS_AT_ONCE = 2**18
# The prompt before the text of each sequence, with `exclude_input_in_output: false`.
MAX_PREFIX_BYTES = 2**24
# A token is 2 to 5 characters of text; only long repetitions exceed this on average.
_CHARACTERS_PER_TOKEN = 8
_MIN_CHARACTERS = 2**16
_ESCAPE_CHARACTERS = 6  # "\\u00e9" in JSON for one


def max_prompt_characters(max_model_len: int) -> int:
    """Return how many characters a prompt may have before it is tokenised."""
    return max(_CHARACTERS_PER_TOKEN * max_model_len, _MIN_CHARACTERS)


def check_messages_json(text: str, max_model_len: int) -> None:
    """Raise `RequestError` if the JSON of chat messages is too large to be parsed.

    Each parsed value takes at least a token in the prompt, and a comma before it.
    """
    limit = _ESCAPE_CHARACTERS * max_prompt_characters(max_model_len)
    check_size("messages", len(text), limit, "characters")
    check_size("messages", text.count(","), max(2 * max_model_len, 2**14), "commas")


def check_size(field: str, size: int, limit: int, unit: str) -> None:
    """Raise `RequestError`, naming `field`, if `size` of `unit`s exceeds `limit`."""
    if size > limit:
        raise RequestError(f"has {size} {unit}; at most {limit} are allowed", param=field)


def check_words(field: str, words: Collection[str]) -> None:
    """Raise `RequestError`, naming `field`, if there are too many words or too long ones."""
    check_size(field, len(words), MAX_WORDS, "strings")
    check_size(field, max(map(len, words), default=0), MAX_WORD_CHARACTERS, "characters in one")
    check_size(field, sum(map(len, words)), MAX_WORDS_CHARACTERS, "characters in all")


def check_cache_salt(value: object) -> str:
    """Return a valid `cache_salt` of a request.

    Raises:
        RequestError: it is not a string, is empty, too long, or not valid Unicode.
    """
    return _check_name("cache_salt", value, MAX_CACHE_SALT_CHARACTERS)


def check_tenant(value: object) -> str:
    """Return a valid `tenant` of a request; raises as `check_cache_salt`."""
    return _check_name("tenant", value, MAX_TENANT_CHARACTERS)


def check_tenant_key(value: object) -> str:
    """Return the `tenant_key` of a request, whatever it is; raises as `check_cache_salt`."""
    return _check_name("tenant_key", value, MAX_TENANT_CHARACTERS)


def _check_name(field: str, value: object, max_characters: int) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError("must be a non-empty string", param=field)
    check_size(field, len(value), max_characters, "characters")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("is not valid Unicode", param=field) from None
    return value


def check_length(
    field: str, num_prompt_tokens: int, max_tokens: int | None, max_model_len: int
) -> None:
    """Check that prompt and output fit; `max_tokens` None means what is left.

    Raises:
        ContextLengthError: naming `field`, the lengths and the limit.
    """
    if num_prompt_tokens >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens; max_model_len is "
            f"{max_model_len}, of which the output needs at least one",
            param=field,
            num_tokens=num_prompt_tokens,
            max_model_len=max_model_len,
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > max_model_len:
        raise ContextLengthError(
            f"{max_tokens} and the {num_prompt_tokens} tokens of {field} exceed "
            f"max_model_len ({max_model_len})",
            param="max_tokens",
        )
