"""The page that `report/html.py` fills in. A string, so that no data file has to be found at run time."""

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Precision plan: {{ plan.dtype }}, {{ plan.rules }}</title>
<style>
:root { --ink: #1c2430; --soft: #667085; --line: #e3e8ef; --page: #f6f8fb; --card: #ffffff;
        --low: #12805c; --fp32: #b7791f; --keep: #8a94a6; --accent: #3056d3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf2; --soft: #98a2b3; --line: #2b3445; --page: #10151f; --card: #182030;
          --low: #3ecf9a; --fp32: #f0b44c; --keep: #8a94a6; --accent: #8fa8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 36px 0 10px; }
p.facts { color: var(--soft); margin: 0 0 20px; } p.facts b { color: var(--ink); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.card strong { display: block; font-size: 24px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; }
.bar { display: flex; height: 10px; border-radius: 5px; overflow: hidden; background: var(--line); min-width: 80px; }
.bar i { display: block; height: 100%; } .wide { margin: 16px 0 6px; height: 14px; border-radius: 7px; }
i.low, b.low { background: var(--low); } i.fp32, b.fp32 { background: var(--fp32); }
i.keep, b.keep { background: var(--keep); }
.key { color: var(--soft); font-size: 13px; } .key b { display: inline-block; width: 10px; height: 10px;
  border-radius: 3px; margin: 0 5px 0 12px; } .key b:first-child { margin-left: 0; }
.frame { background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: var(--soft); font-weight: 600; white-space: nowrap; position: sticky; top: 0;
     background: var(--card); }
th, td { padding: 7px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
tbody tr:hover td { background: color-mix(in srgb, var(--accent) 7%, transparent); }
code { font: 12px/1.5 ui-monospace, "Cascadia Code", Menlo, monospace; overflow-wrap: anywhere; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.number { text-align: right; }
.tag { font-weight: 600; white-space: nowrap; } .tag.low { color: var(--low); } .tag.fp32 { color: var(--fp32); }
.tag.keep { color: var(--keep); } .soft { color: var(--soft); font-weight: 400; }
.tools { display: flex; gap: 14px; align-items: center; flex-wrap: wrap; margin-bottom: 10px; }
.tools input[type=search] { flex: 1 1 260px; font: inherit; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: 7px 12px; }
</style>
</head>
<body>
<main>
<h1>Precision plan</h1>
<p class="facts">dtype <b>{{ plan.dtype }}</b> · rules <b>{{ plan.rules }}</b> · device <b>{{ plan.device }}</b></p>

<div class="cards">
<div class="card"><strong>{{ plan.nodes | length }}</strong><span>nodes</span></div>
<div class="card"><strong>{{ low_share }} %</strong><span>of them in {{ plan.dtype }} ({{ counts.low }})</span></div>
<div class="card"><strong>{{ plan.casts | length }}</strong><span>casts\
{% if own_casts %}, {{ own_casts }} the model's own{% endif %}</span></div>
<div class="card"><strong>{{ plan.cast_bytes | bytes }}</strong><span>moved by casts in one forward</span></div>
</div>

<div class="bar wide">
{% for precision in precisions %}
<i class="{{ precision }}" style="flex: {{ counts[precision] }} 0 0"></i>
{% endfor %}
</div>
<p class="key">
{% for precision in precisions %}
<b class="{{ precision }}"></b>{{ precision }} {{ counts[precision] }}
{% endfor %}
</p>

<h2>Op families</h2>
<div class="frame"><table>
<thead><tr><th>family</th><th class="number">nodes</th><th class="number">low</th><th class="number">fp32</th>\
<th class="number">keep</th><th style="width: 40%"></th></tr></thead>
<tbody>
{% for family in families %}
<tr><td>{{ family.name }}</td><td class="number">{{ family.total }}</td>
{% for precision in precisions %}<td class="number">{{ family.counts[precision] }}</td>{% endfor %}
<td><div class="bar">
{% for precision in precisions %}
<i class="{{ precision }}" style="flex: {{ family.counts[precision] }} 0 0"></i>
{% endfor %}
</div></td></tr>
{% endfor %}
</tbody></table></div>

<h2>Nodes</h2>
<div class="tools">
<input type="search" id="filter" placeholder="Filter by node, op, module, rule or reason" aria-label="Filter the nodes">
{% for precision in precisions %}
<label><input type="checkbox" class="precision" value="{{ precision }}" checked> {{ precision }}</label>
{% endfor %}
<span class="soft" id="shown"></span>
</div>
<div class="frame"><table id="nodes">
<thead><tr><th>node</th><th>op</th><th>module</th><th>precision</th><th>gives</th><th>rule</th><th>reason</th>\
<th>source</th></tr></thead>
<tbody>
{% for node in plan.nodes %}
<tr data-precision="{{ node.precision }}"><td><code>{{ node.name }}</code></td><td><code>{{ node.op }}</code></td>
<td><code>{{ node.module }}</code></td><td class="tag {{ node.precision }}">{{ node.precision }}\
{% if node.asked and node.asked != node.precision %} <span class="soft">({{ node.asked }})</span>{% endif %}</td>
<td>{% for _, dtype in node.outputs %}{{ dtype }}{% if not loop.last %}, {% endif %}{% endfor %}</td>
<td><code title="{{ node.rule }}">{{ node.rule | place }}</code></td><td>{{ node.reason }}</td>
<td><code class="soft" title="{{ node.source }}">{{ node.source | place }}</code></td></tr>
{% endfor %}
</tbody></table></div>

<h2>Casts</h2>
{% if plan.casts %}
<div class="frame"><table>
<thead><tr><th>value</th><th>from</th><th>to</th><th class="number">bytes</th><th style="width: 18%"></th><th>for</th>\
<th>by</th></tr></thead>
<tbody>
{% for cast in plan.casts %}
<tr><td><code>{{ cast.value }}</code></td><td>{{ cast.src }}</td><td>{{ cast.dst }}</td>
<td class="number" title="{{ cast.bytes }}">{{ cast.bytes | bytes }}</td>
<td><div class="bar"><i class="low" style="width: {{ (100 * cast.bytes / largest_cast) | round(1) }}%"></i></div></td>
<td><code>{% for user, index in cast.users %}{{ user }}[{{ index }}]{% if not loop.last %}, {% endif %}{% endfor %}\
</code></td><td>{{ "the model" if cast.explicit else "the plan" }}</td></tr>
{% endfor %}
</tbody></table></div>
{% else %}
<p class="soft">None.</p>
{% endif %}
</main>
<script>
const rows = [...document.querySelectorAll("#nodes tbody tr")].map((row) => [row, row.textContent.toLowerCase()]);
const filter = document.getElementById("filter");
const boxes = [...document.querySelectorAll("input.precision")];
function update() {
  const words = filter.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const wanted = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
  let shown = 0;
  for (const [row, text] of rows) {
    row.hidden = !(wanted.has(row.dataset.precision) && words.every((word) => text.includes(word)));
    shown += !row.hidden;
  }
  document.getElementById("shown").textContent = shown + " of " + rows.length;
}
filter.addEventListener("input", update);
boxes.forEach((box) => box.addEventListener("change", update));
update();
</script>
</body>
</html>
"""
