"""The bundled pair and `grow.py`, which gives it a real model's size."""
