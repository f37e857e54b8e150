// The map: cells that fit in their colours, those that do not hatched, those on the front framed.
const MOST_TEXTS = 2000;
const LEAST_PX = 9;
const MARGIN = { l: 62, r: 8, t: 6, b: 50 };
const map = { node: document.getElementById("map") };

// The cells of the map, and where they are drawn. The longer axis goes down a narrow screen.
function lay() {
  let [x, y] = state.pair;
  const narrow = innerWidth < 700;
  if (narrow && values[x].length > values[y].length) [x, y] = [y, x];
  const at = { ...state.at };
  map.rows = values[y].map((_, j) => values[x].map((_, i) => {
    [at[x], at[y]] = [i, j];
    return cells[slot(at)];
  }));
  const [nx, ny] = [values[x].length, values[y].length];
  const width = Math.max(map.node.clientWidth, 120) - MARGIN.l - MARGIN.r;
  const tall = ny <= 25 ? Math.min(64, Math.max(24, 440 / ny)) : 600 / ny;
  Object.assign(map, { x, y, nx, ny, width, height: ny * tall, wide: width / nx, tall });
  map.gap = Math.min(map.wide, tall) > 12 ? 3 : 0;
  map.stops = [0, 1, 2].map((stop) => color(`${SHOWN[state.shown].hue}-${stop}`));
  map.range = SHOWN[state.shown].each
    ? rangeOf(map.rows.flat(), state.shown)
    : ranges[state.shown] ??= rangeOf(sweep.cells, state.shown);
}

function mix(share) {
  const [from, part] = share < 0.5 ? [0, 2 * share] : [1, 2 * share - 1];
  const [a, b] = map.stops.slice(from, from + 2).map((stop) => stop.match(/[0-9a-f]{2}/gi)
    .map((two) => parseInt(two, 16)));
  return a.map((of, i) => of + (b[i] - of) * part);
}

// Dark or light, whichever has the more contrast, so that a value can be read on its colour.
function inkOn(cell) {
  if (!cell.fits || valueOf(cell) === null) return color("soft");
  const share = (valueOf(cell) - map.range[0]) / (map.range[1] - map.range[0]);
  const [r, g, b] = mix(Math.min(1, Math.max(0, share))).map((of) => (of / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10131a" : "#ffffff";
}

function textOf(cell, figures) {
  const value = valueOf(cell);
  if (value === null || (!cell.fits && state.shown !== "memory")) return "-";
  return SHOWN[state.shown].text(value, figures) + (cell.pareto && map.wide > 64 ? ` ${STAR}` : "");
}

// The cells' values, if there is room for them.
function texts() {
  if (map.nx * map.ny > MOST_TEXTS) return [];
  const found = map.rows.flatMap((row, j) => row.map((cell, i) => ({ cell, i, j })))
    .filter(({ cell }) => cell);
  for (const figures of [3, 2]) {
    const text = found.map(({ cell }) => textOf(cell, figures));
    const longest = Math.max(1, ...text.map((one) => one.length));
    const across = Math.floor((map.wide - map.gap - 2) / (0.62 * longest));
    const px = Math.min(13, across, Math.floor(0.6 * map.tall));
    if (px < LEAST_PX) continue;
    return [{
      type: "scatter", mode: "text", hoverinfo: "skip", text, x: found.map(({ i }) => i),
      y: found.map(({ j }) => j),
      textfont: { size: px, color: found.map(({ cell }) => inkOn(cell)) },
    }];
  }
  return [];
}

function drawn() {
  return [{
    type: "heatmap", z: map.rows.map((row) => row.map(
      (cell) => (cell && cell.fits ? valueOf(cell) : null))),
    zmin: map.range[0], zmax: map.range[1], xgap: map.gap, ygap: map.gap, showscale: false,
    colorscale: map.stops.map((stop, i) => [i / 2, stop]), hoverinfo: "skip",
  }, ...texts()];
}

// Cells that do not fit, hatched, as an image of the whole map: of many cells few rectangles.
function hatching() {
  const ratio = devicePixelRatio || 1;
  const canvas = element("canvas", { width: map.width * ratio, height: map.height * ratio });
  const tile = element("canvas", { width: 8, height: 8 });
  const brush = tile.getContext("2d");
  brush.fillStyle = color("no");
  brush.fillRect(0, 0, 8, 8);
  brush.strokeStyle = color("hatch");
  for (const from of [-8, 0, 8]) {
    brush.moveTo(from - 1, 9);
    brush.lineTo(from + 9, -1);
  }
  brush.stroke();
  const into = canvas.getContext("2d");
  into.scale(ratio, ratio);
  into.fillStyle = into.createPattern(tile, "repeat");
  map.rows.forEach((row, j) => {
    const top = (map.ny - 1 - j) * map.tall;
    for (let i = 0, end; i < map.nx; i = end) {
      for (end = i + 1; !map.gap && end < map.nx && doesNotFit(row[i]) && doesNotFit(row[end]);) end++;
      if (!doesNotFit(row[i])) continue;
      const half = map.gap / 2;
      const [left, above] = [Math.floor(i * map.wide + half), Math.floor(top + half)];
      into.fillRect(left, above, Math.ceil(end * map.wide - half) - left,
        Math.ceil(top + map.tall - half) - above); // whole pixels, or seams show
    }
  });
  return {
    source: canvas.toDataURL(), xref: "paper", yref: "paper", x: 0, y: 1, sizex: 1, sizey: 1,
    sizing: "stretch", layer: "below",
  };
}

function doesNotFit(cell) {
  return cell !== undefined && !cell.fits;
}

function frames() {
  const line = { color: color("ink"), width: map.gap || 1 };
  return map.rows.flatMap((row, j) => row.flatMap((cell, i) => (cell && cell.pareto
    ? [{ type: "rect", x0: i - 0.5, x1: i + 0.5, y0: j - 0.5, y1: j + 0.5, line }] : [])));
}

// Where the chosen cell is in the map, if it is in it.
function chosenAt() {
  if (!state.cell) return null;
  const at = placeOf(state.cell);
  return at[fixedAxis()] === state.at[fixedAxis()] ? [at[map.x], at[map.y]] : null;
}

function boxOf([i, j]) {
  const [left, top] = [MARGIN.l + i * map.wide, MARGIN.t + (map.ny - 1 - j) * map.tall];
  return { left, top, right: left + map.wide, bottom: top + map.tall };
}

// Where in the map an event is, if it is in it.
function under(event) {
  const from = map.node.getBoundingClientRect();
  const i = Math.floor((event.clientX - from.left - MARGIN.l) / map.wide);
  const j = map.ny - 1 - Math.floor((event.clientY - from.top - MARGIN.t) / map.tall);
  return i >= 0 && i < map.nx && j >= 0 && j < map.ny ? [i, j] : null;
}

// An axis, with as many of its values beside it as there is room for.
function ticked(axis, px, along) {
  const longest = Math.max(...values[axis].map((value) => written(axis, value).length));
  const least = along ? 7 * longest + 10 : 16;
  const every = Math.max(1, Math.ceil(least * values[axis].length / px));
  const at = values[axis].map((_, i) => i).filter((i) => i % every === 0);
  const title = px < 200 ? AXES[axis] : TITLES[axis];
  return {
    tickvals: at, ticktext: at.map((i) => written(axis, values[axis][i])), ticks: "",
    range: [-0.5, values[axis].length - 0.5], fixedrange: true, showgrid: false, zeroline: false,
    title: { text: title, standoff: 6, font: { color: color("ink"), size: 12 } },
  };
}

function layout() {
  return {
    width: map.width + MARGIN.l + MARGIN.r, height: map.height + MARGIN.t + MARGIN.b,
    margin: { ...MARGIN, pad: 2 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("ink"), family: "system-ui, DejaVu Sans, sans-serif", size: 12 },
    showlegend: false, shapes: frames(), images: [hatching()],
    xaxis: axis(ticked(map.x, map.width, true)), yaxis: axis(ticked(map.y, map.height, false)),
  };
}
