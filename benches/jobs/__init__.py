"""The jobs to measure: plain values that define their rows and the computation on them."""
