"""The bundled pair, and programs for it: `grow.py` enlarges it to the size of a real model."""
