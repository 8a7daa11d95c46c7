"""The bundled target and draft, and scripts that enlarge models, draw a picture or write data."""
