"""The covariance of trained parameters from eigenpairs and λ, and the intervals around it.

`estimators.py` lists the estimators, builds them, and has A⁻¹/N; `sandwich.py` has H⁻¹GH⁻¹/N, and
`base.py` what they share, with what is known of the eigenvalues that were not computed.

Nothing here knows networks or data; eigenpairs come as plain tensors.
"""
