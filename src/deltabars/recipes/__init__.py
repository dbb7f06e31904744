"""Ready-made experiments: data, network, training and fit in one place."""
