"""Train the demo family: a small target model and its draft, from nothing but installed source.

Run as ``python -m scripts.train_demo --out DIR`` on a machine with a GPU, or with ``--tiny`` for a
smoke test on a CPU.
"""
