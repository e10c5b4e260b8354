"""How fast spoold is, beside what the machine can do in the same minutes.

    python -m tests.benchmarks [PIECE …] [--small] [--folder DIR]

runs the pieces (all, in less than ten minutes), prints a table, and leaves `results.json` and
`curves.png` in tests/benchmarks/out/. What counts is the ratio to the limit: a loop of `floor.py`
that does only what cannot be left out. Put DIR on the file system of real runs; nothing stays in
it. None of this is a test of speed: machines and disks differ.
"""
