"""How the report looks, light and dark. One letter per colour: a training, b held-out, c rollout, d learner."""

CSS = """
:root{--bg:#fbfbf9;--card:#fff;--ink:#1d2126;--soft:#68707a;--line:#e6e6e1;
 --a:#2f6fde;--b:#d9601a;--c:#0f8c7f;--d:#7a4fcf;--limit:#c2374b;--good:#1d8348;--bad:#c2374b;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1b1f24;--ink:#e6e8ea;--soft:#98a1ab;--line:#2c323a;
 --a:#6ea3ff;--b:#ff9d5c;--c:#3fc9b8;--d:#b394ff;--limit:#ff7386;--good:#58d68d;--bad:#ff7386}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:26px;margin:0;letter-spacing:-.01em}
h2{font-size:17px;margin:32px 0 10px}
header p{margin:2px 0 0;color:var(--soft)}
.badge{font:600 12px/1 system-ui,sans-serif;padding:4px 9px;border-radius:20px;border:1px solid;vertical-align:middle;
 color:var(--soft)}
.badge.finished{color:var(--good)}.badge.failed,.badge.unbalanced{color:var(--bad)}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0 14px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 16px;min-width:130px}
.tile span{display:block;color:var(--soft);font-size:12.5px}.tile b{font-size:20px;font-weight:600;white-space:nowrap}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:14px}
.hero{grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px 8px}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 14px}
.keys{color:var(--soft);font-size:13px}.key{margin-left:12px;white-space:nowrap}
.key i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}
.note{color:var(--soft);font-size:12.5px;margin:0}
svg{width:100%;height:auto;display:block;margin-top:4px}
.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:11.5px}
.value{fill:var(--ink);font-size:12px;font-weight:600}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.touch{fill:transparent}
table{border-collapse:collapse;width:100%;background:var(--card);border:1px solid var(--line);border-radius:10px}
th,td{text-align:left;padding:6px 14px;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
tr:last-child>*{border-bottom:0}th{font-weight:500;color:var(--soft);white-space:nowrap;width:1%}
td{font-variant-numeric:tabular-nums}
details{margin-top:26px}summary{cursor:pointer;font-weight:600;margin-bottom:8px}
pre{
 background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px;overflow:auto;font-size:13px}
footer{color:var(--soft);font-size:12.5px;margin-top:28px}
"""
