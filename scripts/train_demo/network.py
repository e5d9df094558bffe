"""The Qwen3 architecture in plain torch, with parameter names as in Hugging Face checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from .settings import Shape

Cache = list[tuple[Tensor, Tensor]]


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale each vector to unit mean square."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        result: Tensor = (self.weight * scaled).to(x.dtype)
        return result


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves layout."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with per-head QK norms."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.width, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(shape.width, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(shape.width, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, shape.width, bias=False)
        self.q_norm = Norm(self.size, shape.norm_eps)
        self.k_norm = Norm(self.size, shape.norm_eps)

    def _project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``[batch, heads, time, head_dim]``."""
        rows, time, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, time, self.heads, self.size)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, time, self.kv_heads, self.size)).transpose(1, 2)
        v = self.v_proj(x).view(rows, time, self.kv_heads, self.size).transpose(1, 2)
        return rotate(q, cosine, sine), rotate(k, cosine, sine), v

    def _output(self, mixed: Tensor) -> Tensor:
        """Join the heads."""
        rows, _, time, _ = mixed.shape
        joined = mixed.transpose(1, 2).reshape(rows, time, self.heads * self.size)
        result: Tensor = self.o_proj(joined)
        return result

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Causal attention over a whole window."""
        q, k, v = self._project(x, cosine, sine)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._output(mixed)

    def step(
        self, x: Tensor, cosine: Tensor, sine: Tensor, keys: Tensor, values: Tensor, start: int
    ) -> Tensor:
        """Attention of new tokens at ``start`` over the cache, which it extends.

        Several tokens at once are only supported at the start, where plain causality holds.
        """
        q, k, v = self._project(x, cosine, sine)
        rows, _, time, _ = q.shape
        keys[:, :, start : start + time] = k
        values[:, :, start : start + time] = v
        if start == 0:
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            return self._output(mixed)
        # The heads of a group share keys: they become the rows of one product per group.
        grouped = q.view(rows, self.kv_heads, self.heads // self.kv_heads, self.size)
        scores = grouped @ keys[:, :, : start + 1].transpose(2, 3) * self.size**-0.5
        weights = torch.softmax(scores.float(), dim=-1).to(x.dtype)
        mixed = weights @ values[:, :, : start + 1]
        return self._output(mixed.view(rows, self.heads, 1, self.size))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gated expansion and back."""
        gated = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        result: Tensor = self.down_proj(gated)
        return result


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """A whole window."""
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result

    def step(
        self, x: Tensor, cosine: Tensor, sine: Tensor, cache: tuple[Tensor, Tensor], start: int
    ) -> Tensor:
        """New tokens only."""
        x = x + self.self_attn.step(self.input_layernorm(x), cosine, sine, *cache, start)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Body(nn.Module):
    """Embedding, layers and last norm: what a checkpoint calls ``model``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.norm_eps)


class Network(nn.Module):
    """A causal language model with tied embeddings."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        angles = torch.outer(
            torch.arange(shape.context, dtype=torch.float64), shape.rope_theta**-exponents
        )
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal weights of variance 1/fan-in; what is added to the stream starts at zero."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 2:
                spread = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The last hidden states of a window."""
        cosine, sine = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        x: Tensor = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cosine, sine)
        result: Tensor = self.model.norm(x)
        return result

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of a window, ``[batch, time, vocabulary]``."""
        return functional.linear(self.hidden(tokens), self.model.embed_tokens.weight)

    def new_cache(self, rows: int, length: int) -> Cache:
        """Empty keys and values for ``rows`` sequences of at most ``length`` tokens."""
        weight = self.model.embed_tokens.weight
        size = (rows, self.shape.kv_heads, length, self.shape.head_dim)
        return [(weight.new_empty(size), weight.new_empty(size)) for _ in range(self.shape.layers)]

    def step(self, tokens: Tensor, cache: Cache, start: int) -> Tensor:
        """Logits after the last of some new tokens, ``[batch, vocabulary]``."""
        end = start + tokens.shape[1]
        cosine, sine = self.cosine[start:end], self.sine[start:end]
        x = self.model.embed_tokens(tokens)
        for layer, entry in zip(self.model.layers, cache, strict=True):
            assert isinstance(layer, Layer)
            x = layer.step(x, cosine, sine, entry, start)
        last = self.model.norm(x[:, -1])
        return functional.linear(last, self.model.embed_tokens.weight)


def parameter_count(network: Network) -> int:
    """How many parameters a network has (tied ones once)."""
    return sum(parameter.numel() for parameter in network.parameters())
