"""The layers that the shipped networks choose from by name: norms, activations, residuals.

What torch and torchvision have is theirs; here is how it lies over images, rows and tokens.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Layout = Literal["rows", "images", "tokens"]
# The best of the fixed sizes in Wu and He, Group Normalization, table 3.
CHANNELS_A_GROUP = 16
# torch's own default follows the type: of bf16 it is 0.0078.
RMS_EPS = 1e-6


class Moved(nn.Module):
    """A norm whose channels lie on another axis than it looks at."""

    def __init__(self, norm: nn.Module, source: int, target: int) -> None:
        super().__init__()
        self.norm, self.source, self.target = norm, source, target

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input, its axes as they were."""
        moved = x.movedim(self.source, self.target)
        return self.norm(moved).movedim(self.target, self.source)


class RMSNorm(nn.RMSNorm):
    """torch's, computed in the weight's type where its input is in half precision.

    torch itself has no fused step for the two types then, and says so in the log.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input, in its own type."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def n_groups(n_channels: int) -> int:
    """Return the groups of group norm: the most that divide the channels, 16 or more in each."""
    most = max(1, n_channels // CHANNELS_A_GROUP)
    return max(n for n in range(1, most + 1) if n_channels % n == 0)


def norm(kind: str, n_channels: int, layout: Layout) -> nn.Module:
    """Return a norm of rows [n, c], images [n, c, h, w] or tokens [n, t, c].

    `batch` is over all but the channels; `layer` and `rms` over the channels of each row, pixel or
    token; `group` over each group of channels with all pixels or tokens; `none` does nothing.

    Source: Ioffe and Szegedy 2015; Ba et al. 2016; Wu and He 2018; Zhang and Sennrich 2019.
    """
    if kind == "none":
        return nn.Identity()
    if kind in ("layer", "rms"):
        made = nn.LayerNorm(n_channels) if kind == "layer" else RMSNorm(n_channels, eps=RMS_EPS)
        return Moved(made, 1, -1) if layout == "images" else made
    if kind == "group":
        made = nn.GroupNorm(n_groups(n_channels), n_channels)
    else:
        made = nn.BatchNorm2d(n_channels) if layout == "images" else nn.BatchNorm1d(n_channels)
    return Moved(made, -1, 1) if layout == "tokens" else made


def activation(kind: str) -> nn.Module:
    """Return an activation; ReLU works in place, which only its own output needs."""
    return {"gelu": nn.GELU, "silu": nn.SiLU, "selu": nn.SELU}[kind]() if kind != "relu" else (
        nn.ReLU(inplace=True))


def drop_path(rate: float) -> nn.Module:
    """Return a layer that leaves out a whole row with probability `rate`, and else scales it up.

    Source: Huang et al. 2016, Deep Networks with Stochastic Depth.
    """
    if not rate:
        return nn.Identity()
    # Here, because torchvision takes longer to load than all else that a small model needs.
    from torchvision.ops import StochasticDepth

    return StochasticDepth(rate, "row")


def rising(rate: float, n_blocks: int) -> list[float]:
    """Return each block's rate, in a line up to `rate` at the last one.

    Source: Huang et al. 2016, equation 4.
    """
    return [rate * (i + 1) / n_blocks for i in range(n_blocks)]


class Residual(nn.Module):
    """A branch added to its input, which a shortcut may bring to the branch's shape."""

    def __init__(self, branch: nn.Module, rate: float = 0.0, *, shortcut: nn.Module | None = None,
                 after: nn.Module | None = None) -> None:
        super().__init__()
        self.branch, self.drop = branch, drop_path(rate)
        self.shortcut = nn.Identity() if shortcut is None else shortcut
        self.after = nn.Identity() if after is None else after

    def forward(self, x: Tensor) -> Tensor:
        """Return after(shortcut(x) + branch(x)), the branch left out for some rows."""
        return self.after(self.shortcut(x) + self.drop(self.branch(x)))
