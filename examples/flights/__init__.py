"""A year of flights through a stateful query that is killed half-way: ``holdfast demo``.

::

    data.py      the flights as files in time order, and the totals by plain pandas
    totals.py    the stateful query: what you would write
    query.py     the driver process that runs the query; it is killed and started again
    command.py   the command
    drivers.py   starts, watches and kills the driver
    starts.py    measures the start of a driver: Spark's part and holdfast's
    results/     the destinations of results, and the checks of an independent reader
    report.py    the comparison and the tables
"""
