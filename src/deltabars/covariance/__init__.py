"""The covariance of trained parameters from eigenpairs and λ, and the intervals around it.

`low_rank.py` has the one matrix form and what is asked of a covariance, `tail.py` what is known of
the eigenvalues that were not computed, `estimators.py` and `sandwich.py` the estimators.

Nothing here knows networks or data; eigenpairs come as plain tensors.
"""
