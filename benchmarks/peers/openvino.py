"""openvino-genai behind the protocol; optimum-intel converts the checkpoints.

Options of a job: hint, the precision to compute in, "bf16" or "f32".
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.protocol import Job, Output, Prompts, serve

# How optimum-cli is told of a form. Untold it keeps that of the checkpoint, if that is small; where
# layers have 4 bits, embedding and head have 8.
_EXPORT = {
    "bf16": [],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"],
}
_CACHE_GB = 1


class OpenVino:
    """A pipeline over its paged cache, which has no cached prefixes, and at times a draft."""

    def __init__(self, job: Job) -> None:
        device: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads}
        if "hint" in job.options:
            device["INFERENCE_PRECISION_HINT"] = job.options["hint"]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = job.max_batch
        scheduler.cache_size = _CACHE_GB
        drafting = {}
        if job.draft is not None:
            draft = str(converted(job, job.draft))
            drafting["draft_model"] = openvino_genai.draft_model(draft, "CPU", **device)
        target = str(converted(job, job.target))
        self._pipeline = openvino_genai.LLMPipeline(
            target, "CPU", scheduler_config=scheduler, **drafting, **device
        )
        self._k = job.num_speculative_tokens if job.draft else 0
        self.facts: dict[str, Any] = {"versions": {"openvino-genai": openvino_genai.__version__}}

    def generate(self, prompts: Prompts, num_tokens: int) -> Output:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._k:
            config.num_assistant_tokens = self._k
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        result = self._pipeline.generate(inputs, config)
        tokens = [list(row) for row in result.tokens]
        return Output(tokens=tokens, al=self._acceptance_length(result))

    def _acceptance_length(self, result: Any) -> float | None:
        """Every pass of the target gives one token that no draft had."""
        if not self._k:
            return None
        metrics = result.extended_perf_metrics
        tokens: int = metrics.main_model_metrics.get_num_generated_tokens()
        accepted: int = metrics.get_num_accepted_tokens()
        return tokens / max(1, tokens - accepted)


def converted(job: Job, checkpoint: str) -> Path:
    """The folder of a checkpoint in a form; `prepare` fills it."""
    return Path(job.work) / "openvino" / f"{Path(checkpoint).name}-{job.form}"


def prepare(job: Job) -> None:
    """Convert what is not yet converted."""
    for checkpoint in job.checkpoints:
        folder = converted(job, checkpoint)
        if (folder / "openvino_model.bin").exists():
            continue
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino"]
        command += ["--model", checkpoint, "--task", "text-generation-with-past"]
        subprocess.run([*command, *_EXPORT[job.form], str(folder)], check=True)
        if job.form == "bf16":
            _require_whole(folder, Path(checkpoint))


def _require_whole(folder: Path, checkpoint: Path) -> None:
    """optimum-cli rounds large models to 8 bits by itself."""
    written = (folder / "openvino_model.bin").stat().st_size
    read = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    if written < 0.9 * read:
        raise RuntimeError(f"{checkpoint} of {read} bytes became {written}: it was rounded")


if __name__ == "__main__":
    serve(OpenVino, prepare)
