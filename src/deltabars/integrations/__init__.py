"""deltabars inside other libraries; each file needs the extra of its name."""
