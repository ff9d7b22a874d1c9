"""The look of all pictures, and their two forms: a PNG file, or SVG to stand in a page.

In the SVG every colour is a variable of the page, so that one picture suits a light page, a dark
one and paper. Its text stays text: small, and found by a browser's search.
"""

from __future__ import annotations

import functools
import io
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito 2008, https://jfly.uni-koeln.de/color/ ; grid is their vermilion, which reads
# better as text on white than their orange.
COLOURS = {"search": "#0072B2", "grid": "#D55E00", "random": "#CC79A7", "lr-range": "#009E73",
           "default": "#555555"}
NAMES = {"search": "search", "grid": "grid", "random": "random", "lr-range": "LR pick",
         "default": "defaults"}
INK, SOFT, FAINT = "#222222", "#555555", "#9a9a9a"
# 8 inches at 200 dots are 1600 pixels: sharp at twice the width of a README's column.
_WIDTH, _DPI = 8.0, 200
_STYLE: Any = {
    "font.size": 10, "axes.edgecolor": "#888888", "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": SOFT, "ytick.color": SOFT, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.titlesize": 11,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "figure.dpi": 100,
    "font.family": "DejaVu Sans", "lines.solid_capstyle": "round", "axes.facecolor": "none",
    # A name with two dollar signs is a name, no formula.
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "hpo",
}
# The page's variable for each colour; `hpo.report.look` gives their values, light and dark.
VARIABLES = {
    "#222222": "ink", "#555555": "soft", "#777777": "soft", "#888888": "edge", "#9a9a9a": "faint",
    "#e6e6e6": "rule", "#ffffff": "paper", "#0072b2": "search", "#d55e00": "grid",
    "#cc79a7": "random", "#009e73": "lr-range",
}
# DejaVu's letters are as wide as Verdana's; Arial's are narrower, so that all of them fit.
_FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"
_COORDINATES = ("d", "x", "y", "transform", "width", "height")


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function draw in this look, whatever the caller's own settings are."""
    @functools.wraps(draw)
    def inside(*args: Any, **named: Any) -> Any:
        import matplotlib

        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            # A page has letters that the file of this font lacks; a picture shows a box.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            return draw(*args, **named)

    return inside


def new(height: float) -> Figure:
    """Return an empty figure that needs no display.

    Units: `height` in inches, as matplotlib counts.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@styled
def save(figure: Figure, path: Path) -> None:
    """Save a figure as PNG: written aside and renamed, so never half a picture."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    figure.savefig(aside, format="png", dpi=_DPI, facecolor="white")
    aside.replace(path)


@styled
def svg(figure: Figure, prefix: str, label: str) -> str:
    """Return a figure as an SVG element of a page; every id in it begins with `prefix`."""
    text = io.StringIO()
    figure.savefig(text, format="svg", facecolor="none", metadata={"Date": None})
    # XML can hold no control characters; a choice of a param may.
    clean = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]",
                   "\N{REPLACEMENT CHARACTER}", text.getvalue())
    root = ElementTree.fromstring(clean)
    _strip(root)
    used = {ref for element in root.iter() for ref in _references(element)}
    for element in root.iter():
        _as_part_of_a_page(element, prefix, used)
    box = root.get("viewBox") or ""
    root.attrib.clear()
    root.attrib.update({"viewBox": box, "role": "img", "aria-label": label, "class": "plot"})
    return ElementTree.tostring(root, encoding="unicode")


def _strip(root: ElementTree.Element) -> None:
    """Drop what is said of the whole file, and the names of SVG's and XLink's languages."""
    for element in list(root):
        if element.tag.endswith("metadata") or element.find("{*}style") is not None:
            root.remove(element)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        if not (element.text or "").strip():
            element.text = None
        for name in [name for name in element.attrib if name.startswith("{")]:
            element.set(name.rpartition("}")[2], element.attrib.pop(name))


def _references(element: ElementTree.Element) -> list[str]:
    return re.findall(r"#([\w.-]+)", f"{element.get('href', '')} {element.get('clip-path', '')}")


def _as_part_of_a_page(element: ElementTree.Element, prefix: str, used: set[str]) -> None:
    """Give an element ids of its own, the page's colours, and two decimals."""
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", f"{prefix}-{own}")
    for name in ("href", "clip-path"):
        if name in element.attrib:
            element.set(name, element.attrib[name].replace("#", f"#{prefix}-"))
    for name in _COORDINATES:
        if name in element.attrib:
            short = re.sub(r"-?\d+\.\d+", _rounded, element.attrib[name])
            element.set(name, " ".join(short.split()))
    if element.attrib.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if "style" in element.attrib:
        style = re.sub(r"#[0-9a-f]{6}\b", _variable, element.attrib["style"])
        element.set("style", style.replace("'DejaVu Sans'", _FONTS))


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


def _variable(found: re.Match[str]) -> str:
    name = VARIABLES.get(found[0])
    return found[0] if name is None else f"var(--{name})"
