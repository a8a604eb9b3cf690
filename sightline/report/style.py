"""The style of a report: light and dark, wide and narrow; and of a part of it inside a notebook."""

# Colours by name are those of the page or of the notebook.
_PARTS = """
h3{font-size:.95rem;margin:0 0 6px}
p{overflow-wrap:anywhere}
.dim,small{color:var(--dim)}
.big{display:flex;flex-wrap:wrap;gap:10px;margin:16px 0}
.big div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 16px}
.big b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.charts{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
.two{display:grid;gap:24px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));align-items:start}
.two>div{min-width:0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;min-width:0}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--dim);font-size:12px}
svg polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
svg .faint{stroke-opacity:.4;stroke-width:1.3}
svg .grid{stroke:var(--line)}
.legend{margin:4px 0 0;font-size:.85rem}
.legend span{display:inline-block;margin-right:14px;overflow-wrap:anywhere}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.legend i.faint{opacity:.4}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem}
td,th{padding:4px 12px 4px 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--dim)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td.name{color:var(--dim);white-space:nowrap}
td.wrap{overflow-wrap:anywhere}
.bar{display:inline-block;min-width:84px;padding:0 6px;border-radius:3px;text-align:right;
  background:linear-gradient(to right,color-mix(in srgb,var(--c0) 26%,transparent) var(--v),var(--card) var(--v))}
.samples{display:grid;gap:18px 14px;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));margin-top:8px}
.samples.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,520px),1fr))}
figure{margin:0;min-width:0}
.tiles{display:flex;flex-wrap:wrap;gap:4px}
.tiles span{flex:1 1 150px;min-width:0;max-width:360px}
.samples.wide .tiles span{flex:1 1 160px}
.tiles img{width:100%;border-radius:5px;display:block}
figcaption{font-size:.85rem;line-height:1.4;margin-top:4px;overflow-wrap:anywhere}
.matrix{border-collapse:separate;border-spacing:1px}
.matrix td{padding:0;min-width:26px;width:26px;height:24px;text-align:center;vertical-align:middle;font-size:.72rem;
  border:0;background:var(--card);font-variant-numeric:tabular-nums}
.matrix td.wrong{background:color-mix(in srgb,var(--c7) var(--v),var(--card))}
.matrix td.good{background:color-mix(in srgb,var(--c0) calc(var(--v)*.6),var(--card))}
.matrix th{font-weight:400;font-size:.75rem;padding:0 8px 0 0;border:0;white-space:nowrap;vertical-align:middle}
.matrix th.top{padding:0 0 6px;vertical-align:bottom}
.matrix th.top span{writing-mode:vertical-rl;transform:rotate(180deg);max-height:130px;overflow:hidden}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);border:1px solid var(--line);border-radius:8px;
  padding:10px;margin:0}
details{margin-top:8px}
summary{cursor:pointer;color:var(--c0)}
summary:hover{text-decoration:underline}
.bars{width:100%;max-width:820px;margin:12px 0}
.bars td{width:33%}
.bars i{display:inline-block;height:9px;border-radius:2px;background:var(--c0);margin-right:6px}
.sheet img{width:100%;min-width:900px;border-radius:6px;display:block}
.bad{color:var(--c7)}
@media(max-width:560px){svg{overflow:visible}svg text{font-size:19px}
  .samples.wide .tiles span{flex-basis:100%;max-width:none}.big div{flex:1 1 40%;padding:8px 12px}
  .big b{font-size:1.15rem}.bar{min-width:64px}}
""".strip()

_PAGE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1d2127;--dim:#5f6876;--line:#dde2e8;--card:#f7f8fa;--good:#059669;
  --c0:#2563eb;--c1:#d97706;--c2:#059669;--c3:#db2777;--c4:#7c3aed;--c5:#0891b2;--c6:#65a30d;--c7:#dc2626}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e8ebef;--dim:#9aa4b2;--line:#323943;--card:#1b1f25;
  --good:#34d399;--c0:#60a5fa;--c1:#fbbf24;--c2:#34d399;--c3:#f472b6;--c4:#a78bfa;--c5:#22d3ee;--c6:#a3e635;
  --c7:#f87171}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:36px 0 12px;padding-bottom:4px;border-bottom:1px solid var(--line)}
.note{display:inline-block;margin:0 0 12px;padding:4px 12px;border-radius:6px;font-size:.9rem;
  background:color-mix(in srgb,var(--c0) 12%,transparent)}
.state{display:inline-block;vertical-align:middle;font-size:.8rem;font-weight:600;line-height:1;padding:5px 10px;
  border-radius:20px;color:var(--dim);background:color-mix(in srgb,currentColor 14%,transparent)}
.state.finished{color:var(--good)}
.state.running{color:var(--c0)}
.state.failed,.state.damaged{color:var(--c7)}
nav{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:.9rem}
nav a{color:var(--c0);text-decoration:none}
nav a:hover{text-decoration:underline}
""".strip()

STYLE = f"{_PAGE}\n{_PARTS}"

# Below one class, so that the notebook keeps its own style; named twice, it wins over that of Jupyter. The theme is
# known by the colour of the text alone, hence colours between light and dark.
_INLINE = """
--dim:color-mix(in srgb,currentColor 70%,transparent);--line:color-mix(in srgb,currentColor 20%,transparent);
--card:color-mix(in srgb,currentColor 4%,transparent);--good:#059669;
--c0:#3b82f6;--c1:#d97706;--c2:#059669;--c3:#e0408a;--c4:#8b5cf6;--c5:#0891b2;--c6:#65a30d;--c7:#e5484d;
max-width:1080px;font:14px/1.5 system-ui,sans-serif;
""".strip()
_NARROW = """
>*+*{margin-top:14px}
h3{font-weight:600}
>h3{margin-top:18px}
.samples{grid-template-columns:repeat(auto-fill,minmax(130px,1fr))}
.drawn{display:flex;flex-wrap:wrap;gap:18px 14px}
.drawn figure{min-width:min(100%,240px);max-width:100%}
.drawn figure:not(.wide,:only-child){max-width:300px}
.drawn img{max-width:100%;border-radius:5px;display:block}
.drawn figcaption{width:0;min-width:100%}
.samples.wide{grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr))}
""".strip()

INLINE = f".sightline.sightline{{{_INLINE}\n{_PARTS}\n{_NARROW}}}"
