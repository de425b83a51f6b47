"""The style sheet of the report page, for narrow and wide screens, light and dark color schemes, and print."""

from collections.abc import Mapping

from mmtrain.report.drawing import DARK_COLORS, LIGHT_COLORS, Color

_COLOR_CLASSES = "".join(f".{color}{{fill:var(--{color});color:var(--{color})}}" for color in LIGHT_COLORS)


def _css_variables(colors: Mapping[Color, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colors.items())


STYLE = f"""
:root{{color-scheme:light dark;{_css_variables(LIGHT_COLORS)}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_css_variables(DARK_COLORS)}}}}}
*{{box-sizing:border-box}}
body{{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);margin:0;
print-color-adjust:exact;-webkit-print-color-adjust:exact}}
main{{max-width:1032px;margin:0 auto;padding:16px}}
h1{{font-size:24px;margin:8px 0;overflow-wrap:anywhere}}h2{{font-size:18px;margin:36px 0 8px}}
h3{{font-size:14px;margin:18px 0 6px;font-weight:600}}p{{color:var(--soft);margin:6px 0;overflow-wrap:anywhere}}
section{{break-inside:avoid-page}}summary{{color:var(--soft);cursor:pointer;margin:8px 0}}
.draw,.scroll{{overflow-x:auto;max-width:100%}}.draw:focus-visible{{outline:2px solid var(--u0)}}
svg{{display:block;width:100%;min-width:720px;font:12px system-ui,sans-serif}}svg[style]{{min-width:0;max-width:none}}
{_COLOR_CLASSES}
.path{{fill:none}}{"".join(f".{p}.path{{stroke:var(--{p})}}.{p}.edge{{stroke:var(--{p})}}" for p in LIGHT_COLORS)}
.curves{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:0 20px}}
.curves .draw svg{{min-width:0}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:8px;margin:16px 0}}
.figures div{{border:1px solid var(--line);border-radius:6px;padding:8px 12px}}
dt{{color:var(--soft);font-size:13px}}dd{{margin:0}}dd b{{font-size:20px;font-weight:600;display:block}}
dd span{{font-size:13px;display:block}}dd small{{color:var(--soft);font-size:11.5px;line-height:1.35;display:block;
margin-top:4px}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
td,th{{padding:4px 16px 4px 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}}
td:first-child,th:first-child,.wordy td:last-child,.wordy th:last-child{{text-align:left}}
th{{color:var(--soft);font-weight:500}}.wordy td{{vertical-align:top}}
.wordy td:first-child{{white-space:normal;min-width:150px}}.wordy td:last-child{{white-space:normal;min-width:220px}}
.bars{{width:100%}}.bars .bar{{width:70%;padding-right:6px}}.bar div{{position:relative;padding:2px 0}}
.bar i{{display:block;height:7px;min-width:1px;margin:1px 0;background:var(--u0)}}
.bar i.predicted,.key.predicted{{opacity:.4}}.key{{color:var(--u0)}}
.bar .parts{{display:flex}}.bar u{{display:block;height:12px;background:currentColor}}
.bar s{{position:absolute;top:-2px;bottom:-2px;border-right:2px solid var(--limit)}}
@media(max-width:600px){{main{{padding:12px}}td,th{{padding-right:9px;font-size:13px}}
.figures{{grid-template-columns:1fr 1fr}}.bars .bar{{width:40%;min-width:90px}}
.wordy,.wordy thead,.wordy tbody{{display:block}}.wordy td,.wordy th{{border:0}}
.wordy tr{{display:grid;grid-template-columns:1fr auto auto;border-bottom:1px solid var(--line)}}
.wordy tr :last-child{{grid-column:1/-1}}}}
"""
