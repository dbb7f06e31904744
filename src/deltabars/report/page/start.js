// The fit at a glance: the judgement first, notes, and the numbers.
function startGlance() {
  for (const name of ["kind", "spread"]) {
    for (const node of document.querySelectorAll(`[data-${name}]`)) {
      if (!node.dataset[name].split(" ").includes(data[name])) node.remove();
    }
  }
  const parts = { ...data.plots, classes: data.tables.length, gallery: data.shelves.length };
  for (const name of ["risk", "calibration", "classes", "gallery"]) {
    if (parts[name]) continue;
    byId(name).hidden = true;
    document.querySelector(`nav a[href="#${name}"]`).parentElement.hidden = true;
  }
  byId("unknown").hidden = Boolean(rows.target);
  byId("ratio").textContent = data.ratio === null ? ""
    : `Here wrong predictions have ${data.ratio} times the mean score of right ones.`;
  byId("left-out").textContent = data.left_out
    ? `${data.left_out.toLocaleString("en")} classes that were predicted less often are left out.` : "";
  byId("notices").append(...data.notices.map(([title, text, kind]) =>
    element("p", { class: `notice ${kind}` }, element("strong", {}, kind === "mild" ? `Note: ${title}` : title), ` ${text}`)));
  byId("facts").append(...data.facts.map(([name, value, note]) => element("div", { class: "fact" },
    element("dt", {}, name), element("dd", {}, element("strong", {}, value), element("span", {}, note)))));
  const [shown, total] = [rows.index.length, data.total].map((count) => count.toLocaleString("en"));
  byId("rows-about").textContent = rows.index.length === data.total ? "All inputs are here." :
    `${shown} of ${total} inputs are here: those of the gallery, those with the highest scores, and an even sample`
    + " of the others. All figures above are over all inputs.";
}

// Everything once, in the order in which it is seen.
theme.start();
startGlance();
byId("tables").append(...data.tables.map(tableOf));
startGallery();
startTable();
startPlots();
detail.start();
