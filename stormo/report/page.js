// Tables, files to save, panels, and what keeps a live page up to date; draws the page at its end.
function rows(chart) {
  const known = Object.keys(chart.series[0].at);
  const list = [[...(isCompared() ? ["run"] : []), "series", ...known, chart.y_title]];
  for (const line of chart.series) {
    line.y.forEach((value, index) => list.push([
      ...(isCompared() ? [doc.runs[line.run].name] : []), line.name, ...known.map((name) => (name in line.at ? line.at[name][index] : "")), value ?? "",
    ]));
  }
  return list;
}

function fillTable(entry) {
  const [head, ...body] = rows(entry.content);
  const stride = Math.ceil(body.length / MOST_TABLE_ROWS);
  const shown = body.filter((_, index) => index % stride === 0);
  const texts = head.indexOf("series") + 1;
  const table = el("table", {}, el("caption", { text: entry.content.title }),
    el("thead", {}, el("tr", {}, ...head.map((text, column) => el("th", { scope: "col", class: column >= texts ? "figure" : undefined, text })))),
    el("tbody", {}, ...shown.map((row) => el("tr", {}, ...row.map((text, column) => el("td", { class: column >= texts ? "figure" : undefined, text }))))));
  const box = entry.details.querySelector(".scroll");
  box.replaceChildren(table);
  if (stride > 1) box.append(el("p", { class: "note", text: `every ${stride}th of ${body.length} rows; all are in the CSV` }));
}

// A browser would break a line after the dashes of a flag.
const withFlags = (text) => String(text).split(/(--\S+)/).map((part, index) => (index % 2 ? el("span", { class: "flag", text: part }) : part));

function tableNode(table, panel) {
  const hasRuns = isCompared() || table.columns[0] !== "run";
  const from = hasRuns ? 0 : 1; // with one run its name in each row says nothing
  const headColumn = table.columns[0] === "run" && isCompared() ? 1 : 0;
  const isHead = (column) => column === headColumn && !table.is_code;
  // What names a row, and its kind, are not broken: what they name has room to be.
  const isWhole = (column) => isHead(column) || table.columns[column + from] === "kind";
  const look = (column) => (column + from >= table.first_figure ? "figure" : isWhole(column) ? "whole" : undefined);
  const head = el("tr", {}, ...table.columns.slice(from).map((text, column) => el("th", { scope: "col", class: look(column), text })));
  const body = table.rows.map((row, index) => {
    const isMarked = table.marked.includes(index);
    const isTotal = table.id === "ledger" && row[1] === "all";
    return el("tr", { class: isMarked ? "marked" : isTotal ? "total" : undefined }, ...row.slice(from).map((text, column) =>
      el(isHead(column) ? "th" : "td", {
        scope: isHead(column) ? "row" : undefined,
        class: table.is_code && column + from === row.length - 1 ? "code" : look(column),
      }, ...withFlags(text))));
  });
  const box = el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": table.title },
    el("table", { class: table.first_figure > table.columns.length ? "facts" : undefined }, el("caption", { text: table.title }), el("thead", {}, head), el("tbody", {}, ...body)));
  const tools = el("div", { class: "tools" });
  if (table.marked.length) {
    const only = el("input", { type: "checkbox", onchange: () => {
      body.forEach((row, index) => { row.hidden = only.checked && !table.marked.includes(index); });
    } });
    tools.append(el("label", { class: "only" }, only, " only what differs"));
  }
  tools.append(el("button", { type: "button", text: "CSV", "aria-label": `Save ${table.title} as CSV`, onclick: () => saveText(`${table.id}.csv`, csv([table.columns, ...table.rows])) }));
  const node = el("div", {}, el("div", { class: "table-head" }, el("h3", { text: table.title, class: table.title === panel.title ? "unseen" : undefined }), tools), box);
  if (!table.id.startsWith("plan-")) return node;
  return el("details", {}, el("summary", { text: table.title }), box);
}

// ---- files ------------------------------------------------------------------------------------------------------

function csv(list) {
  // A leading sign of a formula is defused: the names come from whoever named the run.
  const cell = (value) => {
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return list.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

const saveText = (name, text) => save(name, URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" })));

function save(name, address) {
  const link = el("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// ---- the page ---------------------------------------------------------------------------------------------------

function summary() {
  const figureNodes = ([value, words]) => [el("span", { class: "value", text: value }), words ? el("span", { class: "words" }, ...withFlags(words)) : null];
  if (!isCompared()) {
    return el("dl", { class: "tiles" }, ...Object.entries(doc.runs[0].figures).map(([title, [value, words]]) =>
      el("div", { class: "tile" }, el("dt", { text: title }),
        el("dd", { class: value.length > 14 ? "value long" : "value", text: value }), words ? el("dd", { class: "words" }, ...withFlags(words)) : null)));
  }
  const titles = Object.keys(doc.runs[0].figures);
  return el("div", { class: "compare", tabindex: "0", role: "region", "aria-label": "Summary of the runs" }, el("table", {},
    el("caption", { text: "Summary of the runs" }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "run" }), ...titles.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...doc.runs.map((run, index) => el("tr", {},
      el("th", { scope: "row" }, el("span", { class: "dot", style: `background: ${colour(index)}` }), run.name),
      ...titles.map((title) => el("td", { "data-title": title }, ...figureNodes(run.figures[title]))))))));
}

function panelNode(panel, isWide) {
  const strips = panel.id === "timeline" && doc.timeline.length ? [{ id: "timeline", title: "Timeline" }] : [];
  const all = [...panel.stacks.map((one) => figureNode("stack", one, panel)), ...panel.lanes.map((one) => figureNode("lanes", one, panel)), ...panel.charts.map((one) => figureNode("chart", one, panel)), ...strips.map((one) => figureNode("strip", one, panel))];
  const drawn = all.filter((figure) => !figure.classList.contains("absent"));
  return el("section", { id: panel.id, class: isWide ? "panel wide" : "panel", "aria-labelledby": `${panel.id}-heading` },
    el("h2", { id: `${panel.id}-heading`, text: panel.title }),
    panel.about ? el("p", { class: "about", text: panel.about }) : null,
    panel.why_empty ? el("p", { class: "why", text: panel.why_empty }) : null,
    drawn.length ? el("div", { class: "figures" }, ...drawn) : null,
    ...all.filter((figure) => !drawn.includes(figure)),
    panel.pictures.length ? el("div", { class: "figures" }, ...panel.pictures.map((one) => el("figure", {}, el("img", { src: one.address, alt: one.title }), el("figcaption", { text: one.title })))) : null,
    ...panel.tables.map((table) => tableNode(table, panel)),
    panel.notes.length ? el("ul", { class: "notes" }, ...panel.notes.map((text) => el("li", { text }))) : null);
}

// Two panels of one figure or narrow table stand side by side; one that has no such neighbour takes the whole width.
function widths(panels) {
  const isSmall = (panel) => panel && !panel.stacks.length && !panel.lanes.length && !panel.pictures.length && panel.id !== "command" &&
    (panel.charts.length ? panel.charts.length === 1 && !panel.tables.length : panel.tables.length && panel.tables[0].columns.length === 2);
  const wide = [];
  for (let index = 0; index < panels.length; index += 1) {
    if (isSmall(panels[index]) && isSmall(panels[index + 1])) {
      wide.push(false, false);
      index += 1;
    } else wide.push(true);
  }
  return wide;
}

const looksOf = (panel, isWide) => JSON.stringify([panel, isWide, doc.time_unit, doc.timeline, doc.runs.map((run) => run.name)]);
const shapeOf = (panel) => JSON.stringify([panel.id, panel.notes, panel.tables, panel.pictures, panel.why_empty, panel.stacks.map((one) => one.bars.length + one.parts.length), panel.lanes,
  panel.charts.map((chart) => [chart.id, chart.why_empty, chart.note, chart.series.map((line) => [line.run, line.name])])]);

function show(isWhole) {
  document.title = `${doc.title} – stormo`;
  byId("title").textContent = doc.title;
  byId("summary").replaceChildren(summary());
  const notes = doc.runs.flatMap((run) => run.notes);
  if (notes.length) byId("summary").append(el("p", { class: "note", text: notes.join("; ") }));
  if (isWhole) byId("sections").replaceChildren(...doc.panels.map((panel) => el("li", {}, el("a", { href: `#${panel.id}`, text: panel.title }))));
  const wide = widths(doc.panels);
  doc.panels.forEach((panel, index) => {
    const looks = looksOf(panel, wide[index]);
    const before = drawnPanels.get(panel.id);
    if (!isWhole && before && before.looks === looks) return;
    const shape = shapeOf(panel) + wide[index];
    if (!isWhole && before && before.shape === shape) {
      // The same lines have grown: the nodes stay, so that a reader's place, zoom and open tables do too.
      panel.stacks.forEach((one) => { figures.get(`stack-${one.id}`).content = one; });
      panel.charts.forEach((one) => { figures.get(`chart-${one.id}`).content = one; });
    } else {
      const node = panelNode(panel, wide[index]);
      const old = byId(panel.id);
      if (old) {
        old.querySelectorAll(".plot").forEach((plot) => Plotly.purge(plot));
        old.replaceWith(node);
      } else byId("panels").append(node);
    }
    drawnPanels.set(panel.id, { looks, shape });
    for (const one of [...panel.stacks.map((x) => `stack-${x.id}`), ...panel.lanes.map((x) => `lanes-${x.id}`), ...panel.charts.map((x) => `chart-${x.id}`), ...(panel.id === "timeline" ? ["strip-timeline"] : [])]) {
      if (figures.has(one)) draw(figures.get(one));
    }
  });
  byId("made").textContent = `Made by stormo on ${new Date(doc.made_unix_s * 1000).toLocaleString("en-GB")}. Drag over a figure to zoom, double-click to reset; click a name in a legend to hide its line. Ticks at the foot of a figure are checkpoints, dotted lines are resumes and rollbacks.`;
}

const redraw = () => { for (const entry of figures.values()) draw(entry); };

document.querySelectorAll("input[name=axis]").forEach((input) => input.addEventListener("change", () => {
  axis = input.value;
  redraw();
}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(true));
addEventListener("beforeprint", () => { isPrinting = true; show(true); });
addEventListener("afterprint", () => { isPrinting = false; show(true); });

// ---- live -------------------------------------------------------------------------------------------------------

const STATES = { waiting: "waiting for the run to start", running: "running", done: "the run has ended: done",
  stopped: "the run has ended: stopped, can be resumed", diverged: "the run has ended: diverged",
  failed: "the run has ended: failed", interrupted: "silent for minutes: killed, or very slow" };

const isLive = Boolean(document.body.dataset.live);

function status(words, kind) {
  const tasks = [...new Set(doc.runs.map((run) => run.task).filter(Boolean))];
  const text = words || (isLive ? STATES[doc.runs[0].state] || doc.runs[0].state : tasks.join(", "));
  // Set only when it changes: a screen reader says it every time.
  if (byId("status").textContent !== text) byId("status").textContent = text;
  byId("status").className = kind || (isLive ? doc.runs[0].state : "");
  byId("time").textContent = isLive ? `· as of ${new Date(doc.made_unix_s * 1000).toLocaleTimeString("en-GB")}` : "";
}

async function poll() {
  let wait = 2;
  try {
    const token = new URLSearchParams(location.search).get("token");
    const answer = await fetch(`data?token=${encodeURIComponent(token)}&version=${encodeURIComponent(doc.version || "")}`, { cache: "no-store" });
    if (answer.status === 200) {
      doc = await answer.json();
      show(false);
      status();
    } else if (answer.status === 204) status();
    else status(`the server refuses: ${(await answer.text()).trim()}`, "lost");
    wait = doc.poll_s || wait;
  } catch {
    status("the server does not answer: stormo watch has ended, or the connection is lost", "lost");
  }
  setTimeout(poll, wait * 1000);
}

window.stormoPage = { csvOf: (id) => csv(rows(figures.get(id).content)), doc: () => doc };
show(true);
status();
if (isLive) setTimeout(poll, 1000);
document.body.dataset.ready = "1";
