// What a line looks like, in figures and legends; and the document that everything is drawn from. Text of a run
// enters the page through textContent alone, or escaped where the plotting library reads tags.
// Okabe and Ito's colours, which the colour-blind can tell apart; the order suits the ground they stand on.
const PALETTES = {
  light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8400"],
  dark: ["#56B4E9", "#E69F00", "#2BBF95", "#CC79A7", "#F0E442", "#E8793A", "#FFFFFF", "#4C9BD6"],
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SWATCH_DASHES = ["", "6 3", "2 2.5", "6 2 2 2", "9 3", "9 2 2 2"];
const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "cross", "x", "triangle-down", "star"];
const PATTERNS = ["", "/", ".", "x", "-", "\\", "+"];
const MOST_TABLE_ROWS = 400;
const LINES = { resume: "resumed", rollback: "rolled back", divergence: "diverged" };
const byId = (id) => document.getElementById(id);

let doc = JSON.parse(byId("data").textContent);
let axis = "step";
let isPrinting = false;
const figures = new Map(); // by id: what is needed to draw it again
const drawnPanels = new Map(); // by id: the panel as it was drawn, as text

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(Boolean));
  return node;
}

const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const isDark = () => !isPrinting && matchMedia("(prefers-color-scheme: dark)").matches;
const palette = (dark = isDark()) => PALETTES[dark ? "dark" : "light"];
const isCompared = () => doc.runs.length > 1;
const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

// ---- how a line looks -------------------------------------------------------------------------------------------

function styles(chart, colours) {
  const names = [...new Set(chart.series.map((line) => line.name))];
  return chart.series.map((line) => {
    const kind = names.indexOf(line.name);
    const own = isCompared() ? line.run : kind;
    return {
      colour: colours[own % colours.length],
      dash: kind % DASHES.length,
      symbol: own % SYMBOLS.length,
      label: !isCompared() ? line.name : names.length === 1 ? runName(line.run) : `${runName(line.run)}: ${line.name}`,
    };
  });
}

const runName = (run) => doc.runs[run].name;

const SYMBOL_PATHS = {
  circle: "M15 6m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0", square: "M11.8 2.8h6.4v6.4h-6.4z",
  "triangle-up": "M15 2l4 7h-8z", "triangle-down": "M15 10l4-7h-8z", diamond: "M15 1.5l4 4.5l-4 4.5l-4-4.5z",
  cross: "M13.6 2h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6v-2.8h2.6z",
  x: "M12 1.5l3 3l3-3l1.7 1.7l-3 3l3 3l-1.7 1.7l-3-3l-3 3l-1.7-1.7l3-3l-3-3z",
  star: "M15 1l1.4 3.4l3.6.3l-2.7 2.4l.8 3.6l-3.1-1.9l-3.1 1.9l.8-3.6l-2.7-2.4l3.6-.3z",
};

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function swatch(look, hasSymbol) {
  const picture = svg("svg", { width: 30, height: 12, "aria-hidden": "true", class: "swatch" });
  picture.append(svg("path", {
    d: "M0 6H30", stroke: look.colour, "stroke-width": 2.2, "stroke-dasharray": SWATCH_DASHES[look.dash],
  }));
  if (hasSymbol) picture.append(svg("path", { d: SYMBOL_PATHS[SYMBOLS[look.symbol]], fill: look.colour }));
  return picture;
}
