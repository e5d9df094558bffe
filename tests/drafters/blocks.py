"""Tiny DFlash drafters as they are published, and what they draft, in plain torch.

The oracle reads whole texts again for every draft, and shares nothing with the engine.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.drafters.fits import remembered
from tests.drafters.oracles import Target, load, mlp, rms

MASK, INNER = 90, 64
FIT_TEXTS, FIT_LENGTH = 24, 30


def write_dflash(
    folder: Path,
    target: str | Path,
    *,
    seed: int = 1,
    block: int = 8,
    mask: int = MASK,
    reads: Sequence[int] = (0, 1),
    draft_vocab: int | None = None,
    own_embedding: bool = False,
    own_head: bool = True,
    qk_norm: bool = True,
    nested: dict[str, Any] | None = None,
    flat: bool = False,
    **changes: Any,
) -> Path:
    """A drafter; `changes` go to its config.json.

    Args:
        reads: layers of the target whose output it reads.
        own_head: fitted to the target, so that first draft tokens are often accepted.
        nested: more keys of `dflash_config`.
        flat: the same keys outside of `dflash_config`.
    """
    shape = json.loads((Path(target) / "config.json").read_text())
    width, vocab = shape["hidden_size"], shape["vocab_size"]
    own = {"mask_token_id": mask, "target_layer_ids": list(reads), **(nested or {})}
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": block,
        "num_target_layers": shape["num_hidden_layers"],
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab,
        **(own if flat else {"dflash_config": own}),
        **({"draft_vocab_size": draft_vocab} if draft_vocab else {}),
        **changes,
    }
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    def gains(size: int) -> Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    weights = {
        "fc.weight": matrix(width, len(own["target_layer_ids"]) * width, 2.0),
        "hidden_norm.weight": gains(width),
        "norm.weight": gains(width),
    }
    for index in range(config["num_hidden_layers"]):
        name = f"layers.{index}."
        weights |= {
            f"{name}input_layernorm.weight": gains(width),
            f"{name}post_attention_layernorm.weight": gains(width),
            f"{name}self_attn.q_proj.weight": matrix(48, width, 2.0),
            f"{name}self_attn.k_proj.weight": matrix(24, width, 2.0),
            f"{name}self_attn.v_proj.weight": matrix(24, width),
            f"{name}self_attn.o_proj.weight": matrix(width, 48),
            f"{name}mlp.gate_proj.weight": matrix(INNER, width),
            f"{name}mlp.up_proj.weight": matrix(INNER, width),
            f"{name}mlp.down_proj.weight": matrix(width, INNER, 0.5),
        }
        if qk_norm:
            weights[f"{name}self_attn.q_norm.weight"] = gains(12)
            weights[f"{name}self_attn.k_norm.weight"] = gains(12)
    if own_embedding:
        weights["embed_tokens.weight"] = matrix(vocab, width, 2.0)
    if own_head:
        weights["lm_head.weight"] = matrix(draft_vocab or vocab, width, 2.0)
    if draft_vocab:
        ids = torch.arange(draft_vocab) * vocab // draft_vocab
        weights["d2t"] = ids - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    _save(folder, config, weights)
    if own_head:
        weights["lm_head.weight"] = _fitted_head(folder, target)
    return _save(folder, config, weights)


def write_dspark(
    folder: Path,
    target: str | Path,
    *,
    rank: int = 6,
    head_type: str = "vanilla",
    confident: bool = True,
    **options: Any,
) -> Path:
    """A DFlash drafter (`write_dflash`) with a correction of every token by the one before."""
    write_dflash(folder, target, **options)
    read, weights = load(folder)
    config = dict(read)
    width, vocab = config["hidden_size"], config["vocab_size"]
    drafted = config.get("draft_vocab_size", vocab)
    generator = torch.Generator().manual_seed(17)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    shapes = {"gated": (rank, width + rank), "rnn": (3 * rank, width + 2 * rank)}
    stored = dict(weights.items())
    if rank:
        stored["markov_head.markov_w1.weight"] = matrix(vocab, rank) * 3
        stored["markov_head.markov_w2.weight"] = matrix(drafted, rank) * 3
    if rank and head_type in shapes:
        name = "markov_head.gate_proj" if head_type == "gated" else "markov_head.joint_proj"
        stored[f"{name}.weight"] = matrix(*shapes[head_type])
        stored[f"{name}.bias"] = matrix(1, shapes[head_type][0])[0]
    if confident:
        stored["confidence_head.proj.weight"] = matrix(1, width + rank)
        stored["confidence_head.proj.bias"] = torch.ones(1)
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": rank,
        "markov_head_type": head_type,
        "enable_confidence_head": confident,
    }
    return _save(folder, config, stored)


def write_dflash2(folder: Path, target: str | Path, **options: Any) -> Path:
    """A DFlash drafter (`write_dflash`) with convolutions of 3 taps and a selector of 5 tokens."""
    write_dflash(folder, target, **options)
    read, weights = load(folder)
    config = dict(read)
    width, vocab, rank, taps, group = config["hidden_size"], config["vocab_size"], 6, 3, 8
    generator = torch.Generator().manual_seed(18)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    stored = dict(weights.items())
    for index in range(config["num_hidden_layers"]):
        for half in ("attention", "mlp"):
            name = f"layers.{index}.{half}_conv"
            stored[f"{name}.base_kernel"] = normal(2, taps, width) * 0.2
            stored[f"{name}.base_kernel"][:, 0] += 1.0
            rows = 2 * taps * width // group
            stored[f"{name}.kernel_projection.weight"] = normal(rows, width) * 0.02
    name = "candidate_selector"
    stored[f"{name}.predecessor_codebook"] = normal(vocab, rank)
    stored[f"{name}.successor_codebook"] = normal(vocab, rank)
    stored[f"{name}.hidden_projection.weight"] = normal(rank, width) / width**0.5
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= {
        "conv_kernel_size": taps,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": 5,
        "input_embedding_scale": 1.5,
        "output_multiplier": 0.7,
        "final_logit_softcapping": 20.0,
    }
    return _save(folder, config, stored)


def as_wrapped_dflash(folder: Path, **changes: Any) -> Path:
    """Rewrite the drafter as the speculators library would write it."""
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("dflash_config")
    for key in ("auto_map", "num_target_layers"):
        config.pop(key)
    wrapper = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target"},
        },
        "aux_hidden_state_layer_ids": [index + 1 for index in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "block_size": config.pop("block_size"),
        "draft_vocab_size": config.pop("draft_vocab_size", config["vocab_size"]),
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "projector_type": "dflash",
        "shift_label": False,
        "max_anchors": 3072,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "pure_draft_prefix_len": 1,
        "lambda_base_start": 1.0,
        "lambda_base_decay_ratio": 1.0,
        "auf": False,
        "transformer_layer_config": {**config, "architectures": ["Qwen3ForCausalLM"]},
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(wrapper))
    return folder


class Blocks:
    """Section 8 of the format reference; `flags` take the place of what the config says."""

    def __init__(self, folder: Path | str, target: Target, **flags: Any) -> None:
        config, self.weights = load(folder)
        inner = {**config, **config.get("transformer_layer_config", {})}
        self.config = {**inner, **config.get("dflash_config", {}), **flags}
        self.target, self.eps = target, inner["rms_norm_eps"]
        weights = self.weights
        has = "embed_tokens.weight" in weights
        self.embedding = weights["embed_tokens.weight"] if has else target.embedding
        has = "lm_head.weight" in weights
        self.head = weights["lm_head.weight"] if has else target.head
        self.from_anchor = self.config.get("sample_from_anchor", False)

    def context(self, ids: Sequence[int]) -> Tensor:
        """[T, H], of every token."""
        streams = self.target(ids)[0]
        entered = self.config.get("aux_hidden_state_layer_ids")
        if entered is None:
            entered = [index + 1 for index in self.config["target_layer_ids"]]
        fused = self.weights.linear("fc", torch.cat([streams[layer] for layer in entered], -1))
        return rms(fused, self.eps) * self.weights["hidden_norm.weight"]

    def hidden(self, ids: Sequence[int], count: int) -> Tensor:
        """[count, H], what enters the lm_head for each of so many drafts after `ids`."""
        context = self.context(ids[:-1])
        masks = count - 1 if self.from_anchor else count
        block = torch.tensor([ids[-1], *[self.config["mask_token_id"]] * masks])
        x = self.embedding[block] * self.config.get("input_embedding_scale", 1.0)
        for index in range(self.config["num_hidden_layers"]):
            name = f"layers.{index}"
            normed = self.weights.norm(f"{name}.input_layernorm", x, self.eps)
            attend = partial(self._attention, index, context)
            x = x + self.around(f"{name}.attention_conv", normed, attend)
            normed = self.weights.norm(f"{name}.post_attention_layernorm", x, self.eps)
            x = x + self.around(
                f"{name}.mlp_conv", normed, partial(mlp, self.weights, f"{name}.mlp")
            )
        x = self.weights.norm("norm", x, self.eps)
        return x if self.from_anchor else x[1:]

    def around(self, name: str, normed: Tensor, half: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer's addend to the stream; subclasses put convolutions around `half`."""
        return half(normed)

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        """Greedy: (draft tokens, the logits of each) after `ids`."""
        logits = self.hidden(ids, count) @ self.head.T
        best = logits.argmax(-1)
        if "d2t" in self.weights:
            best = best + self.weights["d2t"][best]
        return best.tolist(), list(logits)

    def _attention(self, index: int, context: Tensor, block: Tensor) -> Tensor:
        name, config = f"layers.{index}.self_attn", self.config
        head_dim, before = config["head_dim"], len(context)
        rows = torch.cat((context, block))
        key, value = (
            self.weights.linear(f"{name}.{part}_proj", rows).view(len(rows), -1, head_dim)
            for part in "kv"
        )
        query = self.weights.linear(f"{name}.q_proj", block).view(len(block), -1, head_dim)
        if f"{name}.q_norm.weight" in self.weights:
            query = self.weights.norm(f"{name}.q_norm", query, self.eps)
            key = self.weights.norm(f"{name}.k_norm", key, self.eps)
        places = torch.arange(len(rows))
        query, key = self._turned(query, before), self._turned(key, 0)
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / head_dim**0.5
        distance = places[before:, None] - places
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        slides = (config.get("layer_types") or ["full_attention"] * 9)[index].startswith("sliding")
        if slides:
            hidden |= distance >= config["sliding_window"]
        if config.get("causal", slides and not config.get("sliding_window_non_causal")):
            hidden |= distance < 0
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value.transpose(0, 1)
        return self.weights.linear(f"{name}.o_proj", mixed.transpose(0, 1).flatten(1))

    def _turned(self, x: Tensor, first: int) -> Tensor:
        half = x.shape[-1] // 2
        turns = _turns(self.config["rope_theta"], half, first, first + len(x))
        turned = torch.complex(x[..., :half], x[..., half:]) * turns
        return torch.cat((turned.real, turned.imag), -1)


@cache
def _turns(theta: float, half: int, first: int, end: int) -> Tensor:
    speeds = theta ** -(torch.arange(half).float() / half)
    angles = torch.outer(torch.arange(first, end).float(), speeds).unsqueeze(1)
    return torch.polar(torch.ones_like(angles), angles)


class Sparks(Blocks):
    """Section 12.2: a block whose tokens are corrected in turn."""

    def __init__(self, folder: Path | str, target: Target) -> None:
        super().__init__(folder, target)
        self.from_anchor = self.config.get("sample_from_anchor", True)

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        weights, head = self.weights, "markov_head."
        token, tokens, logits = ids[-1], [], []
        state = torch.zeros(weights[f"{head}markov_w1.weight"].shape[1])
        for row in self.hidden(ids, count):
            read = known = weights[f"{head}markov_w1.weight"][token]
            if self.config["markov_head_type"] == "gated":
                read = weights.linear(f"{head}gate_proj", torch.cat((row, known))).sigmoid() * known
            if self.config["markov_head_type"] == "rnn":
                joint = weights.linear(f"{head}joint_proj", torch.cat((state, known, row)))
                gate, new, out = joint.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
                read = out.tanh()
            logits.append(self.head @ row + weights[f"{head}markov_w2.weight"] @ read)
            token = int(logits[-1].argmax())
            if "d2t" in weights:
                token += int(weights["d2t"][token])
            tokens.append(token)
        return tokens, logits


class Blocks2(Blocks):
    """Section 12.1: convolutions around the halves of layers, and candidates in each place."""

    def around(self, name: str, normed: Tensor, half: Callable[[Tensor], Tensor]) -> Tensor:
        base = self.weights[f"{name}.base_kernel"]
        group = self.config["conv_group_size"]
        deltas = self.weights.linear(f"{name}.kernel_projection", normed)
        deltas = deltas.view(len(normed), *base.shape[:2], -1).repeat_interleave(group, -1)

        def convolved(rows: Tensor, side: int) -> Tensor:
            out = torch.zeros_like(rows)
            for row in range(len(rows)):
                for tap in range(min(row + 1, base.shape[1])):
                    out[row] += (base[side, tap] + deltas[row, side, tap]) * rows[row - tap]
            return out

        return convolved(half(convolved(normed, 0)), 1)

    def drafts(self, ids: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
        config, weights, name = self.config, self.weights, "candidate_selector."
        cap, token = config["final_logit_softcapping"], ids[-1]
        tokens, scores = [], []
        for row in self.hidden(ids, count):
            logits = cap * torch.tanh(self.head @ row * config["output_multiplier"] / cap)
            kept = logits.topk(config["selector_top_k"]).indices
            before = weights[f"{name}predecessor_codebook"][token]
            pair = before * weights.linear(f"{name}hidden_projection", row)
            alone = torch.full_like(logits, -torch.inf)
            alone[kept] = logits[kept] + weights[f"{name}successor_codebook"][kept] @ pair
            token = int(alone.argmax())
            tokens.append(token)
            scores.append(alone)
        return tokens, scores


@remembered
def _fitted_head(folder: Path, target: str | Path) -> Tensor:
    """The lm_head whose logits for the first draft token are nearest to the target's."""
    model = Target(target)
    blocks = Blocks(folder, model)
    vocab = model.head.shape[0]
    columns = torch.arange(vocab)
    if "d2t" in blocks.weights:
        columns = torch.arange(len(blocks.weights["d2t"])) + blocks.weights["d2t"]
    texts = torch.randint(
        0, vocab, (FIT_TEXTS, FIT_LENGTH), generator=torch.Generator().manual_seed(99)
    )
    inputs, wanted = [], []
    for text in texts.tolist():
        logits = model(text)[2]
        for length in range(4, FIT_LENGTH, 5):
            inputs.append(blocks.hidden(text[:length], 2)[0])
            wanted.append(logits[length - 1, columns])
    x, y = torch.stack(inputs), torch.stack(wanted)
    square = x.T @ x + 1e-2 * torch.eye(x.shape[1])
    return torch.linalg.solve(square, x.T @ y).T.contiguous()


def _save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
