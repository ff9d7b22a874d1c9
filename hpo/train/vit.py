"""The vision transformer behind the spec `ViT`, apart because it loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpo.train.inits import TRUNCATED_STD, initialise
from hpo.train.layers import Residual, activation, norm, rising

if TYPE_CHECKING:
    from hpo.train.models import ViT


class SelfAttention(nn.Module):
    """torch's multi-head attention of tokens to each other."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(width, n_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended tokens. Shapes: [n, tokens, width] to the same."""
        return self.heads(x, x, x, need_weights=False)[0]


class VisionTransformer(nn.Module):
    """Patches as tokens, pre-norm blocks of attention and an MLP, and a linear head.

    Shapes: images [n, channels, height, width] to scores [n, n_classes].
    """

    def __init__(self, spec: ViT, image_shape: tuple[int, ...], n_classes: int,
                 patch: int) -> None:
        super().__init__()
        channels, height, across = image_shape
        n_tokens = (height // patch) * (across // patch) + (spec.pool == "cls")
        self.pool = spec.pool
        self.patches = nn.Conv2d(channels, spec.width, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, spec.width)) if spec.pool == "cls" else None
        self.positions = nn.Parameter(torch.empty(1, n_tokens, spec.width))
        self.dropout = nn.Dropout(spec.dropout)
        self.blocks = nn.Sequential(
            *(_block(spec, rate) for rate in rising(spec.drop_path, spec.n_layers)))
        self.norm = norm(spec.norm, spec.width, "tokens")
        self.head = nn.Linear(spec.width, n_classes)
        nn.init.trunc_normal_(self.positions, std=TRUNCATED_STD)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        if self.cls is not None:
            tokens = torch.cat([self.cls.expand(len(tokens), -1, -1), tokens], 1)
        tokens = self.norm(self.blocks(self.dropout(tokens + self.positions)))
        return self.head(tokens[:, 0] if self.pool == "cls" else tokens.mean(1))


def _block(spec: ViT, rate: float) -> nn.Sequential:
    hidden = spec.mlp_ratio * spec.width
    attention = nn.Sequential(norm(spec.norm, spec.width, "tokens"),
                              SelfAttention(spec.width, spec.n_heads), nn.Dropout(spec.dropout))
    mlp = nn.Sequential(norm(spec.norm, spec.width, "tokens"), nn.Linear(spec.width, hidden),
                        activation(spec.activation), nn.Dropout(spec.dropout),
                        nn.Linear(hidden, spec.width), nn.Dropout(spec.dropout))
    return nn.Sequential(Residual(attention, rate), Residual(mlp, rate))


def vit(spec: ViT, image_shape: tuple[int, ...], n_classes: int, patch: int) -> nn.Module:
    """Return the network that `ViT` describes, its images cut in patches of a size that fits."""
    return initialise(VisionTransformer(spec, image_shape, n_classes, patch), spec.init)
