"""What was measured as one HTML page that needs nothing else."""

import html
from datetime import datetime
from string import Template

from sd_tf.bench.report import STAGES, gigabytes, machine, number, remarks, rows, work

STARTUP = {
    "other": "start of Python",
    "import_seconds": "import",
    "load_seconds": "load",
    "first_call_seconds": "first call",
}


def page(results: dict) -> str:
    variants = results["variants"]
    date = datetime.fromisoformat(results["date"])
    batch = variants[0]["batch_size"]
    each = "the picture" if batch == 1 else f"all {batch} pictures"
    return _PAGE.substitute(
        title=escape(f"sd_tf benchmark, {date:%Y-%m-%d}"),
        style=STYLE,
        work=escape(work(results)),
        machine=escape(machine(results)),
        date=f'<time datetime="{escape(results["date"])}">{date:%d %B %Y, %H:%M} UTC</time>',
        headline=_headline(variants),
        remarks=remark_list(remarks(results)),
        warm=bars(variants),
        warm_note=escape(
            f"Seconds for {each}, from the prompt to pixels in memory: the median of "
            f"{variants[0]['repeat']} runs; the thin line spans the fastest to the slowest."
        ),
        stages=_stacks(variants, STAGES, _stage_seconds),
        startup=_stacks(variants, STARTUP, _startup_seconds),
        table=_table(results),
        pictures="".join(_pictures(variant) for variant in variants),
        prompt=escape(variants[0]["prompt"]),
        seeds=escape(_seeds(variants[0])),
        setup=_setup(results),
    )


def escape(text) -> str:
    return html.escape(str(text))


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}%"


def _headline(variants: list[dict]) -> str:
    fastest = min(variants, key=lambda v: v["warm"]["median"])
    least = min(variants, key=lambda v: v["peak_memory_bytes"])
    soonest = min(variants, key=lambda v: v["first_image_seconds"])
    ratio = variants[0]["warm"]["median"] / fastest["warm"]["median"]
    against = f"warm, {ratio:.2f} × as fast as {variants[0]['name']}" if ratio > 1 else "warm"
    cards = [
        (f"{number(fastest['warm']['median'])} s", fastest["name"], against),
        (f"{number(fastest['images_per_second'])}", "pictures per second", fastest["name"]),
        (f"{number(soonest['first_image_seconds'])} s", "to the first picture", soonest["name"]),
        (f"{gigabytes(least['peak_memory_bytes'])} GB", "peak memory", least["name"]),
    ]
    return "".join(
        f"<li><b>{escape(figure)}</b><span>{escape(what)}</span><small>{escape(who)}</small></li>"
        for figure, what, who in cards
    )


def remark_list(found: list[str]) -> str:
    if not found:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in found)
    return f'<ul class="remarks">{items}</ul>'


def bars(variants: list[dict]) -> str:
    longest = max(v["warm"]["max"] for v in variants)
    bars = []
    for v in variants:
        warm = v["warm"]
        width, start = percent(warm["median"], longest), percent(warm["min"], longest)
        spread = percent(warm["max"] - warm["min"], longest)
        bars.append(
            f'<div class="row"><dt>{escape(v["name"])}</dt><dd><div class="track">'
            f'<div class="bar" style="width:{width}"></div>'
            f'<div class="whisker" style="left:{start};width:{spread}"></div></div>'
            f"<output>{number(warm['median'])} s</output></dd></div>"
        )
    return f'<dl class="chart">{"".join(bars)}</dl>'


def _stage_seconds(variant: dict) -> dict[str, float]:
    seconds = {name: figures["median"] for name, figures in variant["stages"].items()}
    rest = variant["warm"]["median"] - sum(seconds.values())
    return {**seconds, "other": max(rest, 0.0)}


def _startup_seconds(variant: dict) -> dict[str, float]:
    seconds = {name: variant[name] for name in STARTUP if name != "other"}
    rest = variant["first_image_seconds"] - sum(seconds.values())
    return {"other": max(rest, 0.0), **seconds}


def _stacks(variants: list[dict], names: dict[str, str], seconds_of) -> str:
    """Stacked bars; parts in the order of `names`, coloured by their place in it."""
    parts = {v["name"]: seconds_of(v) for v in variants}
    longest = max(sum(seconds.values()) for seconds in parts.values())
    seen = [n for n in names if any(s.get(n, 0) > longest * 1e-3 for s in parts.values())]
    bars = []
    for name, seconds in parts.items():
        segments = "".join(
            f'<div class="{part}" style="width:{percent(seconds.get(part, 0), longest)}" '
            f'title="{escape(names[part])}: {number(seconds.get(part, 0))} s"></div>'
            for part in seen
        )
        total = number(sum(seconds.values()))
        bars.append(
            f'<div class="row"><dt>{escape(name)}</dt><dd><div class="track stack">{segments}</div>'
            f"<output>{total} s</output></dd></div>"
        )
    legend = "".join(f'<li><i class="{part}"></i>{escape(names[part])}</li>' for part in seen)
    return f'<ul class="legend">{legend}</ul><dl class="chart">{"".join(bars)}</dl>'


def _table(results: dict) -> str:
    head = "".join(f'<th scope="col">{escape(v["name"])}</th>' for v in results["variants"])
    body = []
    for label, cells in rows(results):
        depth = (len(label) - len(label.lstrip())) // 2
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body.append(
            f'<tr class="depth{depth}"><th scope="row">{escape(label.strip())}</th>{row}</tr>'
        )
    return (
        f'<table><thead><tr><th scope="col">Seconds</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _seeds(variant: dict) -> str:
    first, count = variant["seed"], variant["batch_size"]
    return f"seed {first}" if count == 1 else f"seeds {first} to {first + count - 1}"


def _pictures(variant: dict) -> str:
    """KerasCV draws a whole batch from one seed, we draw each picture from its own."""
    images = []
    for index, picture in enumerate(variant["pictures"]):
        seed = variant["seed"] + (0 if variant["engine"] == "kerascv" else index)
        alt = f"{variant['name']}, seed {seed}: {variant['prompt']}"
        images.append(
            f'<img src="data:image/png;base64,{picture}" alt="{escape(alt)}" '
            f'width="{variant["width"]}" height="{variant["height"]}">'
        )
    return (
        f'<figure><div class="strip">{"".join(images)}</div>'
        f"<figcaption>{escape(variant['name'])}</figcaption></figure>"
    )


def _setup(results: dict) -> str:
    h = results["hardware"]
    facts = {
        "processor": f"{h['cpu']}, {h['cores']} cores",
        "memory": f"{h['memory_bytes'] / 1e9:.1f} GB",
        "devices": ", ".join(h["devices"]),
        "system": h["system"],
        "load before": f"{results['load_average']:.2f}",
        "order": " → ".join(v["name"] for v in results["variants"]),
    }
    flags = " ".join(
        f"--{name}={value}" if not isinstance(value, bool) else f"--{name}"
        for name, value in results["flags"].items()
        if value is not None and value is not False
    )
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in {**facts, **results["versions"], "flags": flags}.items()
    )


STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f5f2; --card: #fff; --ink: #1c1b1a; --soft: #67635d; --line: #e2dfd8;
  --track: #efede8; --main: #2f6db5; --mark: #1c1b1a; --warn: #8a5a00; --warn-page: #fff6e0;
  --a: #7a5bc7; --b: #c2549d; --c: #2f6db5; --d: #1f8f6b; --e: #a8a39a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #141414; --card: #1e1e1f; --ink: #eceae6; --soft: #a39f98; --line: #343332;
    --track: #2a2a2b; --main: #6ba6ea; --mark: #eceae6; --warn: #f0c66b; --warn-page: #2c2618;
    --a: #a58df0; --b: #e07fc0; --c: #6ba6ea; --d: #52bd97; --e: #77736d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 58rem; margin: 0 auto; }
header p { margin: .15rem 0; color: var(--soft); }
header .work { color: var(--ink); font-size: 1.1rem; }
h1 { margin: 0 0 .4rem; font-size: 2rem; line-height: 1.15; letter-spacing: -.02em; }
h2 { margin: 0 0 .2rem; font-size: 1.1rem; letter-spacing: -.01em; }
section {
  margin-top: 1.1rem; padding: 1.3rem 1.4rem 1.4rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 12px;
}
section > p { margin: 0 0 1rem; color: var(--soft); font-size: .9rem; }
ul, dl, dd, figure { margin: 0; padding: 0; }
ul { list-style: none; }
.headline {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1px;
  margin-top: 1.5rem; overflow: hidden; background: var(--line);
  border: 1px solid var(--line); border-radius: 12px;
}
.headline li {
  display: flex; flex-direction: column; padding: 1rem 1.2rem; background: var(--card);
}
.headline b { font-size: 1.6rem; line-height: 1.25; letter-spacing: -.02em; }
.headline small { color: var(--soft); font-size: .82rem; }
.remarks {
  margin-top: 1.1rem; padding: .8rem 1.2rem; color: var(--warn); background: var(--warn-page);
  border-radius: 12px; font-size: .9rem;
}
.remarks li + li { margin-top: .4rem; }
.row { display: grid; grid-template-columns: 10.5rem 1fr; align-items: center; margin-top: .55rem; }
.row dt { font-size: .92rem; white-space: nowrap; }
.row dd { display: flex; align-items: center; }
.track {
  position: relative; flex: 1; height: 1.5rem; background: var(--track); border-radius: 5px;
}
.bar { height: 100%; background: var(--main); border-radius: 5px; }
.whisker {
  position: absolute; top: 50%; height: .8rem; min-width: 2px; transform: translateY(-50%);
  border: solid var(--mark); border-width: 0 2px;
  background: linear-gradient(var(--mark), var(--mark)) center / 100% 2px no-repeat;
}
.stack { display: flex; overflow: hidden; }
.stack div + div { box-shadow: inset 1px 0 var(--card); }
.chart output {
  flex: none; width: 5.2rem; text-align: right; font-variant-numeric: tabular-nums;
  font-size: .92rem;
}
.legend {
  display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem; color: var(--soft);
}
.legend i {
  display: inline-block; width: .7rem; height: .7rem; margin-right: .4rem; border-radius: 2px;
}
.text_encoder { background: var(--a); } .image_encoder { background: var(--b); }
.diffusion_model { background: var(--c); } .decoder { background: var(--d); }
.other { background: var(--e); } .import_seconds { background: var(--a); }
.load_seconds { background: var(--d); } .first_call_seconds { background: var(--c); }
.scroll { overflow-x: auto; }
table {
  width: 100%; border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums;
}
th, td {
  padding: .34rem 0 .34rem 1.1rem; text-align: right; white-space: nowrap; font-weight: 400;
}
th:first-child {
  position: sticky; left: 0; padding-left: 0; text-align: left; background: var(--card);
}
thead th {
  border-bottom: 1px solid var(--ink); font-weight: 600; vertical-align: bottom;
  white-space: normal;
}
tbody tr.depth0 > * { border-top: 1px solid var(--line); }
tbody tr:first-child > * { border-top: 0; }
.depth0 th { font-weight: 600; }
.depth1 th, .depth2 th, .depth1 td, .depth2 td { color: var(--soft); }
.depth1 th:first-child { padding-left: 1.1rem; } .depth2 th:first-child { padding-left: 2.2rem; }
.gallery {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1.1rem;
}
.strip { display: flex; flex-wrap: wrap; gap: .4rem; }
.strip img { flex: 1 1 6rem; min-width: 0; max-width: 100%; height: auto; border-radius: 6px; }
figcaption { margin-top: .35rem; font-size: .88rem; color: var(--soft); }
blockquote { margin: .2rem 0 1rem; padding-left: .9rem; border-left: 3px solid var(--main); }
blockquote small { display: block; color: var(--soft); }
.setup div {
  display: grid; grid-template-columns: 9.5rem 1fr; padding: .22rem 0; font-size: .9rem;
}
.setup dt { color: var(--soft); }
.setup dd { min-width: 0; overflow-wrap: anywhere; }
@media (max-width: 36rem) {
  body { padding: 1.5rem .8rem 3rem; }
  section { padding: 1.1rem 1rem 1.2rem; }
  .row { grid-template-columns: 1fr; margin-top: .7rem; }
  .chart output { width: 4.6rem; }
  .headline { grid-template-columns: 1fr 1fr; }
  .headline li { padding: .8rem .9rem; }
  .headline b { font-size: 1.3rem; }
  .setup div { grid-template-columns: 6.5rem 1fr; }
}
"""

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<header>
<h1>Benchmark</h1>
<p class="work">$work</p>
<p>$machine</p>
<p>$date</p>
</header>
<ul class="headline">$headline</ul>
$remarks
<section>
<h2>Warm runs</h2>
<p>$warm_note</p>
$warm
</section>
<section>
<h2>Where the time goes</h2>
<p>Medians of the same runs, by stage.</p>
$stages
</section>
<section>
<h2>Until the first picture</h2>
<p>From the start of Python in a new process; the first call includes what XLA compiles.</p>
$startup
</section>
<section>
<h2>All figures</h2>
<p>A model call is one guided evaluation of the diffusion model, of both halves.</p>
<div class="scroll" tabindex="0">$table</div>
</section>
<section>
<h2>Pictures</h2>
<blockquote>$prompt <small>$seeds</small></blockquote>
<div class="gallery">$pictures</div>
</section>
<section>
<h2>Setup</h2>
<dl class="setup">$setup</dl>
</section>
</main>
</body>
</html>
""")
