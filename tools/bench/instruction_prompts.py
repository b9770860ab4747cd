"""Prompts to train a drafter with where no others are at hand: tasks times subjects.

    python -m octavo.tools.bench.instruction_prompts 2000 > prompts.txt
    python -m octavo.tools.bench.instruction_prompts 20 --held-out > held_out.txt

The held-out ones are about subjects that no other is about.
"""

from __future__ import annotations

import argparse
import itertools
import random

TASKS = (
    "Explain {} to a ten-year-old.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Give step-by-step advice for somebody who begins with {}.",
    "Write a letter to a friend about {}.",
    "Summarise in one paragraph what is important about {}.",
    "Compare {} with something similar.",
    "What questions would an expert ask about {}?",
    "Write a dialogue between two people who disagree about {}.",
    "Describe {} for a travel guide.",
    "Write a poem about {}.",
    "Why do people care about {}?",
    "What is a common mistake when it comes to {}, and how is it avoided?",
    "Write an introduction to an essay about {}.",
    "How has {} changed over the last hundred years?",
    "Invent a product that has to do with {} and advertise it.",
    "Plan a lesson of one hour about {}.",
    "Write a Python function that has to do with {} and explain it.",
    "Give three examples of {} in everyday life.",
)
SUBJECTS = (
    "rivers", "bread", "electricity", "chess", "honesty", "bicycles", "the moon", "volcanoes",
    "gardening", "music theory", "the water cycle", "trains", "public libraries", "sleep",
    "coffee", "the internet", "dinosaurs", "photography", "democracy", "swimming", "recycling",
    "bees", "clocks", "lighthouses", "mathematics", "friendship", "weather forecasts", "cheese",
    "football", "space travel", "painting", "insurance", "earthquakes", "dogs", "languages",
    "the heart", "bridges", "solar panels", "mountains", "letters", "sorting numbers", "maps",
    "vaccines", "cities", "robots", "the stock market", "winter", "tea", "operating systems",
    "theatre", "forests", "money", "glass", "running", "databases", "whales", "newspapers",
    "the Renaissance", "rice", "jazz", "carpentry", "school", "prime numbers", "migration",
    "paper", "deserts", "cooking", "elections", "gravity", "museums", "patience", "ships",
    "the brain", "spiders", "salt", "camping", "novels", "search engines", "islands", "time zones",
    "knitting", "antibiotics", "castles", "remote work", "rainbows", "the alphabet", "tigers",
    "parliaments", "puzzles", "oceans", "steel", "podcasts", "farming", "sundials", "encryption",
    "birthdays", "noise", "compost", "juggling", "harbours",
)  # fmt: skip
HELD_OUT = (
    "windmills", "violins", "queues", "the printing press", "snow", "hospitals", "kites",
    "astronomy", "markets", "soup", "tunnels", "handwriting", "parrots", "elevators", "fog",
)  # fmt: skip


def prompts(count: int, *, held_out: bool = False) -> list[str]:
    """The same ones for the same count, in a mixed order."""
    subjects = HELD_OUT if held_out else SUBJECTS
    every = [task.format(subject) for task, subject in itertools.product(TASKS, subjects)]
    random.Random(0).shuffle(every)
    return every[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--held-out", action="store_true")
    arguments = parser.parse_args()
    print("\n".join(prompts(arguments.count, held_out=arguments.held_out)))


if __name__ == "__main__":
    main()
