// The table of inputs: sorted, filtered, and shown fifty rows at a time.
const table = {
  size: 50, page: 0, key: "score", descending: true, list: [],
  filters: {},
};

// What a column sorts by and shows: classes by their names' order in the data, text as text.
const kinds = {
  name: (value) => value, text: (value) => value, class: className,
  mark, number, percent,
};
// On a phone there is room for an input, what was predicted, and its score.
const OnPhones = new Set(["name", "label", "value", "score"]);
const classOf = ({ key, kind }) =>
  [isNumber(kind) ? "number" : "", OnPhones.has(key) ? "" : "minor"].filter(Boolean).join(" ") || null;
const isNumber = (kind) => kind === "number" || kind === "percent";

function compare(a, b) {
  const [x, y] = [rows[table.key][a], rows[table.key][b]];
  const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
  return (table.descending ? -order : order) || a - b;
}

function isShown(row) {
  const { search, label, target, right, low, high } = table.filters;
  const words = rows.text ? `${rows.name[row]} ${rows.text[row]}` : rows.name[row];
  return (!search || words.toLowerCase().includes(search.toLowerCase()))
    && (!label || rows.label[row] === Number(label))
    && (!target || rows.target[row] === Number(target))
    && (!right || rows.right[row] === Number(right))
    && (low === undefined || rows.score[row] >= low)
    && (high === undefined || rows.score[row] <= high);
}

function sortBy(key) {
  const column = data.columns.find((one) => one.key === key);
  table.descending = table.key === key ? !table.descending : isNumber(column.kind);
  table.key = key;
  table.page = 0;
  showTable();
}

function showTable() {
  table.list = rows.index.map((_, row) => row).filter(isShown).sort(compare);
  const pages = Math.max(1, Math.ceil(table.list.length / table.size));
  table.page = Math.min(table.page, pages - 1);
  const first = table.page * table.size;
  const here = table.list.slice(first, first + table.size);
  for (const head of byId("head").children) {
    const mine = head.dataset.key === table.key;
    if (mine) head.setAttribute("aria-sort", table.descending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
    head.querySelector(".arrow").textContent = mine ? (table.descending ? "▼" : "▲") : "↕";
  }
  byId("body").replaceChildren(...here.map(tableRow));
  const count = table.list.length.toLocaleString("en");
  const range = here.length ? `Showing ${first + 1} to ${first + here.length} of ${count}` : "No";
  byId("shown").textContent = `${range} inputs`
    + (table.list.length < rows.index.length ? ` (filtered from ${rows.index.length.toLocaleString("en")})` : "");
  byId("pages").textContent = `Page ${table.page + 1} of ${pages}`;
  byId("before").disabled = table.page === 0;
  byId("after").disabled = table.page === pages - 1;
}

// A cell of CSV. A text that a spreadsheet would take for a formula begins with an apostrophe.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// The rows that the filters leave, in the order shown.
function asCsv() {
  const plain = { class: className, mark: (right) => (right ? "right" : "wrong") };
  const lines = [["index", ...data.columns.map(({ key }) => key), ...(rows.note ? ["note"] : [])]];
  for (const row of table.list) {
    lines.push([rows.index[row], ...data.columns.map(({ key, kind }) => (plain[kind] || ((value) => value))(rows[key][row])),
      ...(rows.note ? [rows.note[row]] : [])]);
  }
  return lines.map((line) => line.map(csvCell).join(",") + "\r\n").join("");
}

function saveCsv() {
  const address = URL.createObjectURL(new Blob(["\ufeff", asCsv()], { type: "text/csv" }));
  element("a", { href: address, download: "inputs.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(address));
}

function tableRow(row) {
  const cells = data.columns.map(({ key, kind }) => {
    if (key === "name") {
      return element("th", { scope: "row" },
        element("button", { type: "button" }, picture(row),
          element("span", {}, rows.name[row], excerpt(row), note(row))));
    }
    return element("td", { class: classOf({ key, kind }) }, kinds[kind](rows[key][row]));
  });
  return element("tr", { "data-index": rows.index[row], click: () => detail.open(row, table.list) }, ...cells);
}

function field(name, title, control, whole = false) {
  control.name = name;
  return element("label", { class: whole ? "whole" : null }, title, control);
}

function choice(options) {
  return element("select", {}, element("option", { value: "" }, "All"),
    ...options.map(([value, title]) => element("option", { value }, title)));
}

function startFilters() {
  const form = byId("filters");
  const names = data.classes.map((name, label) => [label, name]);
  const edge = () => element("input", { type: "number", min: "0", step: "any", inputmode: "decimal" });
  const search = element("input", { type: "search", autocomplete: "off" });
  form.append(field("search", "Search names", search, true));
  if (data.kind === "categorical") {
    form.append(field("label", "Predicted class", choice(names)));
    if (rows.target) form.append(field("target", "Target class", choice(names)));
  }
  if (rows.right) form.append(field("right", "Prediction", choice([["1", "Right"], ["0", "Wrong"]])));
  form.append(field("low", "Score from", edge()), field("high", "Score to", edge()));
  form.append(element("button", { type: "reset" }, "Clear filters"));
  const read = () => {
    const given = Object.fromEntries(new FormData(form));
    const edgeOf = (text) => (text === "" ? undefined : Number(text));
    table.filters = { ...given, low: edgeOf(given.low), high: edgeOf(given.high) };
    table.page = 0;
    showTable();
  };
  form.addEventListener("input", read);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(read));
}

function startTable() {
  for (const { key, title, kind } of data.columns) {
    const arrow = element("span", { class: "arrow", "aria-hidden": "true" });
    byId("head").append(element("th", { scope: "col", "data-key": key, class: classOf({ key, kind }) },
      element("button", { type: "button", click: () => sortBy(key) }, title + " ", arrow)));
  }
  startFilters();
  byId("save").addEventListener("click", saveCsv);
  const turn = (step) => () => { table.page += step; showTable(); byId("table").scrollIntoView(); };
  byId("before").addEventListener("click", turn(-1));
  byId("after").addEventListener("click", turn(1));
  showTable();
}
