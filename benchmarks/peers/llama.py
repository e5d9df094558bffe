"""llama.cpp behind the protocol, by the C interface that llama-cpp-python has.

Drafting is a loop of this file, since the Python package has none with a draft model: K greedy
passes of the draft, one pass of the target over all guesses, and the caches cut back. Only argmax
and this bookkeeping are Python. A job's form is Q8_0 for int8 and Q4_0, head included, for int4;
checkpoints that are GGUF files are taken as they are.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.protocol import Job, Output, Prompts, serve

_FORMS = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


@dataclass(frozen=True)
class Row:
    """A token of a request at a position; `wanted` where its argmax is."""

    token: int
    position: int
    request: int
    wanted: bool = True


class Network:
    """A model and its cache."""

    def __init__(self, file: Path, job: Job) -> None:
        model = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), model)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        given = llama_cpp.llama_context_default_params()
        room = -(-job.max_tokens // 256) * 256 * job.max_batch
        given.n_ctx = given.n_batch = room
        given.n_seq_max = job.max_batch
        given.n_threads = given.n_threads_batch = job.threads
        self._context = llama_cpp.llama_init_from_model(self._model, given)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no context of {room} tokens for {file}")
        self._size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(room, 0, 1)
        self._memory = llama_cpp.llama_get_memory(self._context)

    def argmax(self, rows: Sequence[Row]) -> list[int]:
        """Run rows; the likeliest tokens after those that are wanted, in their order."""
        batch = self._batch
        for place, row in enumerate(rows):
            batch.token[place], batch.pos[place] = row.token, row.position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row.request
            batch.logits[place] = row.wanted
        batch.n_tokens = len(rows)
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode says {status}")
        return [self._best(place) for place, row in enumerate(rows) if row.wanted]

    def cut(self, request: int, length: int) -> None:
        """Forget a request's tokens from position `length` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, request, length, -1)

    def clear(self) -> None:
        """Forget all requests."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def _best(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, (self._size,)).argmax())


@dataclass
class Request:
    """A prompt that is being continued.

    Attributes:
        known: prompt and output.
        seen: how many of them the draft has in its cache.
    """

    number: int
    known: list[int]
    seen: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def last(self) -> Row:
        """The last known token, which neither network has seen."""
        return Row(self.known[-1], len(self.known) - 1, self.number)


class Llama:
    """A target, and a draft that may be missing."""

    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        if job.draft is not None:
            self._draft = Network(converted(job, job.draft), job)
        self._target = Network(converted(job, job.target), job)
        self._k = job.num_speculative_tokens if job.draft else 0
        system: bytes = llama_cpp.llama_print_system_info()
        self.facts: dict[str, Any] = {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "build": system.decode().strip(),
        }

    def generate(self, prompts: Prompts, num_tokens: int) -> Output:
        requests = [Request(number, list(prompt)) for number, prompt in enumerate(prompts)]
        ends = [len(request.known) + num_tokens for request in requests]
        self._target.clear()
        if self._k:
            self._draft.clear()
        self._read_prompts(requests)
        drafts = accepted = 0
        while live := [one for one in requests if len(one.known) < ends[one.number]]:
            self._propose(live)
            accepted += self._verify(live)
            drafts += len(live)
        tokens = [
            request.known[len(prompt) :][:num_tokens]
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        return Output(tokens=tokens, al=1 + accepted / drafts if self._k and drafts else None)

    def _read_prompts(self, requests: Sequence[Request]) -> None:
        rows = [
            Row(token, position, request.number, position + 1 == len(request.known))
            for request in requests
            for position, token in enumerate(request.known)
        ]
        for request, token in zip(requests, self._target.argmax(rows), strict=True):
            request.known.append(token)

    def _propose(self, live: Sequence[Request]) -> None:
        """K guesses for each request, one pass each."""
        for request in live:
            request.draft = []
        for step in range(self._k):
            rows = []
            for request in live:
                unseen = [*request.known, *request.draft][request.seen :]
                places = range(request.seen, request.seen + len(unseen))
                last = len(request.known) + step - 1
                rows += [
                    Row(token, place, request.number, place == last)
                    for token, place in zip(unseen, places, strict=True)
                ]
                request.seen += len(unseen)
            for request, token in zip(live, self._draft.argmax(rows), strict=True):
                request.draft.append(token)

    def _verify(self, live: Sequence[Request]) -> int:
        """One pass of the target over all guesses; how many of them it takes."""
        rows = []
        for request in live:
            start = len(request.known)
            guesses = enumerate(request.draft, start)
            rows += [
                request.last,
                *(Row(token, place, request.number) for place, token in guesses),
            ]
        best = iter(self._target.argmax(rows))
        total = 0
        for request in live:
            own = [next(best) for _ in range(len(request.draft) + 1)]
            pairs = zip(request.draft, own, strict=False)
            taken = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
            taken = len(request.draft) if taken is None else taken
            request.known += own[: taken + 1]
            total += taken
            self._cut(request)
        return total

    def _cut(self, request: Request) -> None:
        """Take refused guesses out of both caches; the last known token is in neither."""
        length = len(request.known) - 1
        if self._k:
            self._target.cut(request.number, length)
            request.seen = min(request.seen, length)
            self._draft.cut(request.number, request.seen)


def converted(job: Job, checkpoint: str) -> Path:
    """The file of a checkpoint in a form; `prepare` writes it where it is none."""
    if checkpoint.endswith(".gguf"):
        return Path(checkpoint)
    return Path(job.work) / "gguf" / f"{Path(checkpoint).name}-{job.form}.gguf"


def prepare(job: Job) -> None:
    """Convert what is not yet converted, rounding the file in bf16."""
    for checkpoint in job.checkpoints:
        if converted(job, checkpoint) == Path(checkpoint):
            continue
        # What is there already is measured without the package that writes such files.
        from benchmarks.peers.gguf_file import write_gguf

        whole = converted(job, checkpoint).with_name(f"{Path(checkpoint).name}-bf16.gguf")
        whole.parent.mkdir(parents=True, exist_ok=True)
        if not whole.exists():
            write_gguf(Path(checkpoint), whole)
        if job.form != "bf16" and not converted(job, checkpoint).exists():
            _round(whole, converted(job, checkpoint), job)


def _round(source: Path, file: Path, job: Job) -> None:
    given = llama_cpp.llama_model_quantize_default_params()
    given.ftype = _FORMS[job.form]
    given.nthread = job.threads
    given.pure = True  # or the head would have 6 bits where the rest has 4
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(file).encode(), ctypes.byref(given)
    )
    if status:
        raise RuntimeError(f"llama_model_quantize says {status} for {source}")


if __name__ == "__main__":
    serve(Llama, prepare)
