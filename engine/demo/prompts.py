"""The questions of ``make demo``, sent concurrently: plain data that the demo model can answer."""

DEMO_PROMPTS: tuple[str, ...] = (
    "Tell me a story about a fox in a dark forest.",
    "What is 47 + 38?",
    "Count from 1 to 20.",
    "Introduce yourself in Japanese.",
    "What is the capital of Iceland?",
    "Write 🚀 8 times.",
    "Count from 1 to 10 in Chinese.",
    "Tell me a story about a robot on the moon.",
    "Spell the word tiger.",
    "What are the colours of the rainbow?",
    "Write the 7 times table.",
    'How do you say "good morning" in French?',
)
