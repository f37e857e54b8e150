// Draws the report that is in the page: a figure and tables for each plan.
const report = JSON.parse(document.getElementById("report").textContent);
const KINDS = ["gather", "reduce", "all_reduce", "other"];
const figures = [];

function stepsTable() {
  const table = document.getElementById("steps");
  const names = ["step", "bound", "exposed", "peak", "tokens/s/rank", "MFU", "buckets"];
  table.append(row(["plan", ...names.map((n) => ({ n }))], "th"));
  for (const plan of report.plans) {
    const tokens = plan.tokens_per_second_per_rank;
    table.append(row([
      plan.name, { n: time(plan.step_us) }, { n: time(plan.step_lower_bound_us) },
      { n: time(plan.exposed_us) }, { n: size(plan.peak_bytes) },
      { n: tokens === null ? "-" : Math.round(tokens).toLocaleString("en") },
      { n: plan.mfu === null ? "-" : `${(100 * plan.mfu).toFixed(1)} %` },
      { n: String(plan.buckets.length) },
    ], "td"));
  }
}

function told(bucket) {
  const exposed = bucket.exposed_us > 0 && bucket.reason
    ? `<br><b>exposed ${time(bucket.exposed_us)}: ${bucket.reason}</b>` : "<br>hidden";
  return `<b>${bucket.kind} ${bucket.what}</b><br>${size(bucket.bytes)} ${bucket.dtype}, ` +
    `${bucket.ranks} ranks<br>${time(bucket.begin_us)} + ${time(bucket.duration_us)}, needed at ` +
    `${time(bucket.needed_us)}${exposed}`;
}

function bars(name, lane, spans, fill, legend) {
  return {
    type: "bar", orientation: "h", name, legendgroup: name, showlegend: legend,
    y: spans.map(() => lane), base: spans.map((s) => s.begin / 1e3),
    x: spans.map((s) => s.us / 1e3), width: 0.72,
    customdata: spans.map((s) => [s.text, s.bucket]),
    hovertemplate: "%{customdata[0]}<extra></extra>",
    marker: { color: color(fill), line: { width: 0.5, color: color("card") } }, meta: fill,
  };
}

function traces(plan) {
  const found = [bars("compute", "compute", plan.compute.map(([begin, us, label]) => (
    { begin, us, text: `${label}<br>${time(begin)} + ${time(us)}`, bucket: -1 })), "compute", true)];
  const spans = plan.buckets.map((b, bucket) => ({ ...b, text: told(b), bucket }));
  const stalls = spans.filter((b) => b.reason)
    .map((b) => ({ begin: b.needed_us, us: b.exposed_us, text: b.text, bucket: b.bucket }));
  if (stalls.length) found.push(bars("exposed wait", "compute", stalls, "exposed", true));
  const seen = new Set();
  for (const lane of plan.lanes) {
    for (const kind of KINDS) {
      const sent = spans.filter((b) => b.kind === kind && b.lane === lane)
        .map((b) => ({ begin: b.begin_us, us: b.duration_us, text: b.text, bucket: b.bucket }));
      if (sent.length) found.push(bars(kind, lane, sent, kind, !seen.has(kind)));
      if (sent.length) seen.add(kind);
    }
  }
  found.push({
    type: "scatter", mode: "lines", name: "memory", yaxis: "y2", meta: "memory",
    x: plan.memory.map((p) => p[0] / 1e3), y: plan.memory.map((p) => p[1] / 1e9),
    line: { shape: "hv", width: 1.5, color: color("memory") }, fill: "tozeroy",
    fillcolor: color("memory-fill"), hovertemplate: "%{y:.3~f} GB at %{x:.3~f} ms<extra></extra>",
  });
  return found;
}

function layout(plan) {
  const graphs = plan.graphs.slice(1).map((graph) => ({
    type: "line", xref: "x", yref: "paper", x0: graph.begin_us / 1e3, x1: graph.begin_us / 1e3,
    y0: 0, y1: 1, line: { color: color("soft"), width: 1, dash: "dot" },
  }));
  const names = plan.graphs.map((graph) => ({
    x: graph.begin_us / 1e3, y: 1, xref: "x", yref: "paper", text: graph.name, showarrow: false,
    xanchor: "left", yanchor: "bottom", font: { color: color("soft"), size: 12 },
  }));
  return {
    barmode: "overlay", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("ink"), family: "system-ui, DejaVu Sans, sans-serif", size: 12 },
    margin: { l: 92, r: 16, t: 24, b: 64 }, dragmode: "zoom", hovermode: "closest",
    legend: { orientation: "h", y: -0.2, x: 0 }, shapes: graphs, annotations: names,
    hoverlabel: { align: "left", bgcolor: color("card"), bordercolor: color("line"),
      font: { color: color("ink") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("soft"), activecolor: color("ink") },
    xaxis: axis({ title: { text: "ms", standoff: 4 }, anchor: "y2", range: [0, plan.step_us / 1e3] }),
    yaxis: axis({
      domain: [0.44, 1], fixedrange: true, categoryorder: "array", showgrid: false,
      categoryarray: [...plan.lanes].reverse().concat("compute"), automargin: true,
    }),
    yaxis2: axis({
      domain: [0, 0.36], title: { text: "GB" }, rangemode: "tozero", fixedrange: true,
    }),
  };
}

function bucketTable(figure, plan, graph) {
  const table = element("table");
  table.append(row(["kind", "parameters", { n: "bytes" }, { n: "starts" }, { n: "took" },
    { n: "needed" }, "hidden by", { n: "exposed" }, "reason"], "th"));
  plan.buckets.forEach((b, i) => {
    if (b.graph !== graph.name) return;
    const kind = element("span", { class: "line" }, element("span", {
      class: "kind", style: `background: var(--${b.kind})` }), b.kind);
    const reason = element("div", {}, b.reason || "");
    if (b.why) reason.append(element("div", { class: "why" }, b.why));
    const exposed = element("span", b.reason ? { class: "exposed" } : { class: "soft" },
      b.reason ? time(b.exposed_us) : "-");
    const made = row([kind, b.what, { n: size(b.bytes) }, { n: time(b.begin_us) },
      { n: time(b.duration_us) }, { n: time(b.needed_us) }, b.hidden_by, { n: exposed }, reason],
    "td", { class: "bucket", "data-bucket": i, tabindex: 0, title: b.parameters });
    made.addEventListener("click", () => figure.select(i));
    made.addEventListener("keydown", (e) => { if (e.key === "Enter") figure.select(i); });
    made.addEventListener("mouseenter", () => figure.point(i));
    made.addEventListener("mouseleave", () => figure.point(-1));
    table.append(made);
  });
  return element("div", { class: "scroll tall" }, table);
}

function sizes(title, found) {
  const entries = Object.entries(found).sort((a, b) => b[1] - a[1]).slice(0, 12);
  const most = entries.length ? entries[0][1] : 1;
  const grid = element("div", { class: "bars" });
  for (const [name, bytes] of entries) {
    grid.append(element("span", {}, name),
      element("i", { style: `width: ${Math.max(0.5, 100 * bytes / most)}%` }),
      element("span", { class: "soft" }, size(bytes)));
  }
  return element("div", {}, element("h3", {}, title), grid);
}

class Figure {
  constructor(plan) {
    this.plan = plan;
    this.marked = -1;
    this.selected = -1;
    this.node = element("div", { class: "figure" });
    this.section = element("section", { class: "card", "data-plan": plan.name },
      element("h2", {}, plan.name), this.node);
    for (const graph of plan.graphs.filter((found) => found.summary)) {
      this.section.append(element("h3", {}, `${graph.name}: ${graph.summary}`),
        bucketTable(this, plan, graph), element("div", { class: "pair" },
          sizes(`at the peak of ${graph.name}, by kind`, graph.by_kind),
          sizes("by module", graph.by_module)));
    }
  }

  async draw() {
    const config = {
      displaylogo: false, responsive: true, scrollZoom: true,
      ...(innerWidth < 700 ? { displayModeBar: false } : {}),
    };
    await Plotly.newPlot(this.node, traces(this.plan), layout(this.plan), config);
    this.node.on("plotly_hover", (e) => this.row(e.points[0].customdata?.[1] ?? -1));
    this.node.on("plotly_unhover", () => this.row(-1));
    this.node.on("plotly_click", (e) => this.select(e.points[0].customdata?.[1] ?? -1));
    this.node.on("plotly_relayout", (change) => follow(this, change));
  }

  row(bucket) {
    for (const found of this.section.querySelectorAll("tr.bucket")) {
      found.classList.toggle("hovered", Number(found.dataset.bucket) === bucket);
    }
  }

  // Mark the transfer, from its start to its wait, of the bucket that is pointed at or selected.
  point(bucket) {
    const shown = bucket >= 0 ? bucket : this.selected;
    if (shown === this.marked) return;
    this.marked = shown;
    const shapes = layout(this.plan).shapes;
    if (shown >= 0) {
      const b = this.plan.buckets[shown];
      const until = Math.max(b.end_us, b.needed_us);
      const frame = { type: "rect", xref: "x", yref: "paper", y0: 0, y1: 1 };
      shapes.push({ ...frame, x0: b.launch_us / 1e3, x1: until / 1e3, layer: "below",
        fillcolor: color("mark"), line: { width: 0 } });
      shapes.push({ ...frame, x0: b.begin_us / 1e3, x1: b.end_us / 1e3, y0: 0.44,
        line: { color: color(b.kind), width: 2 }, fillcolor: "rgba(0,0,0,0)" });
    }
    Plotly.relayout(this.node, { shapes });
  }

  select(bucket) {
    this.selected = this.selected === bucket ? -1 : bucket;
    for (const found of this.section.querySelectorAll("tr.bucket")) {
      const is = Number(found.dataset.bucket) === this.selected;
      found.classList.toggle("selected", is);
      if (is) found.scrollIntoView({ block: "nearest" });
    }
    this.marked = -2;
    this.point(-1);
  }

  async recolor() {
    await Plotly.react(this.node, traces(this.plan), {
      ...layout(this.plan), xaxis: axis({ ...layout(this.plan).xaxis, range: this.node.layout.xaxis.range }),
    });
    this.marked = -2;
    this.point(-1);
  }
}

// Plans that are compared are zoomed together.
function follow(figure, change) {
  const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  const reset = change["xaxis.autorange"] === true;
  if (range[0] === undefined && !reset) return;
  for (const other of figures) {
    const whole = [0, Math.max(...report.plans.map((plan) => plan.step_us)) / 1e3];
    const wanted = reset ? whole : range;
    const has = other.node.layout.xaxis.range;
    if (Math.abs(has[0] - wanted[0]) + Math.abs(has[1] - wanted[1]) > 1e-9) {
      Plotly.relayout(other.node, { "xaxis.range": wanted });
    }
  }
}

async function draw(wanted) {
  stepsTable();
  const longest = Math.max(...report.plans.map((plan) => plan.step_us));
  figures.push(...report.plans.map((plan) => new Figure(plan)));
  // All of them first: how wide a figure is depends on how many there are.
  document.getElementById("plans").append(...figures.map((figure) => figure.section));
  for (const figure of figures) {
    await figure.draw();
    await Plotly.relayout(figure.node, { "xaxis.range": [0, longest / 1e3] });
  }
  if (wanted.has("bucket")) figures[0].select(Number(wanted.get("bucket")));
}

start(draw, () => Promise.all(figures.map((figure) => figure.recolor())));
