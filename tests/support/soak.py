"""Traffic for long runs: random requests, consumers that go away, and what must hold of every answer and at the end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_parity import REFERENCE_BOUND

from qwen4exp_trt.runtime import LLM, AsyncLLM, SamplingParams
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.outputs import StreamChunk
from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence

LIMITS: dict[str, int] = {"max_batch_size": 24, "max_seq_len": 64, "prefill_chunk": 16, "block_size": 4}
NUM_BLOCKS = 84
"""A full batch of the longest sequences would take 384 pages, so sequences are preempted."""
CLIENTS = 64


@dataclass(frozen=True)
class Request:
    """What a client asks for, and when it goes away: after so many tokens, 0 for at once, None for never."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    leaves_after: int | None = None
    aborts: bool = False
    """Whether a client that leaves says so by `abort`, or just stops to read."""


@dataclass
class Answer:
    """What came of a request; ``finish_reason`` is None where the client left."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0

    def add(self, chunk: StreamChunk) -> None:
        self.token_ids += chunk.token_ids
        self.text += chunk.text
        self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        if chunk.metrics is not None:
            self.num_preemptions = chunk.metrics.num_preemptions


class Workload:
    """An endless stream of requests by a seed. Prompts begin with a few common texts, cut at random places."""

    def __init__(self, text: Sequence[int], vocab_size: int, stop_strings: Sequence[str], seed: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size, self._stop_strings = vocab_size, stop_strings
        self._texts = [list(text[start : start + 64]) for start in range(0, 12 * 200, 200)]

    def __iter__(self) -> Iterator[Request]:
        while True:
            yield self._next()

    def _next(self) -> Request:
        rng = self._rng
        prompt = rng.choice(self._texts)[: rng.choice((rng.randint(1, 12), rng.randint(1, 44)))]
        if rng.random() < 0.5:
            prompt = prompt + [rng.randrange(self._vocab_size) for _ in range(rng.randint(1, 8))]
        leaves_after = rng.randint(0, 4) if rng.random() < 0.15 else None
        return Request(tuple(prompt), self._params(), rng.choice((0, 0, 0, -1, 1, 5)), leaves_after, rng.random() < 0.5)

    def _params(self) -> SamplingParams:
        rng = self._rng
        sampled: dict[str, Any] = {"temperature": 0.0}
        if rng.random() < 0.35:
            sampled = {
                "temperature": rng.choice((0.5, 1.0)),
                "top_p": rng.choice((0.9, 1.0)),
                "seed": rng.randrange(2**32),
            }
        if rng.random() < 0.1:
            sampled["presence_penalty"] = 0.5
        return SamplingParams(
            **sampled,
            max_tokens=rng.choice((1, 2, 3, 4, 6, 8, 20)),
            stop=rng.sample(self._stop_strings, 2) if rng.random() < 0.4 else None,
            ignore_eos=rng.random() < 0.2,
            logprobs=rng.choice((None, None, None, 0, 2)),
        )


async def serve_async(llm: AsyncLLM, requests: Sequence[Request], open_at_once: int) -> list[Answer]:
    """Answers in the order of the requests, ``open_at_once`` clients at a time."""
    gate = asyncio.Semaphore(open_at_once)

    async def client(number: int, request: Request) -> Answer:
        async with gate:
            return await _consume(llm, f"soak-{number}", request)

    return list(await asyncio.gather(*(client(number, request) for number, request in enumerate(requests))))


async def _consume(llm: AsyncLLM, request_id: str, request: Request) -> Answer:
    answer = Answer(request)
    prompt = {"prompt_token_ids": request.prompt_token_ids}
    stream = llm.generate(prompt, request.params, request_id=request_id, priority=request.priority)
    if request.leaves_after == 0:
        task = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return answer
    async for chunk in stream:
        answer.add(chunk)
        leaves = request.leaves_after is not None and len(answer.token_ids) >= request.leaves_after
        if leaves and not (request.aborts and llm.abort(request_id)):
            break
    await stream.aclose()
    return answer


def serve_threads(llm: LLM, requests: Sequence[Request], num_threads: int) -> list[Answer]:
    """Answers in the order of the requests, of threads that each stream one request after another."""
    answers = [Answer(request) for request in requests]
    failures: list[BaseException] = []

    def client(first: int) -> None:
        try:
            for answer in answers[first::num_threads]:
                _read(llm, answer)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(first,)) for first in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return answers


def _read(llm: LLM, answer: Answer) -> None:
    request = answer.request
    stream = llm.stream({"prompt_token_ids": request.prompt_token_ids}, request.params)
    if request.leaves_after == 0:
        stream.close()
        return
    for chunk in stream:
        answer.add(chunk)
        if request.leaves_after is not None and len(answer.token_ids) >= request.leaves_after:
            break
    stream.close()


class Referee:
    """Judges answers by a second `LLM` of the same bundle that serves one request after another, and keeps nothing."""

    def __init__(self, bundle: Path) -> None:
        self.llm = LLM(bundle, enable_prefix_caching=False)
        self.verdicts: Counter[str] = Counter()

    def check(self, answer: Answer, exact_samples: bool) -> None:
        """Hold an answer to the one that its request has alone, the tokens of a client that left to the first of them.

        Greedy tokens may differ where the best two tie within rounding. Sampled tokens are those of the seed, which
        drafts change: then ``exact_samples`` is false.
        """
        request = answer.request
        if not request.params.is_greedy and not exact_samples:
            self.verdicts["sampled, not compared"] += 1
            return
        expected = self.llm.generate({"prompt_token_ids": request.prompt_token_ids}, request.params)[0].outputs[0]
        if answer.finish_reason in (None, "abort"):
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)] or self._tie(answer, expected), (
                answer
            )
            self.verdicts["client left"] += 1
            return
        got = (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason)
        wanted = (expected.token_ids, expected.text, expected.finish_reason, expected.stop_reason)
        assert got == wanted or self._tie(answer, expected), (answer, wanted)
        self.verdicts[f"{expected.finish_reason} {'greedy' if request.params.is_greedy else 'sampled'}"] += 1

    def _tie(self, answer: Answer, expected: Any) -> bool:
        """Whether the first token that differs is as good as the expected one within rounding."""
        pairs = list(zip(answer.token_ids, expected.token_ids, strict=False))
        place = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), None)
        if place is None or not answer.request.params.is_greedy:
            return False
        logits = self.llm.score([*answer.request.prompt_token_ids, *expected.token_ids[:place]])[-1]
        lost = logits[expected.token_ids[place]] - logits[answer.token_ids[place]]
        self.verdicts["tie"] += 1
        return float(lost.abs()) <= REFERENCE_BOUND * float(logits.abs().max())


@dataclass
class Service:
    """An `LLM` or `AsyncLLM` under traffic, and what it must look like when nobody asks anything of it."""

    llm: LLM | AsyncLLM

    @property
    def core(self) -> EngineCore:
        return (self.llm._llm if isinstance(self.llm, AsyncLLM) else self.llm).core

    def serve(self, requests: Sequence[Request], clients: int) -> list[Answer]:
        """Answers in the order of the requests, with so many clients at a time."""
        if isinstance(self.llm, LLM):
            return serve_threads(self.llm, requests, clients)
        return asyncio.run(serve_async(self.llm, requests, clients))

    def check_idle(self) -> None:
        """Nothing is left of requests that have ended but what the prefix cache keeps of their prompts."""
        scheduler = self.core.scheduler
        with self.core.lock:
            assert scheduler.num_unfinished == 0
            assert scheduler.num_free_slots == self.core.limits.num_slots
            most = scheduler.max_num_seqs + 2  # the scheduler still knows those of the last step
        assert (count := live_sequences()) <= most, count

    def check_pages(self) -> None:
        """The prefix cache gives back every page that is in use."""
        with self.core.lock:
            self.core.prefix_cache.evict(self.core.scheduler.num_blocks)
            assert self.core.scheduler.num_free_blocks == self.core.scheduler.num_blocks

    def count(self, name: str) -> float:
        """The sum of a counter over its labels."""
        found = [metric for metric in self.core.metrics.collect() if metric.name == f"qwen4exp_{name}"]
        assert len(found) == 1, name
        return sum(sample.value for sample in found[0].samples if isinstance(sample.value, int | float))


def resident_bytes() -> int:
    """Of this process, without what malloc keeps of freed memory, in an arena for each of many threads."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def live_sequences() -> int:
    """Sequences that something still refers to."""
    gc.collect()
    return sum(type(thing) is RequestSequence for thing in gc.get_objects())
