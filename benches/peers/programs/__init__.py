"""The programs of the peers: stand-alone scripts without holdfast, each run by its peer's own interpreter.

A program reads its order (`holdfast.benches.peers.engines.order_of` writes it) from the file that it is given, prints
``ready`` before it begins to read, and a line ``+U[key, n, s]`` for each new total of a sampled key, one that ``every``
divides. That is what Flink's ``print`` connector writes. All other results go to a sink that drops them. With
``durable`` it keeps there what lets it go on after a kill, and goes on from what it finds there.
"""
