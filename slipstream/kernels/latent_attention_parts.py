"""Latent attention as a half that a backend may fuse."""

from dataclasses import dataclass

from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.table import Norm, Product


@dataclass(frozen=True, eq=False)
class LatentParts:
    """Latent attention as a mixer; see `layers/latent_attention.py`.

    Attributes:
        first: of the normed stream it makes what queries are made of, or queries, then latent rows.
        query_norm, queries: what makes queries of the first numbers of those; None where they are
            queries.
    """

    norm: Norm
    heads: LatentHeads
    first: Product
    query_norm: Norm | None
    queries: Product | None
    output: Product

    @property
    def products(self) -> tuple[Product, ...]:
        queries = () if self.queries is None else (self.queries,)
        return self.first, *queries, self.output
