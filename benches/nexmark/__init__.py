"""Nexmark: an auction house's stream of people, auctions and bids, and queries about it; README.md has the table.

::

    events.py     people, auctions and bids, made of their numbers inside Spark
    query.py      what a query is: ways to write it, and SQL that says what it finds
    auctions.py, windows.py      the queries
    job.py        all of them by number; `Nexmark`: a query and the size of a run; its engines: each way
"""
