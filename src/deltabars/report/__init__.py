"""Pictures of fits and predictions (matplotlib, an extra)."""
