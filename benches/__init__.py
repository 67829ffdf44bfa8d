"""Measurements that can be repeated: the jobs behind ``holdfast bench`` and what they compare.

A bench runs engines in pairs on one machine and stores the machine, versions, settings and every time measured, so
that a figure in a document can be checked. Imports point upwards in this list only, but that runs/by_name.py and
jobs/by_name.py know the engines and jobs of nexmark/ and peers/ too::

    command.py      ``holdfast bench``: its commands are in commands/
    running/        carries suites out into a directory, stops and goes on
    suites/         questions, and the paired runs that answer each
    comparing/      what became slower from one directory to another
    report/         the document of a bench, its targets, its tables, the page of a directory
    nexmark/        the auction house's events and queries, and the engines that run them
    runs/           engines; a run in a process of its own; runs in turns
    jobs/           what is run, as plain values
    instruments/    what is looked at meanwhile
    micro/          single functions, by pytest-benchmark: ``make bench-micro``
"""
