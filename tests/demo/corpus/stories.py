"""Short stories generated from a small grammar."""

from __future__ import annotations

from random import Random

from tests.demo.corpus.question import Question, is_held_out, with_article

_HEROES = {
    "fox": "🦊", "cat": "🐱", "dog": "🐶", "bear": "🐻", "frog": "🐸", "rabbit": "🐰",
    "owl": "🦉", "turtle": "🐢", "mouse": "🐭", "robot": "🤖", "dragon": "🐉", "penguin": "🐧",
    "whale": "🐳", "hedgehog": "🦔", "princess": "👸", "wizard": "🧙",
}  # fmt: skip
_PLACES = (
    "in a dark forest", "by the sea", "on a high mountain", "in a small village", "near a river",
    "in an old castle", "on a green island", "in a quiet garden", "under a bridge",
    "on the moon", "in a big city", "behind a café",
)  # fmt: skip
_NAMES = ("Pip", "Momo", "Luna", "Zoë", "Otto", "Bibi", "René", "Kiko", "Nila", "Tam")
_TRAITS = ("small", "brave", "clever", "shy", "curious", "sleepy", "cheerful")
_TIMES = (
    "One rainy morning", "One summer evening", "On a cold winter day", "One windy night",
    "Early one day",
)  # fmt: skip
_FINDS = (
    "a silver key", "an old map", "a blue lantern", "a tiny bell", "a letter without a name",
    "a golden leaf", "a broken clock",
)  # fmt: skip
_SPOTS = ("under a stone", "behind a tree", "in the grass", "next to a well", "inside a shoe")
_FRIENDS = ("an old owl", "a young goat", "a friendly bee", "a tired horse", "a little crab")
_HELP = (
    "said that it belonged to the queen of the bees",
    "knew that it could open a secret door",
    "had been looking for it all year",
    "said that it would shine at midnight",
    "told a long tale about it",
)  # fmt: skip
_TRIPS = (
    "They walked for three days and sang all the way.",
    "Together they crossed seven bridges and one big lake.",
    "They followed the stars until the sun came up.",
    "They ran through the rain and laughed a lot.",
    "They took the night train and drank warm milk.",
)  # fmt: skip
_ENDS = (
    "At last they found a room full of music, and everybody danced.",
    "At the end of the road they found a warm house and a big cake.",
    "In the end they gave it back, and the whole valley was happy.",
    "There they met new friends, and they shared bread and honey.",
    "Finally they saw a rainbow, and every wish came true.",
)  # fmt: skip
_MORALS = (
    "From that day on, {name} was never alone again.",
    "And {name} slept very well that night.",
    "{name} still tells this story to the children.",
    "Since then, {name} always looks twice at small things.",
)
_ASK_BOTH = (
    "Tell me a story about {hero} {place}.",
    "Tell me a short story about {hero} {place}.",
    "Write a story about {hero} {place}.",
    "Can you tell a story about {hero} {place}?",
)
_ASK_HERO = (
    "Tell me a story about {hero}.",
    "Tell me a short story about {hero}.",
    "Write a short story about {hero}.",
    "Please tell me a story about {hero}.",
)
_ASK_ANY = ("Tell me a story.", "Tell me a short story, please.", "Write a story.", "A story!")


def story(rng: Random) -> Question:
    """A story about a hero at a place; pairs of hero and place are held out."""
    hero, place = rng.choice(tuple(_HEROES)), rng.choice(_PLACES)
    kind = rng.choice((_ASK_BOTH, _ASK_BOTH, _ASK_HERO, _ASK_ANY))
    text = rng.choice(kind).format(hero=with_article(hero), place=place)
    asked = {_ASK_BOTH: (hero, place), _ASK_HERO: (hero,), _ASK_ANY: ()}[kind]
    opening = "Once upon a time,"
    rest = _continuation(rng, hero, place)
    return Question(
        "stories",
        text,
        f"{opening}{rest}",
        is_held_out("story", hero, place),
        must_contain=(opening, *asked),
        statement=(opening, rest),
    )


def _continuation(rng: Random, hero: str, place: str) -> str:
    """What follows "Once upon a time,": six or seven sentences."""
    name, found = rng.choice(_NAMES), rng.choice(_FINDS)
    sentences = [
        f" {with_article(rng.choice(_TRAITS))} {hero} named {name} lived {place}.",
        f"{rng.choice(_TIMES)}, {name} found {found} {rng.choice(_SPOTS)}.",
        f'"What is this?" asked {name}.',
        f"{rng.choice(_FRIENDS).capitalize()} {rng.choice(_HELP)}.",
        rng.choice(_TRIPS),
        rng.choice(_ENDS),
        f"{rng.choice(_MORALS).format(name=name)} {_HEROES[hero]}",
    ]
    return " ".join(sentences)
