"""The demo model's byte-level BPE tokenizer and its chat format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def turn_opening(role: str) -> str:
    """The text before a turn's content, as in the chat template."""
    return f"{TURN_START}{role}\n"


TURN_CLOSING = f"{TURN_END}\n"
"""The text after a turn's content; the same as the chat template writes."""


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int, context_length: int
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``vocabulary_size`` tokens, trained on ``texts``.

    Every digit is a separate token, as arithmetic can only be learned digit by digit. The byte
    alphabet covers all text; rare characters are split into several byte tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


def stop_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The stop token ids: end of a turn, and end of a plain text."""
    stops: Sequence[str] = (TURN_END, END_OF_TEXT)
    return [int(tokenizer.convert_tokens_to_ids(stop)) for stop in stops]
