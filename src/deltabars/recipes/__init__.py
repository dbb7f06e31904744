"""Ready-made experiments: data, network, training and fit in one place.

`digits.py` and `demo.py` need scikit-learn alone; the paper's networks, their training and the
reproduction of its figures are the rest. Nothing else in the package uses them but `cli`.
"""
