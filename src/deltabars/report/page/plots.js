// The plots. Each is a function that draws into its element, so that a new theme can redraw it.
const drawn = new Map();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// A colour at some opacity, from #rrggbb.
const faded = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 10, font: { size: 12.5 } }, gridcolor: colour("grid"), linecolor: colour("line"),
    zerolinecolor: colour("line"), automargin: true, fixedrange: true, ...more,
  };
}

function layout(x, y, more = {}) {
  return {
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("ink") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 56, r: 12, t: 8, b: 44 }, xaxis: x, yaxis: y, dragmode: false,
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
    ...more,
  };
}

function draw(id, make) {
  drawn.set(id, make);
  const { traces, layout: frame } = make();
  return Plotly.react(byId(id), traces, frame, { displayModeBar: false, responsive: true });
}

function redrawPlots() {
  for (const [id, make] of drawn) if (byId(id).offsetParent) draw(id, make);
}

// On paper the width is the paper's, not the window's; null gives the plots their own width again.
function fitPlots(width) {
  for (const id of drawn.keys()) {
    if (byId(id).offsetParent) Plotly.relayout(byId(id), { width, autosize: width === null });
  }
}

const logTicks = { type: "log", dtick: 1, exponentformat: "power", showexponent: "all" };
const styles = () => [
  { color: colour("right"), dash: "solid" },
  { color: colour("wrong"), dash: "dash" },
  { color: colour("third"), dash: "dot" },
];

function spectrum() {
  const plot = data.plots.spectrum;
  const traces = [];
  plot.matrices.forEach((matrix, place) => {
    const { color, dash } = styles()[place];
    const count = matrix.values.length;
    const name = matrix.name;
    traces.push({
      x: matrix.values.map((_, k) => k + 1), y: matrix.values.map((v) => (v > 0 ? v : null)), name,
      mode: count > 1 ? "lines" : "markers", line: { color, dash, width: 2.5 }, legendgroup: name,
      hovertemplate: `${name}, k = %{x}: %{y:.4g}<extra></extra>`,
    });
    if (matrix.tail) {
      const [low, middle, high] = matrix.tail;
      const ends = [count, plot.parameters];
      const tail = { legendgroup: name, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      traces.push({ ...tail, x: [...ends, ends[1], ends[0]], y: [low, low, high, high],
        mode: "lines", fill: "toself", fillcolor: faded(color, 0.18) });
      traces.push({ ...tail, x: ends, y: [middle, middle], mode: "lines",
        line: { color, width: 1.5, dash: "dot" }, showlegend: place === 0,
        name: "closed tail", legendgroup: "tail", hoverinfo: "y" });
    }
    if (matrix.smallest) {
      traces.push({ x: matrix.smallest.map((_, k) => plot.parameters - k), y: matrix.smallest,
        name: `smallest of ${name}, magnitude`, mode: "markers", legendgroup: name,
        marker: { color, symbol: "circle-open", size: 5 } });
    }
  });
  traces.push({ x: [1, plot.parameters], y: [plot.level, plot.level], name: "λ", mode: "lines",
    line: { color: colour("ink"), width: 1.2, dash: "dashdot" }, hoverinfo: "y" });
  return { traces, layout: layout(axis("index of the eigenvalue", logTicks), axis("eigenvalue", logTicks)) };
}

function uncertainty() {
  const plot = data.plots.uncertainty;
  const groups = plot.right
    ? [["right", 1, "right", "circle-open"], ["wrong", 0, "wrong", "x"]]
    : [["predictions", null, "right", "circle-open"]];
  const traces = [];
  for (const [name, value, tint, symbol] of groups) {
    const mine = plot.x.map((_, i) => i).filter((i) => value === null || plot.right[i] === value);
    if (!mine.length) continue;
    traces.push({
      x: mine.map((i) => plot.x[i]), y: mine.map((i) => plot.y[i]), name, mode: "markers",
      customdata: mine.map((i) => plot.row[i]),
      text: mine.map((i) => (plot.row[i] < 0 ? "" : rows.name[plot.row[i]].replaceAll("<", "‹"))),
      marker: { color: colour(tint), symbol, size: value === 0 ? 8 : 5, opacity: value === 0 ? 0.9 : 0.5 },
      hovertemplate: "%{x:.3f} ± %{y:.3f} %{text}<extra></extra>",
    });
  }
  for (const curve of plot.curves) {
    const wrong = curve.kind === "wrong";
    traces.push({ x: curve.x, y: curve.y, mode: "lines", hoverinfo: "skip",
      showlegend: false,
      line: { color: colour(wrong ? "wrong" : "right"), width: 3, dash: wrong ? "dash" : "solid" } });
  }
  return { traces, layout: layout(axis(plot.axis), axis("std (error bar)", { rangemode: "tozero" })) };
}

function risk() {
  const plot = data.plots.risk;
  const traces = plot.curves.map((curve, place) => {
    const ideal = curve.key === "ideal";
    const style = ideal ? { color: colour("quiet"), dash: "dashdot" } : styles()[place];
    return { x: curve.coverage, y: curve.risk, name: ideal ? curve.name : `by ${curve.name}`,
      mode: "lines", line: { ...style, width: ideal ? 1.5 : 2.5 },
      hovertemplate: "coverage %{x:.0%}: %{y:.2%} wrong<extra></extra>" };
  });
  traces.push({ x: [0, 1], y: [plot.rate, plot.rate], name: "no order", mode: "lines",
    hoverinfo: "y", showlegend: false, line: { color: colour("quiet"), width: 1, dash: "dot" } });
  const share = { tickformat: ".0%", rangemode: "tozero" };
  const many = { ...share, tickformat: ".1~%" };
  const annotations = [{ x: 0.02, y: plot.rate, text: "in no order", showarrow: false, xanchor: "left",
    yanchor: "top", font: { color: colour("quiet") } }];
  const frame = layout(axis("coverage: share of inputs answered", share), axis("risk: share of answers wrong", many));
  return { traces, layout: { ...frame, annotations } };
}

function scores() {
  const { edges, counts } = data.plots.scores;
  const middles = counts.map((_, i) => Math.sqrt(edges[i] * edges[i + 1]));
  const traces = [{ type: "bar", x: middles, y: counts, width: counts.map((_, i) => edges[i + 1] - edges[i]),
    marker: { color: colour("right"), line: { color: colour("card"), width: 1 } },
    hovertemplate: "score about %{x:.3g}: %{y} inputs<extra></extra>" }];
  const decade = Math.floor(Math.log10(edges[0]));
  const ticks = [0, 1, 2, 3, 4].flatMap((up) => [1, 2, 5].map((first) => Number(`${first}e${decade + up}`)))
    .filter((tick) => tick >= edges[0] && tick <= edges[edges.length - 1]);
  const x = axis("score", { type: "log", ...(ticks.length > 1 ? { tickvals: ticks, ticktext: ticks.map(String) } : { nticks: 4 }) });
  const frame = layout(x, axis("inputs"));
  return { traces, layout: { ...frame, showlegend: false, bargap: 0 } };
}

// What happened against what was predicted: on the dotted line they agree.
function calibration() {
  const plot = data.plots.calibration;
  const share = { tickformat: ".0%", range: [0, 1.02] };
  const biggest = Math.max(...plot.counts);
  const traces = [
    { x: [0, 1], y: [0, 1], mode: "lines", hoverinfo: "skip", line: { color: colour("quiet"), width: 1.2, dash: "dot" } },
    { x: plot.x, y: plot.y, mode: "lines+markers", line: { color: colour("right"), width: 2 },
      marker: { size: plot.counts.map((n) => 6 + 12 * Math.sqrt(n / biggest)), opacity: 0.85 },
      customdata: plot.counts, hovertemplate: "%{x:.1%}: %{y:.1%} of %{customdata}<extra></extra>" },
  ];
  const frame = layout(axis(plot.axes[0], share), axis(plot.axes[1], share));
  return { traces, layout: { ...frame, showlegend: false } };
}

function startPlots() {
  for (const [name, plot] of Object.entries(data.plots)) byId(`${name}-summary`).textContent = plot.summary;
  draw("spectrum-plot", spectrum);
  draw("uncertainty-plot", uncertainty).then((plot) => plot.on("plotly_click", (event) => {
    const row = event.points[0].customdata;
    if (row >= 0) detail.open(row);
  }));
  // The table first: a plot takes the width that it leaves.
  if (data.plots.risk) byId("areas").append(areas(data.plots.risk.curves));
  if (data.plots.risk) draw("risk-plot", risk);
  draw("scores-plot", scores);
  if (data.plots.calibration) draw("calibration-plot", calibration);
}

function areas(curves) {
  return tableOf({
    caption: "Area under each curve, and the share wrong at 80 and 90 % coverage",
    head: ["Ordered by", "Area", "At 80 %", "At 90 %"],
    rows: curves.map(({ name, area, at }) => [name, number(area), percent(at[0]), percent(at[1])]),
  });
}
