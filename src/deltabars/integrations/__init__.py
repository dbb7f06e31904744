"""deltabars inside other libraries; each room needs the extra of its name."""
