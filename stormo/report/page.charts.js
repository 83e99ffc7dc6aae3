// Draws the document's charts with plotly, which has the legends and the buttons. Text of a run enters the page through
// textContent alone, or escaped where plotly reads tags.
const MOST_TABLE_ROWS = 400;
const LINES = { resume: "resumed", rollback: "rolled back", divergence: "diverged" };
const EVENT_KINDS = ["start", "resume", "checkpoint", "info", "warning", "stop", "rollback", "divergence", "end"];
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
const isCompared = () => doc.runs.length > 1;
const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
const cyclic = (list, index) => list[index % list.length];
const colour = (index) => cyclic(doc.style.colours[isDark() ? "dark" : "light"], index);
const ground = () => (isDark() ? "#181c22" : "#ffffff");
const pattern = (index, opacity) => ({ shape: cyclic(doc.style.patterns, index), fillmode: "overlay", fgopacity: opacity, size: 7, fgcolor: isDark() ? "#000000" : "#ffffff" });

function axisOf(chart) {
  return chart.series.every((line) => axis in line.at) ? axis : "time_s";
}

const along = (name) => (name === "time_s" ? `running time (${doc.time_unit.name})` : name);
const positions = (values, name) => (name === "time_s" ? values.map((value) => value / doc.time_unit.seconds) : values);

function layout(id, more = {}) {
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const [ink, soft, grid] = isPrinting ? ["#16191d", "#4a515a", "#e3e6ea"] : [variable("--ink"), variable("--soft"), variable("--grid")];
  const line = () => ({ gridcolor: grid, linecolor: grid, zerolinecolor: grid, tickcolor: grid, automargin: true,
    exponentformat: "power", minexponent: 5, separatethousands: true,
    tickfont: { size: 11.5, color: soft }, title: { font: { size: 12, color: soft }, standoff: 8 } });
  return {
    paper_bgcolor: ground(), plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', color: ink, size: 12 },
    margin: { l: 8, r: 12, t: 28, b: 8 }, autosize: true, hovermode: "closest", uirevision: `${id}-${axis}`,
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, xanchor: "left", traceorder: "normal", uirevision: id, font: { size: 12 } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: variable("--accent") },
    hoverlabel: { bgcolor: isDark() ? "#20262e" : "#ffffff", bordercolor: soft, font: { color: ink, size: 12 } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...line(), showgrid: false, showline: true, linecolor: soft, ticks: "outside" },
    yaxis: line(), ...more,
  };
}

function chartFigure(chart) {
  const name = axisOf(chart);
  const isAlone = chart.series.length === 1;
  const data = chart.series.map((line) => ({
    type: "scatter", name: escaped(line.label), x: positions(line.at[name], name), y: line.y, connectgaps: false,
    mode: isAlone && line.mode !== "points" ? "lines" : "lines+markers",
    line: { color: colour(line.colour), width: 1.9, dash: cyclic(doc.style.dashes, line.dash), shape: line.mode === "steps" ? "hv" : "linear" },
    marker: { symbol: cyclic(doc.style.symbols, line.colour), size: 7, color: colour(line.colour), maxdisplayed: line.mode === "points" ? 40 : 7 },
    hovertemplate: `%{y:.5~g} ${escaped(chart.y_title)}<extra>${escaped(shorten(line.label, 40))}</extra>`,
  }));
  const drawn = layout(chart.id, { hovermode: "x unified", showlegend: !isAlone });
  drawn.xaxis.title.text = along(name);
  drawn.yaxis.title.text = escaped(chart.y_title);
  drawn.yaxis.rangemode = chart.from_zero ? "tozero" : "normal";
  const values = chart.series.flatMap((line) => line.y).filter((value) => value !== null);
  const most = Math.max(...values);
  if (chart.top) drawn.yaxis.range = [0, chart.top * 1.03];
  else if (chart.from_zero && most === 0) drawn.yaxis.range = [0, 1];
  else if (chart.from_zero && most > 0 && Math.min(...values) >= 0) drawn.yaxis.range = [0, most * 1.06];
  return { data, layout: { ...drawn, ...marks(name, drawn.font.color) } };
}

// Checkpoints as ticks at the foot, resumes and rollbacks as dotted lines.
function marks(name, ink) {
  const shapes = [], annotations = [];
  for (const mark of doc.timeline) {
    const x = positions([mark[name]], name)[0];
    const color = isCompared() ? colour(mark.run) : ink;
    const shape = { type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0 };
    if (mark.kind === "checkpoint" && doc.draws_checkpoints) shapes.push({ ...shape, y1: 0.035, opacity: 0.7, line: { color, width: 1.5 } });
    else if (mark.kind in LINES) {
      shapes.push({ ...shape, y1: 1, opacity: 0.55, line: { color, width: 1.2, dash: "dot" } });
      annotations.push({ x, y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false, text: LINES[mark.kind], font: { size: 10, color } });
    }
  }
  return { shapes, annotations: annotations.length > 6 ? [] : annotations };
}

function stackFigure(stack) {
  const totals = stack.bars.map((_, bar) => stack.parts.reduce((sum, [, values]) => sum + values[bar], 0));
  const data = stack.parts.map(([name, values], index) => ({
    type: "bar", orientation: "h", name: escaped(name), y: stack.bars.map((_, bar) => bar), x: values, width: 0.62,
    marker: { color: colour(index), line: { color: ground(), width: 1.5 }, pattern: pattern(index, 0.35) },
    hovertemplate: `%{x:.5~g} ${stack.x_title}<extra>${escaped(name)}</extra>`,
  }));
  const drawn = layout(stack.id, { barmode: "stack" });
  Object.assign(drawn.yaxis, { tickvals: stack.bars.map((_, bar) => bar), autorange: "reversed", showgrid: false,
    ticktext: stack.bars.map((bar) => (isCompared() ? escaped(shorten(bar, 26)) : "")) });
  Object.assign(drawn.xaxis, { showgrid: true, range: [0, Math.max(...totals) * (window.innerWidth < 640 ? 1.35 : 1.14)] });
  drawn.xaxis.title.text = stack.x_title;
  drawn.annotations = totals.map((total, bar) => ({ x: total, y: bar, xanchor: "left", showarrow: false, xshift: 6,
    text: `${Number(total.toPrecision(4)).toLocaleString("en")} ${stack.x_title}`, font: { size: 12 } }));
  return { data, layout: drawn };
}

// One row a worker, one colour a kind, paler the later a stage of a worker is.
function lanesFigure(lanes) {
  const data = lanes.kinds.map(({ name, colour: index, bars }) => ({
    type: "bar", orientation: "h", name: escaped(name), width: 0.84,
    y: bars.map(([row]) => row), base: bars.map(([, start]) => start), x: bars.map(([, , length]) => length),
    text: bars.map(([, , , label]) => escaped(label)), textposition: "inside", insidetextanchor: "middle",
    textangle: 0, insidetextfont: { color: isDark() ? "#000000" : "#ffffff" },
    customdata: bars.map(([, , , , hover]) => escaped(hover)), hovertemplate: "%{customdata}<extra></extra>",
    marker: { color: colour(index), opacity: bars.map((bar) => 1 - Math.min(0.15 * bar[5], 0.6)),
      line: { color: ground(), width: 1 }, pattern: pattern(index, 0.2) },
  }));
  const drawn = layout(lanes.id, { barmode: "overlay", uniformtext: { mode: "hide", minsize: 9 } });
  Object.assign(drawn.yaxis, { tickvals: lanes.rows.map((_, row) => row), ticktext: lanes.rows.map(escaped),
    range: [lanes.rows.length - 0.5, -0.5], showgrid: false, zeroline: false });
  drawn.xaxis.title.text = lanes.x_title;
  return { data, layout: drawn };
}

function stripFigure(strip) {
  const kinds = EVENT_KINDS.filter((kind) => doc.timeline.some((one) => one.kind === kind));
  const wrapped = (text) => escaped(shorten(text, 300)).replace(/(.{60}\S*) /g, "$1<br>");
  const data = doc.runs.map((run, index) => {
    const own = doc.timeline.filter((one) => one.run === index);
    return {
      type: "scatter", mode: "markers", name: escaped(run.name), x: positions(own.map((one) => one[axis]), axis),
      y: own.map((one) => kinds.indexOf(one.kind) + (isCompared() ? (index / doc.runs.length - 0.4) * 0.6 : 0)),
      marker: { symbol: cyclic(doc.style.symbols, isCompared() ? index : 3), size: 10, color: colour(index) },
      text: own.map((one) => wrapped(one.text)), hovertemplate: "%{text}<extra></extra>",
    };
  });
  const drawn = layout(strip.id, { showlegend: isCompared() });
  drawn.xaxis.title.text = along(axis);
  Object.assign(drawn.yaxis, { tickvals: kinds.map((_, index) => index), range: [kinds.length - 0.5, -0.5],
    ticktext: kinds.map((kind) => (kind === "info" ? "notice" : kind)) });
  return { data, layout: drawn };
}

const FIGURES = { chart: chartFigure, stack: stackFigure, lanes: lanesFigure, strip: stripFigure };

// What the plot needs, with a row of the legend for about every 300 pixels of names.
function height({ kind, content, plot }) {
  const names = kind === "chart" ? content.series.map((line) => line.label) : kind === "stack" ? content.parts.map(([name]) => name)
    : kind === "lanes" ? content.kinds.map(({ name }) => name) : isCompared() ? doc.runs.map((run) => run.name) : [];
  const width = names.length > 1 ? names.reduce((sum, name) => sum + 55 + 7 * name.length, 0) : 0;
  const legend = 20 * Math.ceil(width / Math.max(plot.clientWidth || 500, 200));
  const laneHeight = () => Math.max(12, Math.min(30, Math.floor(900 / content.rows.length)));
  const body = { chart: () => (window.innerWidth < 640 ? 230 : 270), stack: () => Math.max(84 + 46 * content.bars.length, 134),
    lanes: () => 84 + laneHeight() * content.rows.length, strip: () => 104 + 26 * new Set(doc.timeline.map((one) => one.kind)).size };
  return body[kind]() + legend;
}

function draw(entry) {
  if (!entry.plot) return;
  const figure = FIGURES[entry.kind](entry.content);
  const name = `${entry.content.id}`;
  const csvButton = { name: "csv", title: "Save as CSV", icon: Plotly.Icons.disk, click: () => saveText(`${name}.csv`, csv(rows(entry.content))) };
  entry.plot.style.height = `${height(entry)}px`;
  Plotly.react(entry.plot, figure.data, figure.layout, { displayModeBar: true, displaylogo: false, responsive: true, doubleClick: "reset",
    modeBarButtons: [["toImage", ...(entry.kind === "chart" ? [csvButton] : [])]], toImageButtonOptions: { filename: name, scale: 2 } });
  entry.plot.setAttribute("aria-label", spoken(entry));
  if (entry.kind === "chart" && entry.details.open) fillTable(entry);
}

function spoken({ kind, content }) {
  if (kind !== "chart") return content.title;
  const ends = content.series.slice(0, 12).map((line) => {
    const known = line.y.filter((value) => value !== null);
    return `${line.label}: from ${known[0]} to ${known[known.length - 1]}`;
  });
  return `${content.title} in ${content.y_title} along ${along(axisOf(content))}. ${ends.join("; ")}. The figures are in the table below.`;
}

function figureNode(kind, content, panel) {
  const id = `${kind}-${content.id}`;
  const old = figures.get(id);
  const entry = { id, kind, content, plot: null, details: null };
  figures.set(id, entry);
  // Over the only figure of a panel the heading of the panel is enough for the eye.
  const isTitled = kind === "chart" && panel.charts.length === 1 && !panel.stacks.length;
  const title = el("h3", { id: `${id}-title`, text: content.title, class: isTitled ? "unseen" : undefined });
  if (content.why_empty) {
    const isAside = panel.charts.some((chart) => !chart.why_empty); // beside drawn figures a line is enough
    title.className = isAside || panel.charts.length > 1 ? "" : "unseen";
    return el("figure", { class: isAside ? "absent" : undefined, "aria-labelledby": `${id}-title` }, el("figcaption", {}, title), el("p", { class: "why", text: content.why_empty }));
  }
  entry.plot = el("div", { class: "plot", role: "img" });
  entry.details = kind !== "chart" ? null : el("details", { open: Boolean(old && old.details && old.details.open), ontoggle: () => {
    if (entry.details.open) fillTable(entry);
  } }, el("summary", { text: "Table" }), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${content.title}` }));
  return el("figure", { class: kind === "lanes" ? "long" : undefined, "aria-labelledby": `${id}-title` },
    el("figcaption", {}, title), entry.plot, content.note ? el("p", { class: "note", text: content.note }) : null, entry.details);
}
