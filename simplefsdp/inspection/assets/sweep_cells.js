// The sweep that is in the page: its cells, what is shown of them, and their values as text.
const sweep = JSON.parse(document.getElementById("report").textContent);
const AXES = { batch: "batch", seq: "sequence length", ranks: "ranks" };
const TITLES = {
  batch: "batch (sequences per rank)", seq: "sequence length (tokens)", ranks: "ranks",
};
const PAIRS = [["seq", "batch"], ["ranks", "batch"], ["seq", "ranks"]]; // along x, along y
const SHOWN = {
  tokens_per_second_per_rank: { name: "tokens/s per rank", text: short, hue: "more" },
  // All maps of the others have the same colours; of this one, the number of ranks would decide all.
  tokens_per_second: { name: "tokens/s of all ranks", text: short, hue: "more", each: true },
  mfu: { name: "MFU", text: percent, hue: "more" },
  memory: { name: "memory", text: percent, hue: "less", range: [0, 1], what: "of the room" },
  exposed_share: { name: "exposed", text: percent, hue: "less", zero: true, what: "of the step" },
};
const STAR = "\u2605";

const values = sweep.axes;
const places = Object.fromEntries(Object.keys(AXES).map(
  (axis) => [axis, new Map(values[axis].map((value, at) => [value, at]))]));
const cells = new Array(values.batch.length * values.seq.length * values.ranks.length);
const state = { pair: PAIRS[0], at: { batch: 0, seq: 0, ranks: 0 }, shown: "", cell: null };
const ranges = {};

// With fewer figures where there is no room for three.
function percent(share, figures = 3) {
  return `${(100 * share).toFixed(share >= 0.9995 || figures < 3 ? 0 : 1)}%`;
}

function short(value, figures = 3) {
  const units = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const [factor, unit] = units.find(([least]) => value >= 0.9995 * least) || [1, ""];
  const scaled = value / factor;
  if (figures >= 3) return digits(scaled) + unit;
  return (scaled >= 9.95 ? scaled.toFixed(0) : scaled.toPrecision(2)) + unit;
}

function written(axis, value) {
  return axis === "seq" && value % 1024 === 0 ? `${value / 1024}k` : value.toLocaleString("en");
}

// A value with what it counts.
function counted(axis, value) {
  if (axis === "batch") return `batch ${written(axis, value)}`;
  const many = { seq: "tokens", ranks: "ranks" }[axis];
  return `${written(axis, value)} ${value === 1 ? many.slice(0, -1) : many}`;
}

function slot(at) {
  return (at.batch * values.seq.length + at.seq) * values.ranks.length + at.ranks;
}

function placeOf(cell) {
  return Object.fromEntries(Object.keys(AXES).map((axis) => [axis, places[axis].get(cell[axis])]));
}

function valueOf(cell, name = state.shown) {
  return name === "memory" ? cell.peak_bytes / cell.room_bytes : cell[name];
}

// The lowest and the highest of what is shown, of cells that fit.
function rangeOf(found, name) {
  if (SHOWN[name].range) return SHOWN[name].range;
  let [low, high] = [Infinity, -Infinity];
  for (const cell of found) {
    const value = cell && cell.fits ? valueOf(cell, name) : null;
    if (value !== null && value < low) low = value;
    if (value !== null && value > high) high = value;
  }
  if (high < low) return [0, 1];
  return low < high && !SHOWN[name].zero ? [low, high] : [0, high || 1];
}

function fixedAxis() {
  return Object.keys(AXES).find((axis) => !state.pair.includes(axis));
}
