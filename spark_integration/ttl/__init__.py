"""Removes rows of state when their time to live is over, or what they count has ended."""
