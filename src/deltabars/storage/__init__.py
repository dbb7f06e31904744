"""Files: read within bounds, written whole or not at all; the format of saved fits.

What a fit puts into them is in `fitting`, RUN folders are in `cli`.
"""
