"""The page: what `holdfast ui` shows."""
