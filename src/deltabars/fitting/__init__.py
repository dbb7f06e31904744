"""From a model and its data to a `DeltaFit`, and what a fit can be asked."""
