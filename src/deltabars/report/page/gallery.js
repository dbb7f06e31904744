// The gallery: a card a class, with its most and its least certain inputs.
function startGallery() {
  const rowOf = new Map(rows.index.map((place, row) => [place, row]));
  for (const shelf of data.shelves) {
    const both = [...shelf.most, ...shelf.least].map((place) => rowOf.get(place));
    const line = (title, places) => places.length
      ? [element("h4", {}, title), element("ul", {}, ...places.map((place) => exhibit(rowOf.get(place), both)))]
      : [];
    byId("shelves").append(element("article", { class: "card shelf" },
      element("h3", {}, `${className(shelf.label)} `,
        element("span", { class: "quiet" }, `${shelf.count.toLocaleString("en")} predicted`)),
      ...line("Most certain", shelf.most), ...line("Least certain", shelf.least)));
  }
}

function exhibit(row, list) {
  const wrong = rows.right && !rows.right[row];
  const name = rows.text ? rows.text[row].slice(0, 60) : rows.name[row].split("/").pop();
  const words = [rows.picture ? null : element("span", {}, name),
    element("span", {}, `score ${number(rows.score[row])}`),
    wrong ? element("span", { class: "mark no" }, `✗ is ${className(rows.target[row])}`) : null];
  return element("li", {}, element("button", { type: "button", click: () => detail.open(row, list) },
    picture(row), ...words));
}
