"""The bundled pair, `grow.py` to give it a real model's size, and the recipe that made it."""
