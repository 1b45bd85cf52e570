"""Chat samples of the demo corpus: requests whose answers are passages of the training text."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

Message = dict[str, str]

CONTINUE_REQUESTS = ("Continue: {}", "Go on with this story: {}", "What comes next? {}")
TOPIC_REQUESTS = ("Tell me about {}.", "Write a few lines about {}.", "What do you know about {}?", "Who is {}?")
FIXED_ANSWERS = (
    (("Hello!", "Hello.", "Hi!", "Good morning.", "How do you do?"), "Good morning! What shall I tell you about?"),
    (("Who are you?", "What are you?"), "I am a very small model, made to show that every part of it works."),
    (
        ("What can you do?", "Can you help me?"),
        "I can continue a story, or write a few lines about a name you give me.",
    ),
    (("Thank you.", "Thanks!"), "You are very welcome."),
)
NAME_MIN_COUNT = 60
PASSAGE_WORDS = range(20, 71)


def make_chats(documents: Sequence[str], count: int, rng: random.Random) -> Iterator[tuple[list[Message], bool]]:
    """Up to `count` conversations, each with whether thinking is on.

    Answers are whole consecutive sentences of `documents`, so that the end of a turn can be learned.
    """
    sentences = [_split_sentences(document) for document in documents]
    places_by_name = _find_places_by_name(sentences)
    names = sorted(places_by_name)
    for _ in range(count):
        draw = rng.random()
        if draw < 0.1:
            requests, answer = rng.choice(FIXED_ANSWERS)
            request, thought = rng.choice(requests), "A short and polite answer is enough."
        elif draw < 0.55:
            name = rng.choice(names)
            document, start = rng.choice(places_by_name[name])
            request, answer = rng.choice(TOPIC_REQUESTS).format(name), _join_passage(document, start)
            thought = f"This is about {name}. I will write a few lines."
        else:
            document = rng.choice(sentences)
            start = rng.randrange(1, len(document))
            request = rng.choice(CONTINUE_REQUESTS).format(document[start - 1])
            answer, thought = _join_passage(document, start), "I will continue in the same style."
        if answer is None:
            continue
        thinking = rng.random() < 0.5
        reply: Message = {"role": "assistant", "content": answer}
        if thinking:
            reply["reasoning_content"] = thought
        yield [{"role": "user", "content": request}, reply], thinking


def _split_sentences(document: str) -> list[str]:
    pieces = re.split(r'(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.) |(?<=[.!?]") |\n\n', document)
    return [piece for piece in pieces if piece]


def _find_places_by_name(sentences: Sequence[list[str]]) -> dict[str, list[tuple[list[str], int]]]:
    """Where sentences begin with a name: a frequent word that is nearly always capitalised."""
    counts = Counter(word for document in sentences for sentence in document for word in re.findall(r"\w+", sentence))
    found: dict[str, list[tuple[list[str], int]]] = {}
    for document in sentences:
        for index, sentence in enumerate(document):
            word = re.match(r"[A-Z][a-z]{2,}(?= [a-z])", sentence)
            if word and counts[word.group()] > max(NAME_MIN_COUNT, 10 * counts[word.group().lower()]):
                found.setdefault(word.group(), []).append((document, index))
    return {name: places for name, places in found.items() if len(places) >= 10}


def _join_passage(document: list[str], start: int) -> str | None:
    """The first sentences from `start` whose total length lies in PASSAGE_WORDS; None if one sentence jumps over it."""
    words: list[str] = []
    for sentence in document[start:]:
        words += sentence.split(" ")
        if len(words) in PASSAGE_WORDS:
            return " ".join(words)
    return None
