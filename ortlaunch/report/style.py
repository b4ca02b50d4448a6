"""The report's style sheet: light and dark by the reader's own setting, and narrow windows."""

from __future__ import annotations

# Told apart with every kind of colour blindness as long as there are few; from the ninth run on lines are dashed, too.
LIGHT = ("#2a78d6", "#eb6834", "#1baf7a", "#4a3aa7", "#eda100", "#e87ba4", "#008300", "#e34948")
DARK = ("#3987e5", "#d95926", "#199e70", "#9085e9", "#c98500", "#d55181", "#1d9a1d", "#e66767")


def _colors(colors: tuple[str, ...]) -> str:
    return "".join(f"--run{number}:{color};" for number, color in enumerate(colors))


STYLE = f"""
:root{{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--text:#1c1c1a;--soft:#5f5e5a;--line:#e1e0db;--warn:#9a3412}}
:root{{{_colors(LIGHT)}}}
@media(prefers-color-scheme:dark){{
:root{{--page:#161615;--card:#1f1f1e;--text:#ecebe6;--soft:#a9a8a1;--line:#3a3a37;--warn:#fdba74}}
:root{{{_colors(DARK)}}}
}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--text);font:14px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif}}
main{{max-width:1180px;margin:0 auto;padding:20px 16px 60px}}
h1{{font-size:22px;margin:0 0 4px}}
h2{{font-size:16px;margin:34px 0 10px}}
h3{{font-size:13px;font-weight:600;margin:0 0 6px;overflow-wrap:anywhere}}
p{{margin:4px 0}}
.soft{{color:var(--soft)}}
.warn{{color:var(--warn)}}
.legend{{position:sticky;top:0;z-index:1;padding:8px 0;background:var(--page)}}
.legend{{display:flex;flex-wrap:wrap;gap:4px 18px;margin:10px 0}}
.legend span{{display:inline-flex;align-items:center;gap:7px;overflow-wrap:anywhere}}
.legend svg{{flex:none;width:26px;height:8px}}
.grid{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px}}
.card,.wide{{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}}
.wide,.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%}}
th,td{{text-align:left;vertical-align:top;padding:4px 14px 4px 0;border-top:1px solid var(--line)}}
th,td{{white-space:pre-wrap;overflow-wrap:break-word}}
td.n{{padding-left:14px}}
.scroll table{{width:auto;min-width:70%}}
tr:first-child>*{{border-top:0}}
th{{font-weight:600}}
tbody th{{font-weight:400;color:var(--soft);min-width:110px}}
.wide td{{min-width:150px}}
.n{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
.bar{{height:6px;border-radius:3px;background:var(--run0);opacity:.75;min-width:2px}}
code,pre{{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
pre{{overflow-x:auto;margin:8px 0 0}}
summary{{cursor:pointer;color:var(--soft)}}
details{{margin:6px 0}}
.chart{{display:block;width:100%;height:auto}}
.chart text{{fill:var(--soft);font-size:11px}}
.chart .axis{{stroke:var(--line);stroke-width:1}}
.chart .curve{{fill:none;stroke-width:1.8;stroke-linejoin:round}}
.chart .hit{{fill:transparent}}
.chart .cursor{{stroke:var(--soft);stroke-width:1;opacity:0}}
.chart .at circle{{opacity:0}}
.chart .at:hover .cursor,.chart .at:hover circle{{opacity:1}}
@media(max-width:560px){{main{{padding:14px 10px 40px}}.card,.wide{{padding:10px}}.chart text{{font-size:15px}}}}
@media print{{body{{background:#fff}}.card,.wide{{break-inside:avoid}}}}
"""
