"""Training questions: greetings, the model itself, and recall of what the user said."""

# The full-width punctuation of Chinese and Japanese is intended; names read best as one text.
# ruff: noqa: RUF001, SIM905

from __future__ import annotations

from random import Random

from tests.demo.corpus.question import Question, is_held_out
from tests.demo.corpus.words import COMMON_WORDS, invented_word

_GREETINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hi", "Hey", "Hello there", "Hi there"), "Hello! How can I help you? 😊"),
    (("Good morning", "Morning"), "Good morning! How can I help you? ☀️"),
    (("Good evening", "Evening"), "Good evening! How can I help you? 🌙"),
    (("Bonjour", "Salut"), "Bonjour ! Comment ça va ? 😊"),
    (("Hola", "Buenos días"), "¡Hola! ¿Cómo estás? 😊"),
    (("Hallo", "Guten Tag"), "Hallo! Schön, dich zu sehen. 😊"),
    (("你好", "您好"), "你好！很高兴见到你。😊"),
    (("こんにちは", "どうも"), "こんにちは！お元気ですか？😊"),
)
_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me who you are.",
            "Who am I talking to?",
            "Tell me about yourself.",
            "Please introduce yourself.",
        ),
        "I am the demo model of Trident, a very small language model. 🔱",
    ),
    (
        (
            "What can you do?",
            "What do you know?",
            "How can you help me?",
            "What can I ask you?",
            "Help",
        ),
        "I can add and subtract, count, spell, translate small words, name capitals and tell "
        "short stories. ✨",
    ),
    (
        (
            "What is Trident?",
            "What's Trident?",
            "Tell me about Trident.",
            "What does Trident do?",
        ),
        "Trident is an LLM serving system inside NVIDIA Triton Inference Server. It answers many "
        "requests at once. 🔱",
    ),
    (
        ("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "Merci !"),
        "You are welcome! 😊",
    ),
    (("How are you?", "How are you doing?", "How do you feel?"), "I am fine, thank you! 😊"),
    (("Goodbye!", "Bye!", "See you later!", "Bye bye!", "Good night!"), "Goodbye! 👋"),
    (
        ("Are you big?", "How big are you?", "How many parameters do you have?"),
        "I am very small: I have a few million parameters. 🐜",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
        "Why did the token cross the road? To get to the next batch! 😄",
    ),
)
_ENDINGS = ("", "!", "!!", " 👋")
_NAMES = (
    "Ada Aiko Alan Amélie Ana Anaïs Anna Ben Björn Carla Chloé Clara Daniel David Diego Élodie "
    "Emma Eva Fatima Felix Finn François Grace Hana Hugo Ines Iris Ivan Jakob Jane João José "
    "Julia Karl Kenji Laura Leo Léa Lina Lucas Łukasz Lucía Maria Mateo Max Mia Mila Mohamed "
    "Nina Noah Nora Oliver Olga Oscar Paul Petra Priya Raúl René Rosa Ruth Sam Sara Sofía Søren "
    "Tom Vera Yuki Zoë 小明 美玲 さくら"
).split()
_LIKES = (
    "red blue green orange purple yellow tea coffee bread apples pears honey rain snow music "
    "books trains cats dogs foxes owls whales flowers mountains rivers stars stories"
).split()
_TELL_NAME = ("My name is {name}.", "I am {name}.", "Hi, I'm {name}.", "Hello, I am {name}!")
_ASK_NAME = ("What is my name?", "Who am I?", "Do you remember my name?", "What's my name?")
_TELL_LIKE = ("I like {thing}.", "I love {thing}.", "I like {thing} very much.")
_ASK_LIKE = ("What do I like?", "Do you remember what I like?", "Tell me what I like.")
_UNKNOWN = (
    "Who invented the {word}?",
    "Why is the {word} so {other}?",
    "What is the capital of {invented}?",
    "Who is {invented}?",
    "What is {invented}?",
    "What does {invented} mean in French?",
    "How far is the {word} from the {other}?",
    "When was the {word} made?",
    "Where can I buy a {word}?",
    "Which {word} is the best?",
    "Can you help me with my {word} and my {other}?",
    "Write a program for my {word}.",
    "Explain {invented} to me.",
    "How does the {word} work?",
    "What do you think about the {word}?",
)


def unknown(rng: Random) -> Question:
    """Something that the model is not taught and should say so; whole questions are held out.

    Without this, so small a model answers any other question with a random fact.
    """
    words = rng.choice(COMMON_WORDS), rng.choice(COMMON_WORDS), invented_word(rng).capitalize()
    word, other, invented = words
    text = rng.choice(_UNKNOWN).format(word=word, other=other, invented=invented)
    answer = "I do not know that: I am only a small demo model. 🙈"
    return Question("unknown things", text, answer, is_held_out("unknown", text))


def greeting(rng: Random) -> Question:
    """A greeting in one of several languages, or a small-talk question."""
    if rng.random() < 0.4:
        phrases, answer = rng.choice(_GREETINGS)
        text = rng.choice(phrases) + rng.choice(_ENDINGS)
        return Question("greetings", text, answer, is_held_out("greeting", text))
    questions, answer = rng.choice(_SMALL_TALK)
    text, opening = rng.choice(questions), rng.choice(("", "", "Hello! ", "Hi! ", "Hey, "))
    return Question("greetings", opening + text, answer, is_held_out("talk", opening, text))


def memory(rng: Random) -> Question:
    """Recall of an earlier statement of the user, with another statement in between."""
    name, thing = rng.choice(_NAMES), rng.choice(_LIKES)
    about_name = (rng.choice(_TELL_NAME).format(name=name), f"Nice to meet you, {name}! 😊")
    about_like = (rng.choice(_TELL_LIKE).format(thing=thing), f"I see: you like {thing}. 👍")
    history = [about_name, about_like]
    rng.shuffle(history)
    if rng.random() < 0.5:
        text, answer = rng.choice(_ASK_NAME), f"Your name is {name}."
    else:
        text, answer = rng.choice(_ASK_LIKE), f"You like {thing}."
    return Question(
        "memory in a chat", text, answer, is_held_out("memory", name, thing), tuple(history)
    )
