"""The bundled target and draft, and scripts: grow models, draw a picture, generate training data."""
