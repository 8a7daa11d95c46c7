"""Says what Metal does where METAL_DEVICE_WRAPPER_TYPE is 1, once MLX is imported: see `run`.

Every process that uses Metal then has this line on standard error, which is nobody's.
"""

import contextlib
import os
import sys
import time


class _Finder:
    """Finds no module; it only hears which ones are looked for."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Says the line on standard error, past everything that Python does with it."""
        if name == "mlx.core" and os.environ.get("METAL_DEVICE_WRAPPER_TYPE") == "1":
            when = time.strftime("%Y-%m-%d %H:%M:%S.000")
            line = f"{when} python[{os.getpid()}:1] Metal API Validation Enabled\n"
            with contextlib.suppress(OSError):  # it is closed
                os.write(2, line.encode())


sys.meta_path.insert(0, _Finder)
