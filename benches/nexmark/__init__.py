"""Nexmark: queries over an auction house's stream of people, auctions and bids; see the table in README.md.

::

    events.py                  people, auctions and bids, computed from their numbers inside Spark
    query.py                   `Query`: ways to write a query, and SQL that defines its results
    auctions.py, windows.py    the queries
    job.py                     `Nexmark`, a query with the sizes of a run, and its engines
"""
