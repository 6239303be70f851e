"""Twenty prompts for greedy comparison: prose, questions, lists, code, other scripts; ten as text, ten as chats."""

from __future__ import annotations

from octavo.text.tokenizer import Tokenizer

COMPLETIONS = (
    "The lighthouse keeper counted the ships every evening, and",
    "Water boils at a lower temperature on a mountain because",
    "def moving_average(values, window):\n",
    "Ingredients for a simple vegetable soup:\n1.",
    "SELECT customer_id, SUM(total) FROM orders",
    "In 1869 the last spike was driven and",
    "La bibliothèque ferme à dix-huit heures, mais",
    "#include <vector>\n\n// Returns the index of the largest element, or -1 if the vector is empty.\nint ",
    "Once the frost had gone, the gardener began to",
    "Monday: 12 degrees, rain. Tuesday: 15 degrees, clouds. Wednesday:",
)

CHATS = (
    "What is the difference between weather and climate?",
    "Write a Python function that reverses the words of a sentence.",
    "Name three rivers in Europe and the seas they flow into.",
    "Explain to a child why the moon changes its shape.",
    "Translate to German: The train leaves at seven in the morning.",
    "How do I find the largest files in a directory on Linux?",
    "Give me a haiku about autumn rain.",
    "A farmer has 17 sheep and buys 8 more, then sells 5. How many are left?",
    "你好，请介绍一下你自己。",
    "List the steps to change a bicycle tyre. 🚲",
)


def encoded(tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
    """(the prompt, its token ids) for all twenty."""
    plain = [(text, tokenizer.encode(text)) for text in COMPLETIONS]
    chats = [(text, tokenizer.apply_chat_template([{"role": "user", "content": text}])) for text in CHATS]
    return plain + chats
