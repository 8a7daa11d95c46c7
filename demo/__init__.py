"""The bundled target and draft, and modules that enlarge them, draw a picture and write data."""
