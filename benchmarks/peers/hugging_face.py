"""transformers behind the protocol: `generate`, with the draft as its assistant model."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.protocol import Job, Output, Prompts, serve


class HuggingFace:
    """Models in bf16; the only form that this peer is asked for."""

    def __init__(self, job: Job) -> None:
        if job.form != "bf16":
            raise ValueError(f"transformers is measured in bf16 only, not in {job.form}")
        torch.set_num_threads(job.threads)
        self._target = _load(job.target)
        self._draft = None if job.draft is None else _load(job.draft)
        if self._draft is not None:
            # K is constant: neither adapted to the acceptance nor cut by confidence.
            given = self._draft.generation_config
            given.num_assistant_tokens = job.num_speculative_tokens
            given.num_assistant_tokens_schedule = "constant"
            given.assistant_confidence_threshold = 0.0
        self._passes = 0
        self._target.register_forward_pre_hook(self._count)
        self.facts: dict[str, Any] = {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__}
        }

    def generate(self, prompts: Prompts, num_tokens: int) -> Output:
        ids = torch.tensor(prompts)
        self._passes = 0
        with torch.inference_mode():
            output = self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
                assistant_model=self._draft,
            )
        tokens = output[:, ids.shape[1] :].tolist()
        return Output(tokens=tokens, al=num_tokens / self._passes if self._draft else None)

    def _count(self, *_: object) -> None:
        self._passes += 1


def _load(checkpoint: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)


if __name__ == "__main__":
    serve(HuggingFace)
