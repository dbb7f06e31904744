// One input: its picture, its probabilities with error bars, and how its score settles.
const detail = {
  row: 0, list: [],

  open(row, list = rows.index.map((_, place) => place)) {
    detail.row = row;
    detail.list = list;
    if (!byId("detail").open) byId("detail").showModal();
    detail.show();
  },

  move(step) {
    const place = detail.list.indexOf(detail.row) + step;
    if (place < 0 || place >= detail.list.length) return;
    detail.row = detail.list[place];
    detail.show();
  },

  show() {
    const { row, list } = detail;
    const place = list.indexOf(row);
    byId("detail-title").textContent = rows.name[row];
    byId("detail-place").replaceChildren(`${(place + 1).toLocaleString("en")} of ${list.length.toLocaleString("en")}`,
      element("span", { class: "keys" }, "; arrow keys go to the previous and the next"));
    const focused = document.activeElement;
    byId("previous").disabled = place <= 0;
    byId("next").disabled = place === list.length - 1;
    if (focused.disabled) byId("detail-title").focus();
    byId("detail-side").replaceChildren(...[picture(row), whole(row), facts(row)].filter(Boolean));
    byId("bars-title").textContent = data.kind === "gaussian"
      ? "Predictions with error bars" : "Class probabilities with error bars";
    byId("bars-summary").textContent = inWords(row);
    byId("detail-table").replaceChildren(numbers(row));
    draw("bars-plot", bars);
    const settles = rows.settled.ranks.length > 0;
    byId("settling").hidden = !settles;
    if (settles) {
      byId("settling-summary").textContent = settledInWords(row);
      draw("settling-plot", settling);
    }
    history.replaceState(null, "", "#input-" + rows.index[row]);
  },

  start() {
    const dialog = byId("detail");
    byId("previous").addEventListener("click", () => detail.move(-1));
    byId("next").addEventListener("click", () => detail.move(1));
    byId("close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { event.preventDefault(); detail.move(step); }
    });
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
    addEventListener("hashchange", detail.follow);
    detail.follow();
  },

  follow() {
    const found = /^#input-(\d+)$/.exec(location.hash);
    if (!found) return;
    const row = rows.index.indexOf(Number(found[1]));
    if (row >= 0) detail.open(row, table.list.includes(row) ? table.list : undefined);
    else byId("shown").textContent = `Input ${found[1]} is not in this page, which has ${rows.index.length} of ${data.total} inputs.`;
  },
};

const whole = (row) => (rows.text ? element("blockquote", { class: "text" }, rows.text[row]) : null);

function facts(row) {
  const list = element("dl", {});
  const add = (title, value, note) => list.append(element("div", {}, element("dt", {}, title),
    element("dd", {}, value, note ? element("small", {}, note) : null)));
  const shown = data.kind === "categorical" ? className : (value) => (data.kind === "gaussian" ? number(value) : value);
  if (rows.label) add("Predicted", shown(rows.label[row]));
  if (rows.target) add("Target", shown(rows.target[row]));
  if (rows.right) add("Prediction", mark(rows.right[row]));
  if (rows.top) add("Probability", `${number(rows.top[row])} ± ${number(rows.std[row])}`);
  add("Score", number(rows.score[row]), `exact value between ${number(rows.low[row])} and ${number(rows.high[row])}`);
  if (rows.information) add("Mutual information", `${number(rows.information[row])} nats`);
  if (rows.note && rows.note[row]) add("Its error bar", rows.note[row]);
  if (rows.entropy) add("Entropy", `${number(rows.entropy[row])} nats`);
  return list;
}

const outputsOf = (row) => rows.outputs.mean[row].map((mean, place) => ({
  name: outputName(row, place), mean, std: rows.outputs.std[row][place],
  low: rows.outputs.std_low[row][place], high: rows.outputs.std_high[row][place],
  truth: rows.outputs.truth ? rows.outputs.truth[row][place] : null,
}));

function inWords(row) {
  const first = [...outputsOf(row)].sort((a, b) => b.mean - a.mean).slice(0, 3);
  return first.map((one) => `${one.name}: ${number(one.mean)} ± ${number(one.std)}`).join("; ")
    + ". Thin bars reach to the most that an error bar can be with all eigenpairs."
    + (rows.outputs.truth ? " Diamonds are the targets." : "");
}

function settledInWords(row) {
  const { ranks, score } = rows.settled;
  const last = ranks.length - 1;
  const cut = settledTop(row) < Math.max(...rows.settled.high[row]) ? " and is cut off at the top" : "";
  return `From ${number(score[row][0])} at K = ${ranks[0]} to ${number(score[row][last])} at K = ${ranks[last]}. The band holds the exact value${cut}.`;
}

// The band of the first K's would flatten the rest: it may run out of the top.
const settledTop = (row) =>
  Math.min(Math.max(...rows.settled.high[row]), 2.5 * Math.max(...rows.settled.score[row])) || 1;

function bars() {
  const outputs = outputsOf(detail.row);
  const names = outputs.map((one) => one.name);
  const places = names.map((_, place) => place);
  const reach = (array, thickness, color, width) => ({ type: "data", array, thickness, color, width });
  const base = { type: "bar", orientation: "h", y: places, x: outputs.map((one) => one.mean) };
  const traces = [
    { ...base, marker: { color: faded(colour("right"), 0.45) }, hoverinfo: "skip",
      error_x: reach(outputs.map((one) => one.high), 1, colour("quiet"), 3) },
    { ...base, marker: { color: "rgba(0,0,0,0)" },
      error_x: reach(outputs.map((one) => one.std), 3, colour("ink"), 5),
      customdata: outputs.map((one) => number(one.std)), hovertemplate: "%{x:.4f} ± %{customdata}<extra></extra>" },
  ];
  if (outputs.some((one) => one.truth !== null)) {
    traces.push({ x: outputs.map((one) => one.truth), y: places, mode: "markers", hoverinfo: "x",
      marker: { symbol: "diamond-open", size: 11, color: colour("wrong"), line: { width: 2 } } });
  }
  // Long names lose their middle: the beginning or the end tells them apart. Plotly reads tags.
  const text = names.map((name) => (name.length > 18 ? name.slice(0, 8) + "…" + name.slice(-9) : name).replaceAll("<", "‹"));
  const x = axis(data.kind === "gaussian" ? "predicted number" : "probability", { zeroline: true });
  const y = axis("", { tickvals: places, ticktext: text, autorange: "reversed", showgrid: false });
  const frame = layout(x, y, { showlegend: false, barmode: "overlay", bargap: 0.35 });
  return { traces, layout: frame };
}

function settling() {
  const { ranks, score, low, high } = rows.settled;
  const row = detail.row;
  const edge = { x: ranks, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  const traces = [
    { ...edge, y: low[row] },
    { ...edge, y: high[row], fill: "tonexty", fillcolor: faded(colour("third"), 0.22), name: "interval of the exact score", showlegend: true },
    { x: ranks, y: score[row], name: "score", mode: "lines+markers", line: { color: colour("third"), width: 2.5 },
      hovertemplate: "K = %{x}: %{y:.4f}<extra></extra>" },
  ];
  const few = ranks.filter((k, place) => place === ranks.length - 1 || (place % 2 === 0 && place < ranks.length - 2));
  const x = axis("eigenpairs K", { type: "log", tickvals: few, ticktext: few.map(String) });
  return { traces, layout: layout(x, axis("score", { range: [0, 1.05 * settledTop(row)] })) };
}

function numbers(row) {
  const outputs = outputsOf(row);
  const truth = outputs.some((one) => one.truth !== null);
  const head = [data.kind === "gaussian" ? "Output" : "Class", data.kind === "gaussian" ? "Mean" : "Probability",
    "± std", "std at least", "std at most", ...(truth ? ["Target"] : [])];
  return element("table", {}, element("caption", { class: "hidden" }, "Predictions with their error bars and these ones' bounds"),
    element("thead", {}, element("tr", {}, ...head.map((title, place) =>
      element("th", { scope: "col", class: place ? "number" : null }, title)))),
    element("tbody", {}, ...outputs.map((one) => element("tr", {}, element("th", { scope: "row" }, one.name),
      ...[one.mean, one.std, one.low, one.high, ...(truth ? [one.truth] : [])].map((value) =>
        element("td", { class: "number" }, number(value)))))));
}
