"""deltabars inside other libraries; each file needs the extra of its name.

What reads their data is in `problem/data.py`.
"""
