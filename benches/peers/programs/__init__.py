"""The peers' programs: stand-alone scripts without holdfast, each run by its peer's interpreter.

A program reads its order, which `holdfast.benches.peers.engines.order_of` creates, from the given file. It prints
``ready`` before it starts to read, and, like Flink's ``print`` connector, a line ``+U[key, n, s]`` for each new total
of a sampled key, one that ``every`` divides; it drops all other results. It keeps its progress in ``durable``, if
given, and resumes from it after a kill.
"""
