"""Eight networks, and their replicas trained on bootstrap samples: the true error bars of a study.

`subjects` has the networks and the command that trains them, `material` their data, which `prepare`
gathers in one small folder. `stacked` trains many networks at once, `sequential` one after the
other.
"""
