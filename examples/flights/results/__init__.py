"""The destinations of the demo's results, plain files or one of holdfast's sinks, and their independent readers.

::

    base.py       the common interface; `OutputFiles`: a folder per micro-batch, written by Spark
    files.py      a Delta table, read by deltalake; Parquet files, read by ``sinks.read_parquet``
    postgres.py   a table in a new schema, read by psycopg
    kafka.py      a topic, read by a consumer of committed messages
    looking.py    compares what a reader finds, at the kill and at the end, with what it must find
    places.py     the destinations by name
"""
