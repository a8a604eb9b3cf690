"""The style of a report: light and dark, wide and narrow."""

STYLE = """
:root{color-scheme:light
dark;--bg:#fff;--fg:#1d2127;--dim:#667080;--line:#d9dee5;--card:#f6f7f9;--c0:#2563eb;--c1:#d97706;--c2:#059669;
  --c3:#db2777;--c4:#7c3aed;--c5:#0891b2;--c6:#65a30d;--c7:#dc2626}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e8ebef;--dim:#98a2b0;--line:#333a44;--card:#1c2026;
  --c0:#60a5fa;--c1:#fbbf24;--c2:#34d399;--c3:#f472b6;--c4:#a78bfa;--c5:#22d3ee;--c6:#a3e635;--c7:#f87171}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.5rem;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:32px 0 10px}
h3{font-size:.95rem;margin:0 0 6px}
.dim,small{color:var(--dim)}
.big{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.big div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 14px}
.big b{display:block;font-size:1.35rem}
.charts{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;min-width:0}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--dim);font-size:12px}
svg polyline{fill:none;stroke-width:1.8}
svg .grid{stroke:var(--line)}
.legend{margin:4px 0 0;font-size:.85rem}
.legend span{margin-right:14px;white-space:nowrap}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem}
td,th{padding:3px 10px;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td.wrap{overflow-wrap:anywhere}
.samples{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(150px,1fr))}
figure{margin:0}
figure img{width:100%;border-radius:6px;display:block}
figcaption{font-size:.82rem;overflow-wrap:anywhere}
.matrix td{padding:0;width:22px;height:22px;text-align:center;font-size:.7rem;border:1px solid var(--line)}
.matrix th{font-weight:400;font-size:.75rem;padding:0 6px;border:0;white-space:nowrap}
.matrix th.top{writing-mode:vertical-rl;transform:rotate(180deg);padding:4px 0}
.bars{width:100%;max-width:820px;margin:12px 0}
.bars td{width:33%}
.bars i{display:inline-block;height:9px;border-radius:2px;background:var(--c0);margin-right:6px}
.sheet img{width:100%;min-width:900px;border-radius:6px;display:block}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);border:1px solid
var(--line);border-radius:8px;padding:10px;margin:0}
details summary{cursor:pointer}
.bad{color:var(--c7)}
""".strip()
