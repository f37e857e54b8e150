"use strict";
// What all pages share: numbers as text, elements, axes of figures, the theme, and their start.
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function digits(value) {
  return value === 0 ? "0" : value >= 999.5 ? value.toFixed(0) : value.toPrecision(3);
}

function time(us) {
  if (us >= 1e6) return `${digits(us / 1e6)} s`;
  return us >= 1e3 ? `${digits(us / 1e3)} ms` : `${digits(us)} us`;
}

function size(bytes) {
  for (const [factor, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= factor) return `${digits(bytes / factor)} ${unit}`;
  }
  return `${bytes} B`;
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function row(cells, tag, attributes) {
  const made = element("tr", attributes);
  for (const cell of cells) {
    const number = typeof cell === "object" && !(cell instanceof Node);
    made.append(element(tag, number ? { class: "n" } : {}, number ? cell.n : cell));
  }
  return made;
}

function axis(more) {
  return {
    gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line"),
    tickfont: { color: color("soft") }, ...more,
  };
}

// Draw the page, and again what has colours whenever the theme changes.
async function start(draw, recolor) {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const setTheme = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "light" : "dark";
  };
  const wanted = new URLSearchParams(location.hash.slice(1));
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(wanted.get("theme") || (dark ? "dark" : "light"));
  button.addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    recolor();
  });
  try {
    await draw(wanted);
  } catch (error) {
    document.body.dataset.error = String(error);
    throw error;
  }
  document.body.dataset.ready = "yes";
}
