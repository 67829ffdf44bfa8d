"""How rows of state go: when their time to live is over, or when what they count has ended."""
