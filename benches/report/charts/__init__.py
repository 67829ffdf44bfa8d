"""Charts as inline SVG, drawn by matplotlib: one question each, in colours that a style sheet sets."""
