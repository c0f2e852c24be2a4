"""Make ckptkit/serving/data/tasks.jsonl: numbers to copy and to count on from, for ``verify --serve --eval tasks``.

    python scripts/generate_tasks.py

The first five lines are the examples that every question begins with, as in GSM8K.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

OUT = Path(__file__).parents[1] / "ckptkit" / "serving" / "data" / "tasks.jsonl"
COUNT = 25
DIGITS = range(2, 7)


def copying(draw: random.Random) -> tuple[str, int]:
    digits = draw.choice(DIGITS)
    number = draw.randrange(10 ** (digits - 1), 10**digits)
    return f"Copy the number {number}.", number


def counting(draw: random.Random) -> tuple[str, int]:
    first = draw.randrange(1, 400)
    shown = ", ".join(map(str, range(first, first + 5)))
    return f"What comes next: {shown}?", first + 5


def main() -> None:
    draw = random.Random(6)
    tasks = [(copying, counting)[at % 2](draw) for at in range(COUNT)]
    lines = [json.dumps({"question": question, "answer": str(answer)}) for question, answer in tasks]
    OUT.write_text("".join(f"{line}\n" for line in lines), "utf-8")


if __name__ == "__main__":
    main()
