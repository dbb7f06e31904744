// What all parts of the page share: the data, elements, numbers, and the theme.
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.rows;
const byId = (id) => document.getElementById(id);

// An element; text is always set as text, so that no name can become markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "click") made.addEventListener("click", value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 1) return value.toPrecision(4);
  if (size >= 1e-4 || size === 0) return value.toFixed(4);
  return value.toExponential(1);
}

const percent = (share) => `${(100 * share).toFixed(1)}\u202f%`;
const className = (label) => data.classes[label];
const outputName = (row, place) =>
  data.classes[rows.outputs.which ? rows.outputs.which[row][place] : place];

function picture(row) {
  if (!rows.picture) return null;
  const made = element("img", { src: rows.picture[row], alt: `picture of ${rows.name[row]}` });
  // Few pixels are drawn as squares: smoothing would show what is not there.
  const sharpen = () => made.classList.toggle("coarse", made.naturalWidth < 64);
  made.addEventListener("load", sharpen);
  return made;
}

// The beginning of an input that is a text, and what is wrong with its error bar.
const excerpt = (row) => (rows.text ? element("small", {}, rows.text[row].slice(0, 120)) : null);
const note = (row) => (rows.note && rows.note[row] ? element("small", { class: "mark no" }, rows.note[row]) : null);

function mark(right) {
  return element("span", { class: right ? "mark yes" : "mark no" }, right ? "✓ right" : "✗ wrong");
}

// A table of texts, of which the first ones of a row are names; with `same`, the diagonal is marked.
function tableOf({ caption, head, rows: lines, texts = 1, same = false }) {
  const kind = (place) => (place < texts ? null : "number");
  return element("div", { class: "scroll" }, element("table", {}, element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head.map((title, place) =>
      element("th", { scope: "col", class: kind(place) }, title)))),
    element("tbody", {}, ...lines.map((line, i) => element("tr", {}, ...line.map((text, place) => place
      ? element("td", { class: same && place === i + 1 ? "number same" : kind(place) }, text)
      : element("th", { scope: "row" }, text)))))));
}

const theme = {
  chosen: false,
  set(name) {
    document.documentElement.dataset.theme = name;
    const button = byId("theme");
    button.textContent = name === "dark" ? "Switch to light" : "Switch to dark";
    redrawPlots();
  },
  get name() { return document.documentElement.dataset.theme; },
  start() {
    const wish = matchMedia("(prefers-color-scheme: dark)");
    wish.addEventListener("change", () => {
      if (!theme.chosen) theme.set(wish.matches ? "dark" : "light");
    });
    theme.set(theme.name);
    byId("theme").addEventListener("click", () => {
      theme.chosen = true;
      theme.set(theme.name === "dark" ? "light" : "dark");
    });
    let before = theme.name;
    addEventListener("beforeprint", () => { before = theme.name; theme.set("light"); fitPlots(660); });
    addEventListener("afterprint", () => { theme.set(before); fitPlots(null); });
  },
};
