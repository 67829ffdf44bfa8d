"""Other stream processors beside holdfast: one keyed aggregation, fed from the same files.

::

    job         ──▶ batch-0000-0.csv, batch-0000-1.csv, batch-0001-0.csv …      key,v
                          │
          ┌───────────────┼─────────────────────────────┐
    Spark (engines)   a peer's program (programs/)      pyarrow (job.totals)
    holdfast, Spark   in the peer's own environment           │
          │               │ one line a result                 │
          └──────────▶ totals of every key, or of a sample ──▶ must be equal, or there is no figure

`programs` holds stand-alone scripts. Each runs under the interpreter of its peer's environment (`Environment`), where
holdfast is not installed: they import nothing of holdfast, and read their order from a JSON file.
"""
