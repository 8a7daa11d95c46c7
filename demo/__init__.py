"""The bundled target and draft, and modules that make data, a picture and larger models of them."""
