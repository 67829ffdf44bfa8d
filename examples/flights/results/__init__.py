"""Where the demo's results go: plain files, or one of holdfast's sinks; and how somebody else reads them there.

::

    base.py       what the places have in common; `OutputFiles`: a folder a micro-batch, written by Spark
    files.py      a Delta table, read by deltalake; Parquet files, read by ``sinks.read_parquet``
    postgres.py   a table in a schema of its own, read by psycopg
    kafka.py      a topic, read by a consumer of committed messages
    looking.py    what a reader finds at the kill and at the end, and what it must find
    places.py     the places by name
"""
