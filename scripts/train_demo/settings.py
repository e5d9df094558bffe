"""Every number the training run depends on, in one place."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(3)


@dataclass(frozen=True)
class Shape:
    """The dimensions of one Qwen3-style network."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 64
    vocabulary: int = 4096
    context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def hugging_face_config(self) -> dict[str, Any]:
        """The ``config.json`` that makes transformers build the same network."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "initializer_range": 0.02,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": END_OF_TEXT_ID,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Plan:
    """One training run. Step counts of zero mean: as many as fit into the minutes."""

    target: Shape
    draft: Shape
    seed: int = 20
    held_out_per_mille: int = 12
    chat_share: float = 0.13
    tokenizer_bytes: int = 80_000_000
    max_files: int = 0
    window: int = 2048
    batch_tokens: int = 131_072
    minutes_target: float = 7.5
    minutes_draft: float = 4.5
    steps_target: int = 0
    steps_draft: int = 0
    matrix_rate: float = 0.02
    matrix_decay: float = 0.02
    other_rate: float = 4e-3
    warmup: int = 100
    cooldown: float = 0.5
    distill_row: int = 512
    distill_rows_per_round: int = 8192
    distill_rounds: int = 10
    distill_own_share: float = 0.6
    distill_argmax_weight: float = 0.3
    evaluation_prompts: int = 384
    evaluation_new_tokens: int = 128
    draft_tokens: int = 4
    compile: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain JSON-ready values."""
        return dataclasses.asdict(self)


def full_plan() -> Plan:
    """The plan behind the shipped weights."""
    return Plan(
        target=Shape(width=384, layers=6, heads=6, kv_heads=2, ffn=1152),
        draft=Shape(width=128, layers=4, heads=2, kv_heads=1, ffn=384),
    )


def tiny_plan() -> Plan:
    """A plan that goes through every step on a CPU within a minute; its models are useless."""
    return Plan(
        target=Shape(width=64, layers=2, heads=2, kv_heads=1, ffn=128, head_dim=32, vocabulary=512),
        draft=Shape(width=32, layers=1, heads=1, kv_heads=1, ffn=64, head_dim=32, vocabulary=512),
        held_out_per_mille=60,
        tokenizer_bytes=500_000,
        max_files=120,
        window=256,
        batch_tokens=1024,
        steps_target=25,
        steps_draft=15,
        warmup=5,
        distill_row=128,
        distill_rows_per_round=8,
        distill_rounds=2,
        evaluation_prompts=12,
        evaluation_new_tokens=24,
        compile=False,
    )
