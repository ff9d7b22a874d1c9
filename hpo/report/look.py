"""The look of the HTML report: its colours, light and dark, and its style sheet.

The pictures' colours are these variables too. On paper the page is always light.
"""

from __future__ import annotations

# Okabe and Ito's colours; the dark page has lighter ones of the same hues.
_LIGHT = {
    "paper": "#ffffff", "panel": "#f6f8fa", "ink": "#222222", "soft": "#555555",
    "edge": "#888888", "faint": "#9a9a9a", "rule": "#e6e6e6", "search": "#0072b2",
    "grid": "#d55e00", "random": "#b3558d", "lr-range": "#00805d", "default": "#555555",
}
_DARK = {
    "paper": "#14171b", "panel": "#1d2127", "ink": "#e6e8ea", "soft": "#aab0b7",
    "edge": "#717880", "faint": "#6d747c", "rule": "#2c3138", "search": "#56b4e9",
    "grid": "#f08a4b", "random": "#e29ac4", "lr-range": "#35c79f", "default": "#aab0b7",
}
_RULES = """
* { box-sizing: border-box; }
html { color-scheme: light dark; scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header, footer { max-width: 62rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; }
.kind { margin: 0; color: var(--soft); font-size: 0.85rem; letter-spacing: 0.04em; }
h1 { margin: 0.1rem 0 0; font-size: 2.1rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 3rem 0 0.8rem; font-size: 1.3rem; line-height: 1.3; }
p { margin: 0.8rem 0; max-width: 46rem; overflow-wrap: anywhere; }
.verdict { max-width: none; margin: 1.4rem 0; padding: 1rem 1.2rem; font-size: 1.1rem;
  background: var(--panel); border-left: 4px solid var(--search); border-radius: 0 6px 6px 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(13.4rem, 1fr));
  gap: 0.8rem; margin: 1.4rem 0; }
.figures > div { padding: 0.8rem 1rem; border: 1px solid var(--rule); border-radius: 6px; }
.figures dt { color: var(--soft); font-size: 0.85rem; }
.figures dd { margin: 0; }
.figures .value { font-size: 1.2rem; font-weight: 600; line-height: 1.4;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.figures .more { color: var(--soft); font-size: 0.85rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin: 1rem 0 0; padding: 0;
  list-style: none; font-size: 0.9rem; }
a { color: var(--search); text-decoration-thickness: 1px; text-underline-offset: 0.15em; }
a:focus-visible, summary:focus-visible, .wide:focus-visible { outline: 2px solid var(--search);
  outline-offset: 2px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.9rem 0.4rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
thead th { border-bottom-color: var(--edge); }
.n { padding: 0.4rem 0 0.4rem 1.1rem; text-align: right; }
td.n { white-space: nowrap; }
.first td { font-weight: 600; }
.wide + .wide { margin-top: 1.2rem; }
.dot { display: inline-block; width: 0.6em; height: 0.6em; margin-right: 0.5em;
  border-radius: 50%; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  monospace; font-size: 0.88em; }
td code { overflow-wrap: anywhere; }
pre { margin: 0.8rem 0; padding: 0.8rem 1rem; overflow-x: auto; background: var(--panel);
  border-radius: 6px; line-height: 1.5; }
td.flag, code.flag, span.flag { white-space: nowrap; }
.copied { white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 0.8rem 0 0; }
.plot { display: block; width: 100%; min-width: 36rem; height: auto; }
.plot * { stroke-linejoin: round; stroke-linecap: butt; }
summary { cursor: pointer; color: var(--search); }
.none { color: var(--soft); }
.verdict strong { display: block; }
footer { padding-top: 2rem; padding-bottom: 3rem; color: var(--soft); font-size: 0.85rem; }
@media print {
  nav { display: none; }
  body { font-size: 10pt; }
  main, header, footer { max-width: none; padding-left: 0; padding-right: 0; }
  h2 { margin-top: 1.6rem; break-after: avoid; }
  figure, tr, .verdict, .figures { break-inside: avoid; }
  .wide { overflow: visible; }
  .plot { min-width: 0; }
  pre { white-space: pre-wrap; }
  .verdict, .dot, pre { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def style() -> str:
    """Return the page's style sheet."""
    return (f":root {{ {_variables(_LIGHT)} }}\n"
            f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}"
            f"{_RULES}")


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())
