// Everything once, in the order in which it is seen.
theme.start();
byId("tables").append(...data.tables.map(tableOf));
startGallery();
startTable();
startPlots();
detail.start();
