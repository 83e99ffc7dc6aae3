// Charts, bars and the timeline: the document's data as figures of the plotting library, and their place in the page.
function axisOf(chart) {
  const known = chart.series.length ? Object.keys(chart.series[0].at) : [];
  const shared = known.filter((name) => chart.series.every((line) => name in line.at));
  return shared.includes(axis) ? axis : "time_s";
}

const along = (name) => (name === "time_s" ? `running time (${doc.time_unit.name})` : name);
const places = (values, name) => (name === "time_s" ? values.map((value) => value / doc.time_unit.seconds) : values);

function layout(dark, options) {
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const [ink, soft, grid] = isPrinting || options.paper
    ? ["#16191d", "#4a515a", "#e3e6ea"] : [variable("--ink"), variable("--soft"), variable("--grid")];
  const line = () => ({ gridcolor: grid, linecolor: grid, zerolinecolor: grid, tickcolor: grid, automargin: true,
    exponentformat: "power", minexponent: 5, separatethousands: true,
    tickfont: { size: 11.5, color: soft }, title: { font: { size: 12, color: soft }, standoff: 8 } });
  return {
    paper_bgcolor: options.paper || "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', color: ink, size: 12 },
    margin: { l: 8, r: 12, t: options.top || 14, b: 8 }, showlegend: false, autosize: true,
    hovermode: "x unified", uirevision: options.revision,
    hoverlabel: { bgcolor: dark ? "#20262e" : "#ffffff", bordercolor: soft, font: { color: ink, size: 12 } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...line(), showgrid: false, showline: true, linecolor: soft, ticks: "outside" },
    yaxis: { ...line(), rangemode: options.fromZero ? "tozero" : "normal" },
  };
}

function chartFigure(chart, options = {}) {
  const dark = !options.paper && isDark();
  const looks = styles(chart, palette(dark));
  const name = axisOf(chart);
  const isAlone = chart.series.length === 1;
  const data = chart.series.map((line, index) => ({
    type: "scatter", name: escaped(looks[index].label),
    x: places(line.at[name], name), y: line.y,
    mode: isAlone && line.mode !== "points" ? "lines" : "lines+markers",
    line: { color: looks[index].colour, width: 1.9, dash: DASHES[looks[index].dash],
      shape: line.mode === "steps" ? "hv" : "linear" },
    marker: { symbol: SYMBOLS[looks[index].symbol], size: 7, color: looks[index].colour,
      maxdisplayed: line.mode === "points" ? 40 : 7 },
    visible: options.hidden && options.hidden.has(looks[index].label) ? "legendonly" : true,
    connectgaps: false,
    hovertemplate: `%{y:.5~g} ${escaped(chart.y_title)}<extra>${escaped(shorten(looks[index].label, 40))}</extra>`,
  }));
  const drawn = layout(dark, { ...options, fromZero: chart.from_zero, revision: `${chart.id}-${name}` });
  drawn.xaxis.title.text = along(name);
  drawn.yaxis.title.text = escaped(chart.y_title);
  const all = chart.series.flatMap((line) => line.y).filter((value) => value !== null);
  const most = Math.max(...all);
  if (chart.top) drawn.yaxis.range = [0, chart.top * 1.03];
  else if (chart.from_zero && most === 0) drawn.yaxis.range = [0, 1];
  else if (chart.from_zero && most > 0 && Math.min(...all) >= 0) drawn.yaxis.range = [0, most * 1.06];
  Object.assign(drawn, marks(name, palette(dark), drawn));
  return { data, layout: drawn };
}

function marks(name, colours, { font }) {
  const shapes = [], annotations = [];
  for (const mark of doc.happenings) {
    const x = places([mark[name]], name)[0];
    const color = isCompared() ? colours[mark.run % colours.length] : font.color;
    if (mark.kind === "checkpoint" && doc.draws_checkpoints) {
      shapes.push({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 0.035, opacity: 0.7, line: { color, width: 1.5 } });
    } else if (mark.kind in LINES) {
      shapes.push({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, opacity: 0.55, line: { color, width: 1.2, dash: "dot" } });
      annotations.push({ x, y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false, text: LINES[mark.kind], font: { size: 10, color } });
    }
  }
  return { shapes, annotations: annotations.length > 6 ? [] : annotations };
}

function stackFigure(stack, options = {}) {
  const dark = !options.paper && isDark();
  const colours = palette(dark);
  const totals = stack.bars.map((_, bar) => stack.parts.reduce((sum, [, values]) => sum + values[bar], 0));
  const labels = stack.bars.map((bar) => escaped(shorten(bar, 26)));
  const data = stack.parts.map(([name, values], index) => ({
    type: "bar", orientation: "h", name: escaped(name), y: stack.bars.map((_, bar) => bar), x: values, width: 0.62,
    marker: { color: colours[index % colours.length], line: { color: dark ? "#181c22" : "#ffffff", width: 1.5 },
      pattern: { shape: PATTERNS[index % PATTERNS.length], fillmode: "overlay", fgopacity: 0.35, size: 7,
        fgcolor: dark ? "#000000" : "#ffffff" } },
    hovertemplate: `%{x:.5~g} ${stack.x_title}<extra>${escaped(name)}</extra>`,
    visible: options.hidden && options.hidden.has(name) ? "legendonly" : true,
  }));
  const drawn = layout(dark, { ...options, revision: stack.id });
  drawn.barmode = "stack";
  drawn.hovermode = "closest";
  drawn.yaxis.tickvals = stack.bars.map((_, bar) => bar);
  drawn.yaxis.ticktext = isCompared() ? labels : labels.map(() => "");
  drawn.yaxis.autorange = "reversed";
  drawn.yaxis.showgrid = false;
  drawn.xaxis.title.text = stack.x_title;
  drawn.xaxis.showgrid = true;
  drawn.annotations = totals.map((total, bar) => ({ x: total, y: bar, xanchor: "left", showarrow: false, xshift: 6,
    text: `${Number(total.toPrecision(4)).toLocaleString("en")} ${stack.x_title}`, font: { size: 12 } }));
  drawn.xaxis.range = [0, Math.max(...totals) * (window.innerWidth < 640 ? 1.35 : 1.14)];
  return { data, layout: drawn };
}

const KIND_LABELS = { start: "start", resume: "resume", checkpoint: "checkpoint", info: "notice", warning: "warning",
  stop: "stop", rollback: "rollback", divergence: "divergence", end: "end" };

function stripFigure(strip, options = {}) {
  const dark = !options.paper && isDark();
  const colours = palette(dark);
  const kinds = Object.keys(KIND_LABELS).filter((kind) => doc.happenings.some((one) => one.kind === kind));
  const data = doc.runs.map((run, index) => {
    const own = doc.happenings.filter((one) => one.run === index);
    return {
      type: "scatter", mode: "markers", name: escaped(run.name),
      x: places(own.map((one) => one[axis]), axis),
      y: own.map((one) => kinds.indexOf(one.kind) + (isCompared() ? (index / doc.runs.length - 0.4) * 0.6 : 0)),
      marker: { symbol: SYMBOLS[(isCompared() ? index : 3) % SYMBOLS.length], size: 10, color: colours[index % colours.length] },
      text: own.map((one) => escaped(wrapped(one.words))), hovertemplate: "%{text}<extra></extra>",
    };
  });
  const drawn = layout(dark, { ...options, revision: `${strip.id}-${axis}` });
  drawn.hovermode = "closest";
  drawn.xaxis.title.text = along(axis);
  drawn.yaxis.tickvals = kinds.map((_, index) => index);
  drawn.yaxis.ticktext = kinds.map((kind) => KIND_LABELS[kind]);
  drawn.yaxis.range = [kinds.length - 0.5, -0.5];
  return { data, layout: drawn };
}

const wrapped = (text) => shorten(text, 300).replace(/(.{60}\S*) /g, "$1\n").replace(/\n/g, "\u2028");

const FIGURES = { chart: chartFigure, stack: stackFigure, strip: stripFigure, lanes: lanesFigure };

function draw(entry) {
  if (!entry.plot) return;
  const figure = FIGURES[entry.kind](entry.content, { hidden: entry.hidden });
  for (const trace of figure.data) if (trace.text) trace.text = trace.text.map((text) => text.replaceAll("\u2028", "<br>"));
  Plotly.react(entry.plot, figure.data, figure.layout, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  entry.plot.setAttribute("aria-label", spoken(entry));
  if (entry.kind === "chart" && entry.details.open) fillTable(entry);
}

function spoken({ kind, content }) {
  if (kind !== "chart") return content.title;
  const looks = styles(content, palette());
  const ends = content.series.slice(0, 12).map((line, index) => {
    const known = line.y.filter((value) => value !== null);
    return `${looks[index].label}: from ${known[0]} to ${known[known.length - 1]}`;
  });
  return `${content.title} in ${content.y_title} along ${along(axisOf(content))}. ${ends.join("; ")}. The figures are in the table below.`;
}

function legend(entry) {
  const { kind, content } = entry;
  const colours = palette();
  const items = kind === "chart"
    ? styles(content, colours).map((look, index) => [look.label, swatch(look, content.series[index].mode === "points" || content.series.length > 1)])
    : kind === "stack"
      ? content.parts.map(([name], index) => [name, block(colours[index % colours.length], index)])
      : kind === "lanes" ? content.kinds.map(({ name, colour }) => [name, block(colours[colour % colours.length], colour)])
      : isCompared() ? doc.runs.map((run, index) => [run.name, swatch({ colour: colours[index % colours.length], dash: 0, symbol: index % SYMBOLS.length }, true)]) : [];
  if (!items.length) return null;
  return el("ul", { class: "legend", "aria-label": "Lines; press one to hide or show it" }, ...items.map(([label, picture]) => {
    const button = el("button", { type: "button", "aria-pressed": String(!entry.hidden.has(label)), onclick: () => {
      if (kind === "strip") return;
      if (!entry.hidden.delete(label)) entry.hidden.add(label);
      button.setAttribute("aria-pressed", String(!entry.hidden.has(label)));
      draw(entry);
    } }, picture, el("span", { text: label }));
    return el("li", {}, button);
  }));
}

function block(colour, index) {
  const picture = svg("svg", { width: 16, height: 12, "aria-hidden": "true" });
  picture.append(svg("rect", { width: 16, height: 12, rx: 2, fill: colour }));
  const over = { "/": "M0 12L12 0M6 12L16 2", ".": "M4 4h2M10 4h2M4 8h2M10 8h2", x: "M2 0l12 12M14 0l-12 12", "-": "M0 4H16M0 8H16", "\\": "M0 0l12 12M6 0l10 10", "+": "M5 0V12M11 0V12M0 6H16" }[PATTERNS[index % PATTERNS.length]];
  if (over) picture.append(svg("path", { d: over, stroke: isDark() ? "#000" : "#fff", "stroke-opacity": 0.55, "stroke-width": 1.4 }));
  return picture;
}

function figureNode(kind, content, panel) {
  const id = `${kind}-${content.id}`;
  const old = figures.get(id);
  const entry = { id, kind, content, hidden: old ? old.hidden : new Set(), plot: null, details: null };
  figures.set(id, entry);
  // Over the only figure of a panel the heading of the panel is enough for the eye.
  const isSaid = kind === "chart" && panel.charts.length === 1 && !panel.stacks.length;
  const title = el("h3", { id: `${id}-title`, text: content.title, class: isSaid ? "unseen" : undefined });
  if (content.why_empty) {
    const isAside = panel.charts.some((chart) => !chart.why_empty); // beside drawn figures a line is enough
    title.className = isAside || panel.charts.length > 1 ? "" : "unseen";
    return el("figure", { class: isAside ? "absent" : undefined, "aria-labelledby": `${id}-title` }, el("figcaption", {}, title), el("p", { class: "why", text: content.why_empty }));
  }
  entry.plot = el("div", { class: kind === "stack" || kind === "lanes" ? "plot bars" : "plot", role: "img" });
  if (kind === "stack") entry.plot.style.height = `${Math.max(70 + 46 * content.bars.length, 120)}px`;
  if (kind === "lanes") entry.plot.style.height = `${70 + laneHeight(content) * content.rows.length}px`;
  if (kind === "strip") entry.plot.style.height = `${90 + 26 * new Set(doc.happenings.map((one) => one.kind)).size}px`;
  entry.details = kind !== "chart" ? null : el("details", { open: Boolean(old && old.details && old.details.open), ontoggle: () => {
    if (entry.details.open) fillTable(entry);
  } }, el("summary", { text: "Table" }), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${content.title}` }));
  return el("figure", { class: kind === "lanes" ? "long" : undefined, "aria-labelledby": `${id}-title` },
    el("figcaption", { class: isSaid ? "said" : undefined }, title, isSaid && legend(entry), el("div", { class: "tools" },
      el("button", { type: "button", text: "PNG", "aria-label": `Save ${content.title} as PNG`, onclick: () => savePicture(entry) }),
      kind === "chart" && el("button", { type: "button", text: "CSV", "aria-label": `Save ${content.title} as CSV`, onclick: () => saveText(`${content.id}.csv`, csv(rows(content))) }))),
    isSaid ? null : legend(entry), entry.plot, content.note ? el("p", { class: "note", text: content.note }) : null, entry.details);
}
