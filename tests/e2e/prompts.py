"""Twenty prompts for the real model: English, code, Chinese, one of one token, one of hundreds."""

from __future__ import annotations

# More tokens than the budget of a step in the tests that use it.
LONG = " ".join(
    f"Chapter {number}. The {creature} crossed the {place} and met nobody."
    for number, (creature, place) in enumerate(
        (creature, place)
        for creature in ("fox", "heron", "otter", "badger")
        for place in ("river", "bridge", "frozen lake", "old railway")
    )
)
ONE_TOKEN = "The"

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a land far away, there lived",
    "Water boils at a temperature of",
    "To be, or not to be, that is",
    "The three primary colours are red,",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "Q: What is the largest planet of the solar system?\nA:",
    "Recipe for pancakes\n\nIngredients:\n- 2 eggs\n-",
    "1, 1, 2, 3, 5, 8, 13,",
    "The opposite of hot is cold. The opposite of up is",
    "def fibonacci(n):\n    ",
    'import json\n\nwith open("data.json") as file:\n    data =',
    "SELECT name, COUNT(*) FROM orders GROUP BY",
    "#include <stdio.h>\n\nint main(void) {\n    printf(",
    "<html>\n  <head>\n    <title>",
    "中国的首都是",
    "你好,请介绍一下你自己。",
    "<|im_start|>user\nName a river in Germany.<|im_end|>\n<|im_start|>assistant\n",
    ONE_TOKEN,
    LONG,
)
