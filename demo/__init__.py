"""The bundled target and draft, and modules that enlarge models or make a picture or data."""
