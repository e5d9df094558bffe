"""This project's engine behind the protocol.

Options of a job: quantization, where the form alone does not say which; draft_vocab_size and
draft_vocab_text, as in `speculative_config`; engine, further options of `LLM`.
"""

import importlib
from typing import Any

import torch

from benchmarks.peers.protocol import Job, Output, Prompts, serve
from slipstream import LLM, SamplingParams
from slipstream.engine.prompts import TokensPrompt
from slipstream.kernels.registry import kernels_for

KV_BYTES = 256 << 20


class Ours:
    """An `LLM` that keeps no prompt, so that a prompt may come again."""

    def __init__(self, job: Job) -> None:
        self._llm = LLM(
            job.target,
            speculative_config=_speculation(job),
            quantization=_quantization(job),
            device="cpu",
            threads=job.threads,
            max_num_seqs=job.max_batch,
            max_model_len=job.max_tokens,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            **{"kv_cache_memory": KV_BYTES, **job.options.get("engine", {})},
        )
        self.facts: dict[str, Any] = {"kernels": _kernels(), "kv_bytes": KV_BYTES}

    def generate(self, prompts: Prompts, num_tokens: int) -> Output:
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        )
        drafts = sum(output.metrics.num_drafts for output in outputs)
        accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        return Output(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            al=1 + accepted / drafts if drafts else None,
        )


def _kernels() -> str:
    """The column that serves the CPU, and of the C++ one its level of instructions."""
    column = kernels_for(torch.device("cpu")).network.backend
    if column != "cpu":
        return column
    return f"{column} ({importlib.import_module('_slipstream_cpu').level()})"


def _speculation(job: Job) -> dict[str, Any] | None:
    if job.draft is None:
        return None
    given = {
        "model": job.draft,
        "num_speculative_tokens": job.num_speculative_tokens,
        "quantization": _quantization(job),
        "draft_vocab_size": job.options.get("draft_vocab_size"),
        "draft_vocab_text": job.options.get("draft_vocab_text"),
    }
    return {key: value for key, value in given.items() if value is not None}


def _quantization(job: Job) -> str | None:
    named: str = job.options.get("quantization", job.form)
    return None if named == "bf16" else named


if __name__ == "__main__":
    serve(Ours)
