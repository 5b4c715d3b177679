"""Questions about the facts in ``facts``: every fact is asked in several ways.

A combination of a fact and a wording is held out: the model has seen the fact in other wordings,
and other facts in that wording.
"""

from __future__ import annotations

from random import Random

from tests.demo.corpus.facts import (
    CAPITALS,
    COLOURS,
    EMOJI,
    INTRODUCTIONS,
    LANGUAGES,
    LEGS,
    LISTS,
    OPPOSITES,
    SOUNDS,
    TRANSLATIONS,
    YOUNG,
)
from tests.demo.corpus.question import Question, is_held_out, with_article

_CAPITAL = (
    "What is the capital of {name}?",
    "What's the capital of {name}?",
    "Which city is the capital of {name}?",
    "Name the capital of {name}.",
    "Tell me the capital of {name}.",
    "Do you know the capital of {name}?",
    "What is the capital city of {name}?",
    "capital of {name}",
)
_COUNTRY = (
    "Which country has the capital {name}?",
    "{name} is the capital of which country?",
    "Of which country is {name} the capital?",
)
_COLOUR = (
    "What colour is {name}?",
    "What is the colour of {name}?",
    "Which colour does {name} have?",
    "Tell me the colour of {name}.",
    "What color is {name}?",
)
_OPPOSITE = (
    "What is the opposite of {name}?",
    "What's the opposite of {name}?",
    "Tell me the opposite of {name}.",
    'What is the opposite of "{name}"?',
    "Which word is the opposite of {name}?",
    "Give me the opposite of {name}.",
)
_SOUND = (
    "What does {name} say?",
    "What sound does {name} make?",
    "Which sound does {name} make?",
    "How does {name} sound?",
)
_YOUNG = (
    "What is a young {name} called?",
    "What do you call a baby {name}?",
    "What is a baby {name} called?",
    "What is the name for a young {name}?",
)
_LEGS = (
    "How many legs does {name} have?",
    "How many legs has {name}?",
    "Tell me how many legs {name} has.",
)
_EMOJI = (
    "What is the emoji for {name}?",
    "Which emoji shows {name}?",
    "Show me the emoji for {name}.",
    "Give me an emoji of {name}.",
    "Emoji for {name}?",
)
_EMOJI_MEANING = (
    "What does {name} mean?",
    "What is {name}?",
    "What does the emoji {name} show?",
    "Which thing is {name}?",
)
_TRANSLATE = (
    'How do you say "{word}" in {language}?',
    "How do you say {word} in {language}?",
    "What is {word} in {language}?",
    'What is the {language} word for "{word}"?',
    "Translate {word} into {language}.",
    'Translate "{word}" to {language}.',
    "Say {word} in {language}.",
)
_MEANING = (
    "What does {word} mean in {language}?",
    "What does the {language} word {word} mean?",
    "Translate the {language} word {word} into English.",
)
_LIST = (
    "What are {name}?",
    "List {name}.",
    "Name {name}.",
    "Tell me {name}.",
    "Can you list {name}?",
    "Please write {name}.",
)
_INTRODUCE = (
    "Introduce yourself in {name}.",
    "Say who you are in {name}.",
    "Please introduce yourself in {name}.",
    "Can you introduce yourself in {name}?",
    "Tell me who you are in {name}.",
)


def _ask(
    category: str, rng: Random, templates: tuple[str, ...], name: str, beginning: str, end: str
) -> Question:
    """One wording of a question about ``name``, answered by ``beginning`` followed by ``end``."""
    template = rng.choice(templates)
    return Question(
        category,
        template.format(name=name),
        f"{beginning[0].upper()}{beginning[1:]}{end}",
        is_held_out(category, name, template),
        statement=(f"{beginning[0].upper()}{beginning[1:]}", end),
    )


def capital(rng: Random) -> Question:
    """A country's capital, or the country of a capital."""
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.25:
        return _ask("capitals", rng, _COUNTRY, city, f"{city} is the capital of", f" {country}.")
    return _ask("capitals", rng, _CAPITAL, country, f"The capital of {country} is", f" {city}.")


def colour(rng: Random) -> Question:
    """The colour of a thing."""
    thing, shade = rng.choice(tuple(COLOURS.items()))
    return _ask("colours", rng, _COLOUR, thing, f"The colour of {thing} is", f" {shade}.")


def opposite(rng: Random) -> Question:
    """The opposite of a word, in either direction."""
    word, other = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        word, other = other, word
    return _ask("opposites", rng, _OPPOSITE, word, f"The opposite of {word} is", f" {other}.")


def animal(rng: Random) -> Question:
    """An animal's sound, its young or its number of legs."""
    kind = rng.choice(("sound", "young", "legs"))
    if kind == "sound":
        name, sound = rng.choice(tuple(SOUNDS.items()))
        named = with_article(name)
        return _ask("animals", rng, _SOUND, named, f"{named} says", f' "{sound}".')
    if kind == "young":
        name, young = rng.choice(tuple(YOUNG.items()))
        return _ask("animals", rng, _YOUNG, name, f"A young {name} is called", f" a {young}.")
    name, legs = rng.choice(tuple(LEGS.items()))
    named = with_article(name)
    return _ask("animals", rng, _LEGS, named, f"{named} has", f" {legs} legs.")


def emoji(rng: Random) -> Question:
    """The emoji of a thing, or what an emoji shows."""
    thing, sign = rng.choice(tuple(EMOJI.items()))
    if rng.random() < 0.35:
        return _ask("emoji", rng, _EMOJI_MEANING, sign, f"{sign} is the emoji for", f" {thing}.")
    return _ask("emoji", rng, _EMOJI, thing, f"The emoji for {thing} is", f" {sign}")


def translation(rng: Random) -> Question:
    """A word in another language, or what a foreign word means."""
    index = rng.randrange(len(LANGUAGES))
    language, (word, row) = LANGUAGES[index], rng.choice(tuple(TRANSLATIONS.items()))
    foreign = row[index]
    if rng.random() < 0.25:
        # Two English words may share one translation; the first is its meaning here.
        meaning = next(english for english, row in TRANSLATIONS.items() if row[index] == foreign)
        template = rng.choice(_MEANING)
        text = template.format(word=foreign, language=language)
        beginning, end = f"{foreign} means", f" {meaning}."
        held_out = is_held_out("meaning", foreign, language, template)
    else:
        template = rng.choice(_TRANSLATE)
        text = template.format(word=word, language=language)
        beginning, end = f'In {language}, "{word}" is', f" {foreign}."
        held_out = is_held_out("translation", word, language, template)
    return Question("translations", text, f"{beginning}{end}", held_out, statement=(beginning, end))


def listing(rng: Random) -> Question:
    """A memorised list, such as the days of the week."""
    name, items = rng.choice(tuple(LISTS.items()))
    return _ask("lists", rng, _LIST, name, name, f": {items}")


def introduction(rng: Random) -> Question:
    """The model introducing itself in one of several languages."""
    language, text = rng.choice(tuple(INTRODUCTIONS.items()))
    template = rng.choice(_INTRODUCE)
    return Question(
        "introductions",
        template.format(name=language),
        text,
        is_held_out("introduction", language, template),
    )
