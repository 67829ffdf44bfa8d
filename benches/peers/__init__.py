"""Other stream processors compared with holdfast: one keyed aggregation over the same files.

::

    job         ──▶ batch-0000-0.csv, batch-0000-1.csv, batch-0001-0.csv …      key,v
                          │
          ┌───────────────┼─────────────────────────────┐
    Spark (engines)   a peer's program (programs/)      pyarrow (job.totals)
    holdfast, Spark   in the peer's own environment           │
          │               │ one line per result               │
          └──────────▶ totals of every key, or of a sample ──▶ must be equal, or the run fails

`programs` has stand-alone scripts. Each runs under the interpreter of its peer's `Environment`, where holdfast is not
installed: it imports nothing of holdfast, and reads its order from a JSON file.
"""
