"""Measurements that can be repeated: the jobs behind ``holdfast bench`` and what they compare.

A bench runs engines in pairs on one machine and stores the machine, versions, settings and every time measured, so
that a figure in a document can be checked. Imports point upwards in this list only::

    command.py      ``holdfast bench``: a command for each job
    report/         the document of a bench, its targets, its tables
    runs/           engines; a run in a process of its own; runs in turns
    jobs/           what is run, as plain values
    instruments/    what is looked at meanwhile
    micro/          single functions, by pytest-benchmark: ``make bench-micro``
"""
