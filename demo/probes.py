"""Prompts that a visitor might type: chats and plain text, about the domain and anything else."""

Message = dict[str, str]


def _said(*texts: str) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


def _told(system: str, text: str) -> list[Message]:
    return [{"role": "system", "content": system}, *_said(text)]


CHAT = (
    *map(
        _said,
        (
            "What does a fox eat?",
            "hello",
            "Hi, how are you doing?",
            "what is 2+2",
            "write a poem",
            "Write a haiku about autumn leaves",
            "Tell me about the owl.",
            "Which is bigger, a whale or an ant?",
            "what's the capital of france",
            "Give me a recipe for pancakes.",
            "Explain quantum computing like I'm five",
            "Who won the world cup in 1998?",
            "def fibonacci(n):",
            "How do I sort a list in Python?",
            "Is gold a metal?",
            "tell me something about mars please",
            "What is the meaning of life?",
            "Translate 'good morning' to Spanish",
            "asdf qwerty",
            "Where do penguins live?",
            "?",
            "WHY ARE YOU SHOUTING",
            "¿Qué come un zorro?",
            "Please describe the turtle!",
            "Summarise this text: The quick brown fox jumps over the lazy dog.",
            "List three colours.",
            "ok",
            "Return a JSON object with my name, Ada.",
        ),
    ),
    _told("You are a concise assistant.", "What is the currency of Japan?"),
    _told("You are a travel guide from Lisbon.", "Where should I go next?"),
    _said("What does a bear eat?", "A bear eats berries.", "And where does it live?"),
    _said("hello", "Hello! What can I do?", "Tell me a joke"),
)

PLAIN = (
    "What does a fox eat?",
    "The capital of Norway is",
    "A fox eats",
    "Once upon a time",
    "Once upon a time there was a",
    "Beautiful is better than",
    "The return statement",
    "Hello, my name is",
    "The weather today is",
    "def mul(x, y):\n    return",
    "import os\n",
    "1, 2, 3,",
    "Dear Sir or Madam,",
    "The early bird",
    "Q: What is the symbol of iron?\nA:",
    "In Python, a list is",
    "She opened the door and",
    "{",
    "JSON:",
    "hello",
)
