"""Pictures of a study, drawn without a display: as PNG files, and as SVG for a page.

Each picture's function returns a figure, or None where there is nothing to draw. Names stand at
their lines, not in a legend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.plots.curves import curves
from hpo.plots.figure import COLOURS, NAMES, save, svg
from hpo.plots.params import importances, parallel
from hpo.plots.progress import progress
from hpo.plots.sweep import lr_range, sweep_figure
from hpo.results import Results, Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "NAMES", "PICTURES", "curves", "draw", "draw_all", "draw_sweep",
           "importances", "lr_range", "parallel", "progress", "save", "save_all", "svg",
           "sweep_figure"]

_Draw = Callable[[Results, Mapping[str, float] | None], "Figure | None"]
_PICTURES: dict[str, _Draw] = {
    "progress.png": progress, "curves.png": curves, "lr_range.png": lr_range,
    "importance.png": importances, "params.png": parallel,
}
PICTURES = tuple(_PICTURES)


def draw(results: Results, shares: Mapping[str, float] | None) -> dict[str, Figure]:
    """Draw every picture there is data for; `shares` says how much each param mattered."""
    drawn = {name: make(results, shares) for name, make in _PICTURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def save_all(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Save pictures into a folder and return their paths; remove the stale others."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        if name in figures:
            save(figures[name], folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    return [folder / name for name in figures]


def draw_all(
    results: Results, folder: Path, shares: Mapping[str, float] | None
) -> list[Path]:
    """Draw every picture there is data for into a folder, and remove the stale others."""
    return save_all(draw(results, shares), folder)


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Draw one LR range sweep into a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(sweep_figure(sweep), path)
