"""How the bundled pair was made: a grammar that writes the examples, training, evaluation.

Nothing outside this folder imports it.
"""
