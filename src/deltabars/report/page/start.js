// Everything once, in the order in which it is seen.
theme.start();
startGallery();
startTable();
startPlots();
detail.start();
