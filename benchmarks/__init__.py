"""Time, memory and accuracy of deltabars and of its peers, measured on the same work.

`runner.run_bench` is what `python -m benchmarks` calls; each work is a module of its own.
"""
