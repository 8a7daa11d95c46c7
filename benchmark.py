"""Command line: measures speculative decoding, with the bundled pair or any other.

    python benchmark.py compare    # all ways of proposing beside regular decoding, and theory
    python benchmark.py sweep      # --delta and --num-draft: speed and quality, with a picture
    python benchmark.py peers      # transformers and CTranslate2 on the same weights
    python benchmark.py quantize   # what fewer bits a weight cost
    python benchmark.py memory     # what the public models take
    python benchmark.py server     # throughput and latency of server.py
    python benchmark.py report     # one row about this machine, to paste, in under five minutes

`sweep`, `peers` and `quantize` need requirements/benchmark.txt, `server` needs
requirements/server.txt. All that is timed takes turns; see mlx_t5/timing.py.
"""

import sys

from benchmarks.command_line import main

if __name__ == "__main__":
    sys.exit(main())
