"""Files: read within bounds, written whole or not at all; the format of saved fits."""
