// What workers did from when to when: one row a worker, one colour a kind, paler the later a stage of a worker is.
const LANE_PATTERNS = ["", "/", "."]; // by colour, for those who cannot tell the colours apart
const laneHeight = (lanes) => Math.max(12, Math.min(30, Math.floor(900 / lanes.rows.length)));

function lanesFigure(lanes, options = {}) {
  const dark = !options.paper && isDark();
  const colours = palette(dark);
  const data = lanes.kinds.map(({ name, colour, bars }) => ({
    type: "bar", orientation: "h", name: escaped(name), width: 0.84,
    y: bars.map(([row]) => row), base: bars.map(([, start]) => start), x: bars.map(([, , length]) => length),
    text: bars.map(([, , , label]) => escaped(label)), textposition: "inside", insidetextanchor: "middle",
    textangle: 0, insidetextfont: { color: dark ? "#000000" : "#ffffff" },
    customdata: bars.map(([, , , , words]) => escaped(words)), hovertemplate: "%{customdata}<extra></extra>",
    marker: { color: colours[colour % colours.length], opacity: bars.map((bar) => 1 - Math.min(0.15 * bar[5], 0.6)),
      line: { color: dark ? "#181c22" : "#ffffff", width: 1 },
      pattern: { shape: LANE_PATTERNS[colour], fillmode: "overlay", fgopacity: 0.2, size: 7, fgcolor: dark ? "#000000" : "#ffffff" } },
    visible: options.hidden && options.hidden.has(name) ? "legendonly" : true,
  }));
  const drawn = layout(dark, { ...options, revision: lanes.id });
  drawn.barmode = "overlay";
  drawn.hovermode = "closest";
  drawn.uniformtext = { mode: "hide", minsize: 9 };
  drawn.yaxis.tickvals = lanes.rows.map((_, row) => row);
  drawn.yaxis.ticktext = lanes.rows.map(escaped);
  drawn.yaxis.range = [lanes.rows.length - 0.5, -0.5];
  drawn.yaxis.showgrid = false;
  drawn.yaxis.zeroline = false;
  drawn.xaxis.title.text = lanes.x_title;
  return { data, layout: drawn };
}
