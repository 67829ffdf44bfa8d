"""The flights of a year through a stateful query that is killed half-way: ``holdfast demo``.

::

    data.py      the flights as files in time order, and the totals by plain pandas
    totals.py    the stateful query: what you would write
    query.py     the driver process that runs it, twice: the first one is killed
    command.py   the command: what is asked for, and what is shown
    drivers.py   starts, watches and kills the driver
    starts.py    what the start of a driver takes, Spark's part and ours
    results/     where results go, and what a reader finds there
    report.py    the comparison and the tables
"""
