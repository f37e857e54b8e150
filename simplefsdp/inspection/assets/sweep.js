// What is around the map: choices, what is told of a cell, the table; and the start of it all.
const MOST_BUTTONS = 12;
const MOST_ROWS = 500;

async function redraw() {
  lay();
  heading();
  await Plotly.react(map.node, drawn(), layout(), { staticPlot: true });
  mark();
}

function heading() {
  const fixed = fixedAxis();
  const { name, hue, what, text } = SHOWN[state.shown];
  const of = counted(fixed, values[fixed][state.at[fixed]]);
  document.getElementById("shown").textContent = `${name}${what ? `, ${what}` : ""}, at ${of}`;
  const stops = [0, 1, 2].map((stop) => `var(--${hue}-${stop})`).join(", ");
  document.getElementById("legend").replaceChildren(
    element("span", {}, text(map.range[0]), element("i", {
      class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), text(map.range[1])),
    element("span", {}, element("i", { class: "no" }), "does not fit"),
    element("span", {}, element("i", { class: "best" }), `${STAR} on the Pareto front`));
}

// What is known of the cell that is pointed at or chosen, beside it.
function tell(at) {
  const tip = document.getElementById("tip");
  const cell = at && map.rows[at[1]]?.[at[0]];
  tip.hidden = !cell;
  if (!cell) return;
  const list = element("dl");
  for (const [name, value] of [
    ["step", time(cell.step_us)], ["exposed", percent(cell.exposed_share)],
    ["memory", `${size(cell.peak_bytes)} of ${size(cell.room_bytes)}`],
    ["tokens/s per rank", short(cell.tokens_per_second_per_rank)],
    ["tokens/s of all ranks", short(cell.tokens_per_second)],
    ...(cell.mfu === null ? [] : [["MFU", percent(cell.mfu)]]),
  ]) list.append(element("dt", { class: "soft" }, name), element("dd", {}, value));
  const sizes = Object.keys(AXES).map((axis) => counted(axis, cell[axis])).join(", ");
  tip.replaceChildren(element("b", {}, sizes, cell.pareto ? ` ${STAR}` : ""),
    element("div", cell.fits ? {} : { class: "exposed" }, cell.reason), list);
  const { left, top, right, bottom } = boxOf(at);
  const most = map.node.clientWidth - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min((left + right - tip.offsetWidth) / 2, most))}px`;
  const above = top - 6 - tip.offsetHeight;
  const from = map.node.getBoundingClientRect().top;
  const below = from + bottom + 6 + tip.offsetHeight < innerHeight || from + above < 0;
  tip.style.top = `${below ? bottom + 6 : above}px`;
}

// The frame of the chosen cell, and what is known of it.
function mark() {
  const at = chosenAt();
  const frame = document.getElementById("chosen");
  frame.hidden = !at;
  if (at) {
    const { left, top, right, bottom } = boxOf(at);
    const px = { left, top, width: right - left, height: bottom - top };
    for (const [name, value] of Object.entries(px)) frame.style[name] = `${value}px`;
  }
  tell(at);
}

// Choose a cell, in the map that it is in; or none.
async function choose(cell) {
  state.cell = cell;
  const fixed = fixedAxis();
  const at = cell ? placeOf(cell)[fixed] : state.at[fixed];
  if (at !== state.at[fixed]) {
    state.at[fixed] = at;
    choices();
    await redraw();
  } else {
    mark();
  }
  for (const found of document.querySelectorAll("#front tr[tabindex]")) {
    found.classList.toggle("selected", cell !== null && cells[Number(found.dataset.slot)] === cell);
  }
}

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };

function pressed(event) {
  if (event.key === "Escape") choose(null);
  const step = STEPS[event.key];
  if (!step) return;
  event.preventDefault();
  const from = chosenAt();
  const at = from ? [from[0] + step[0], from[1] + step[1]] : [0, 0];
  const cell = map.rows[at[1]]?.[at[0]];
  if (cell) choose(cell);
}

function buttons(name, options, chosen, take) {
  const made = element("div", { class: "choice", role: "group", "aria-label": name },
    element("span", { class: "soft" }, name));
  options.forEach((option, at) => {
    const button = element("button", { type: "button", "aria-pressed": at === chosen }, option);
    button.addEventListener("click", () => changed(made, at, take));
    made.append(button);
  });
  return made;
}

function changed(group, at, take) {
  take(at);
  const which = [...group.parentNode.children].indexOf(group);
  choices();
  document.getElementById("choices").children[which]?.querySelectorAll("button")[at]?.focus();
  return redraw();
}

function slider(name, options, chosen, take) {
  const input = element("input", {
    type: "range", min: 0, max: options.length - 1, value: chosen, "aria-label": name });
  const said = element("output", {}, options[chosen]);
  let due = 0;
  input.addEventListener("input", () => {
    take(Number(input.value));
    said.textContent = options[Number(input.value)];
    input.setAttribute("aria-valuetext", said.textContent);
    cancelAnimationFrame(due);
    due = requestAnimationFrame(redraw);
  });
  return element("label", { class: "choice" }, element("span", { class: "soft" }, name), input, said);
}

// Only what there is to choose: an axis of one value needs no choice.
function choices() {
  const made = [];
  const names = Object.keys(SHOWN);
  made.push(buttons("shown", names.map((name) => SHOWN[name].name), names.indexOf(state.shown),
    (at) => { state.shown = names[at]; }));
  if (Object.keys(AXES).every((axis) => values[axis].length > 1)) {
    made.push(buttons("map", PAIRS.map(([x, y]) => `${AXES[x]}, ${AXES[y]}`),
      PAIRS.indexOf(state.pair), (at) => { state.pair = PAIRS[at]; }));
  }
  const fixed = fixedAxis();
  if (values[fixed].length > 1) {
    const control = values[fixed].length > MOST_BUTTONS ? slider : buttons;
    made.push(control(AXES[fixed], values[fixed].map((value) => written(fixed, value)),
      state.at[fixed], (at) => { state.at[fixed] = at; }));
  }
  document.getElementById("choices").replaceChildren(...made);
}

function about() {
  const fitting = sweep.cells.filter((cell) => cell.fits).length;
  const given = Object.entries(sweep.options).filter(([, value]) => value !== null)
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${
      value === true ? "yes" : value === false ? "no" : value}`);
  document.getElementById("about").textContent = [
    `model ${sweep.name}`, `cluster ${sweep.cluster}`, `bucketing ${sweep.bucketing}`, ...given,
    `${fitting.toLocaleString("en")} of ${sweep.cells.length.toLocaleString("en")} cells fit`,
    `${sweep.traces} trace${sweep.traces === 1 ? "" : "s"}`, "predicted, nothing was measured",
  ].join(" \u00b7 ");
}

function frontTable() {
  const table = document.getElementById("front");
  const found = sweep.cells.filter((cell) => cell.pareto)
    .sort((a, b) => a.seq - b.seq || a.ranks - b.ranks || a.batch - b.batch);
  const names = ["sequence", "ranks", "batch", "tokens/s", "per rank", "MFU", "step", "exposed",
    "memory"];
  table.append(row([...names.map((n) => ({ n })), "binds", "reason"], "th"));
  for (const cell of found.slice(0, MOST_ROWS)) {
    const at = slot(placeOf(cell));
    const made = row([
      ...["seq", "ranks", "batch"].map((axis) => ({ n: written(axis, cell[axis]) })),
      { n: short(cell.tokens_per_second) }, { n: short(cell.tokens_per_second_per_rank) },
      { n: cell.mfu === null ? "-" : percent(cell.mfu) }, { n: time(cell.step_us) },
      { n: percent(cell.exposed_share) }, { n: size(cell.peak_bytes) }, cell.binds,
      element("div", { class: "reason" }, cell.reason),
    ], "td", { tabindex: 0, "data-slot": at });
    made.addEventListener("focus", () => choose(cell));
    made.addEventListener("click", () => map.node.scrollIntoView({ block: "nearest" }));
    table.append(made);
  }
  const more = found.length - MOST_ROWS;
  if (more > 0) table.after(element("p", { class: "soft" }, `and ${more.toLocaleString("en")} more`));
  if (!found.length) table.replaceWith(element("p", {}, "No cell fits."));
}

// What to show first: an axis that varies is in the map, and its third one is at most of the front.
function begin() {
  for (const cell of sweep.cells) cells[slot(placeOf(cell))] = cell;
  if (sweep.cells.every((cell) => cell.mfu === null)) delete SHOWN.mfu;
  state.shown = Object.keys(SHOWN)[0];
  const varying = ([x, y]) => (values[x].length > 1) + (values[y].length > 1);
  state.pair = PAIRS.reduce((best, pair) => (varying(pair) > varying(best) ? pair : best));
  const fixed = fixedAxis();
  const counts = values[fixed].map(() => 0);
  for (const cell of sweep.cells) if (cell.pareto) counts[placeOf(cell)[fixed]] += 1;
  state.at[fixed] = counts.indexOf(Math.max(...counts));
}

async function draw() {
  begin();
  about();
  choices();
  frontTable();
  await redraw();
  map.node.addEventListener("pointermove", (event) => {
    if (event.pointerType === "mouse") tell(under(event) || chosenAt());
  });
  map.node.addEventListener("pointerleave", () => tell(chosenAt()));
  map.node.addEventListener("click", (event) => {
    const at = under(event);
    const cell = at && map.rows[at[1]][at[0]];
    choose(cell && cell !== state.cell ? cell : null);
  });
  map.node.addEventListener("keydown", pressed);
  let [due, width] = [0, innerWidth];
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's bar that goes away is no reason to draw
    width = innerWidth;
    cancelAnimationFrame(due);
    due = requestAnimationFrame(redraw);
  });
}

start(draw, redraw);
