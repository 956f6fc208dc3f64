# SPDX-License-Identifier: Apache-2.0
"""Style of a page about buffers."""

from __future__ import annotations

# Series in the order and near the colours of lightning_replay.analysis.plotting, lighter on a dark screen.
PAGE_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1b1f24; --muted: #59636e; --line: #dfe3e8;
  --series0: #0072b2; --series1: #d55e00; --series2: #009e73; --series3: #cc79a7; --series4: #b57f00;
  --series5: #3a9fd0; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1d2127; --text: #e6e9ed; --muted: #9aa5b1;
  --line: #333a43; --series0: #56b4e9; --series1: #f0894a; --series2: #2fc39a; --series3: #dd9cc0; --series4: #e6b800;
  --series5: #a8d8f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px; max-width: 1180px; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 32px 0 12px; }
h3 { font-size: 15px; margin: 0 0 8px; }
.sub { color: var(--muted); margin: 4px 0 16px; overflow-wrap: anywhere; }
section p { color: var(--muted); font-size: 13px; margin: 8px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-bottom: 12px; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 20px; font-weight: 600; } .tile span { color: var(--muted); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 345px), 1fr)); gap: 12px;
  grid-auto-flow: dense; }
section { min-width: 0; } section.wide { grid-column: 1 / -1; } .wide svg { max-width: 900px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }
th { color: var(--muted); font-weight: 500; font-size: 13px; } tr:last-child td { border-bottom: 0; }
dl { margin: 0; display: grid; grid-template-columns: max-content 1fr; gap: 4px 14px; font-size: 13px; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.bar { display: block; height: 5px; min-width: 60px; max-width: 160px; border-radius: 3px; margin-top: 4px;
  background: var(--line); }
.bar span { display: block; height: 5px; border-radius: 3px; background: var(--series0); }
.legend { margin-right: 14px; white-space: nowrap; } .key { display: inline-block; width: 12px; height: 12px;
  margin-right: 5px; border-radius: 2px; vertical-align: -1px; background: var(--series0); }
.key1 { background: var(--series1); } .key2 { background: var(--series2); } .key3 { background: var(--series3); }
.key4 { background: var(--series4); } .key5 { background: var(--series5); }
.strip { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 10px; }
.strip figure { margin: 0; width: 84px; } .strip img { width: 84px; image-rendering: pixelated; display: block;
  border: 2px solid transparent; border-radius: 3px; } .strip .highest img { border-color: var(--series1); }
.strip figcaption { font-size: 11px; color: var(--muted); text-align: center; }
@media (max-width: 520px) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 6px; }
  .legend { white-space: normal; } .wide svg text { font-size: 18px; } }
"""
