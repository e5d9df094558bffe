"""The interface of the ops that networks consist of, and how larger ones are composed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.adapters import Adapted
from slipstream.kernels.attention import (
    Heads,
    QueryKeyNorms,
    gated,
    query_key_norms,
    split_heads,
)
from slipstream.kernels.delta_net import DeltaCache, DeltaHeads
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.norm import Activation, Addend, Norm, PostNormAddend
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import ExpertsParts, FusedOp, StackParts


class Ops(ABC):
    """The ops of one backend, of which networks consist.

    Layers get them when the network is built, and do not depend on the device. A backend implements
    the abstract ops, and overrides those that it computes in one kernel.

    Attributes:
        backend: its name.
        sums_addends: addends may be [parts, T, N], added in their order, or an `UnreducedSum`.
        reads_shared_once: attention reads the blocks of `Paging.shared` once for their requests.
    """

    backend: str
    sums_addends: bool = False
    reads_shared_once: bool = False

    # ------------------------------------------------------------------ used by layers

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, adapted: Adapted | None = None
    ) -> Tensor:
        """x [T, K], weight [N, K], bias [N] or None -> [T, N].

        The result is only for ops of this backend that take an `addend`: a backend may leave the
        sum over parts of K (split-K) to them, and return [parts, T, N] float32. `adapted`, here
        and below: the LoRA adapters of the rows; None: no row has one.
        """
        y = self.product(x, weight, bias)
        return y if adapted is None else self.add_low_rank(y, x, adapted)

    def norm(
        self, addend: Addend, residual: Tensor | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """addend, residual [T, H] -> (norm(residual + addend), residual + addend).

        Without a residual the addend [T, H] is the sum. Here and below, an addend may have a norm
        of its own (`PostNormAddend`), and a norm of None is none.
        """
        output, post_norm = addend, None
        if isinstance(addend, PostNormAddend):
            output, post_norm = addend.values, addend.post_norm
        assert isinstance(output, Tensor), "backends that sum addends have norms of their own"
        if post_norm is not None and post_norm.factor is None:
            output, post_norm = self._normed(output, post_norm.norm), None
        layer_norm = norm is not None and norm.bias is not None
        if post_norm is None and residual is not None and norm is not None and not layer_norm:
            return self.add_rms_norm(output, residual, norm.weight, norm.eps)
        total = output if residual is None else output + residual
        if post_norm is not None:
            assert residual is not None, "the first addend is the stream itself, not post-normed"
            total = residual + self._normed(output, post_norm.norm)
            total = total if post_norm.factor is None else total * post_norm.factor
        return self._normed(total, norm), total

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x
        if norm.bias is not None:
            return F.layer_norm(x, norm.bias.shape, norm.weight, norm.bias, norm.eps)
        return self.rms_norm(x, norm.weight, norm.eps)

    def add_norm(self, addend: Addend, residual: Tensor, norm: Norm) -> Tensor:
        """The first result of `norm`, in the residual's dtype."""
        return self.norm(addend, residual, norm)[0]

    def norm_linear(
        self,
        addend: Addend,
        residual: Tensor | None,
        norm: Norm | None,
        weight: Weight,
        bias: Tensor | None,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`norm`, whose first result goes through a matmul: [T, N] in its dtype."""
        x, residual = self.norm(addend, residual, norm)
        return self.linear(x, weight, bias, adapted), residual

    def norm_gated_linear(
        self,
        addend: Addend,
        residual: Tensor | None,
        norm: Norm | None,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation = Activation.SILU,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`norm_linear`, whose first result (gate, up) [T, 2I] becomes activation(gate) * up."""
        gate_up, residual = self.norm_linear(addend, residual, norm, weight, bias, adapted)
        return self.gated_activation(gate_up, activation), residual

    def experts(
        self, addend: Addend, residual: Tensor | None, parts: ExpertsParts
    ) -> tuple[Tensor, Tensor]:
        """`norm`, whose first result goes through experts; it is an addend, see `linear`."""
        x, residual = self.norm(addend, residual, parts.norm)
        return self.mixture(x, parts), residual

    def joined_linear(
        self,
        parts: Sequence[tuple[Tensor, Norm | None]],
        weight: Weight,
        bias: Tensor | None,
        adapted: Adapted | None = None,
    ) -> Tensor:
        """A matmul of concatenated parts [T, K1], [T, K2] ..., each normed if it has a norm; weight
        [N, K1 + K2 ...] -> [T, N] in their dtype."""
        x = torch.cat([self._normed(side, norm) for side, norm in parts], -1)
        y = self.product(x, weight, bias)
        return y if adapted is None else self.add_low_rank(y, x, adapted)

    def attend(
        self, qkv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Causal self-attention of ragged rows over paged keys and values.

        qkv [T, (Hq + 2 Hk) D]: queries, keys and values, then the gates [T, Hq D] if heads are
        gated. Queries and keys are normed and rotated. Keys and values are written to the rows'
        slots of the caches [num_blocks, block_size, Hk, D]. Then a row at position p attends to
        the cached tokens 0..p of its request, or to the last `window` of them. A node of a token
        tree attends only to its ancestors and itself in the tree; `Visibility` has the other
        exceptions. Returns [T, Hq D].

        A cache of 8 bits is [num_blocks, block_size, Hk, D + SCALE_BYTES]. With int8 each head's D
        numbers are followed by their scale; with e4m3 the numbers of all heads of a token are
        followed by all scales, so that numbers begin at multiples of 16 bytes.
        """
        query, key, value = split_heads(qkv, heads)
        norms = query_key_norms(heads)
        query = self.rotate_and_store(query, key, value, norms, heads.cos_sin, inputs, cache)
        out = self.paged_attention(
            query, cache, inputs, heads.scale, heads.window, heads.sinks, heads.softcap
        )
        return gated(out.flatten(-2), qkv, heads)

    def store(
        self, kv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
    ) -> None:
        """Write keys and values of ragged rows to their slots of the cache.

        kv [T, 2 Hk D]: keys, which are normed and rotated like in `attend`, and values. Only
        positions and slots of `inputs` are used.
        """
        shape = (len(kv), heads.num_kv_heads, heads.head_dim)
        key, value = (part.view(shape) for part in kv.chunk(2, -1))
        norms = query_key_norms(heads)
        self.rotate_and_store(key[:, :0], key, value, norms, heads.cos_sin, inputs, cache)

    def pack(self, weight: Weight) -> Weight:
        """Convert a weight to the backend's own layout, once, when it is loaded."""
        return weight

    def round(self, matrix: Tensor, form: Rounding) -> Weight:
        """Round a matrix [N, K] to fewer bits; the result may be packed already."""
        return form.round(matrix)

    def fuse(self, parts: StackParts) -> FusedOp | None:
        """An op for as many first layers of a stack as the backend can fuse; None: for none."""
        return None

    @abstractmethod
    def latent_attention(
        self,
        queries: Tensor,
        latents: Tensor,
        heads: LatentHeads,
        inputs: PassInputs,
        cache: Tensor,
    ) -> Tensor:
        """Causal self-attention of ragged rows over a paged cache of one latent row per token.

        queries [T, H (N + P)]: for each head N numbers, then P that are rotated. latents [T, R +
        P]: R numbers that are normed, then P that are rotated, a part of the keys that all heads
        share. Both may be columns of wider tensors. Latent rows are normed, rotated, and written to
        the rows' slots of the cache [num_blocks, block_size, R + P]. Then a row attends to the
        tokens that `attend` names, where c [R] and r [P] are the two parts of a token's cached row:

            score = scale ((keys^T q_plain) . c + q_rotated . r)
            out = values (sum of softmax(scores) c)

        Returns [T, H V]. This absorbed form reads a token's latent row once for all heads. The
        direct form, score = scale (q_plain . keys c + q_rotated . r), needs fewer products for many
        rows, but rounds differently: decoding and verification must use the same form.
        """

    @abstractmethod
    def delta_net(
        self,
        mixed: Tensor,
        gates: Tensor,
        z: Tensor,
        heads: DeltaHeads,
        inputs: PassInputs,
        cache: DeltaCache,
    ) -> Tensor:
        """The recurrence over the rows of each request, which are ragged.

        mixed [T, C]: queries, keys and values of the rows; gates [T, 2 Hv]: write strengths b, then
        decay steps a; z [T, Hv Dv]. All may be columns of wider tensors. Returns [T, Hv Dv] in
        their dtype.

        A row's channels are convolved with those of the W - 1 rows before it, followed by SiLU.
        Then, for each value head, all in float32:

            q <- q / sqrt(|q|^2 + 1e-6) / sqrt(Dk);  k <- k / sqrt(|k|^2 + 1e-6)
            S <- exp(decay softplus(a + step_bias)) S
            S <- S + k (x) sigmoid(b) (v - S^T k)
            out = norm_weight * (S^T q) / rms(S^T q) * silu(z)

        `inputs.states` says which rows are committed. A pass first commits the `pending` rows of
        `drafted`, which verification has accepted since, then its own known rows; after these it
        writes `states` and `windows`, once. Draft rows follow from that state without changing it;
        the first K of them are written to `drafted`. When the number of committed tokens reaches
        `save_at`, the state and the window there are also copied to the place `saved`. Requests
        without rows are unchanged.
        """

    @abstractmethod
    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """x [T, K], weight [V, K] -> [T, V] float32, never rounded below the accumulator."""

    @abstractmethod
    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """x [T, I] -> activation(x)."""

    # ------------------------------------------------------------------ used by the ops above

    @abstractmethod
    def product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x [T, K], weight [N, K], bias [N] or None -> [T, N] in the dtype of x."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm, computed in float32: x [..., H], weight [H] -> like x."""

    @abstractmethod
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x, residual [T, H] -> (norm(x + residual), x + residual)."""

    @abstractmethod
    def gated_activation(self, gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
        """gate_up [T, 2I], gate first -> activation(gate) * up, [T, I]."""

    @abstractmethod
    def mixture(self, x: Tensor, parts: ExpertsParts) -> Tensor:
        """x [T, H], normed -> the weighted sum of each row's experts, [T, H]."""

    @abstractmethod
    def rotate_and_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: QueryKeyNorms | None,
        cos_sin: Tensor,
        inputs: PassInputs,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, Hk, D] -> the rotated query; writes the rotated keys,
        and the values, to the cache."""

    @abstractmethod
    def paged_attention(
        self,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        inputs: PassInputs,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """query [T, Hq, D] -> [T, Hq, D]; see `Heads` for the other arguments."""

    @abstractmethod
    def add_low_rank(self, y: Tensor, x: Tensor, adapted: Adapted) -> Tensor:
        """y [T, N], x [T, K] -> y plus the adapters' products of x; may overwrite y."""
