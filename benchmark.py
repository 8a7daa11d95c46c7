"""Command line: measures speculative decoding, with the bundled pair of models or another.

    python benchmark.py            # the draft beside regular decoding, in a minute
    python benchmark.py compare    # every proposer relative to regular decoding
    python benchmark.py sweep      # --delta and --num-draft: speed and quality, with a picture
    python benchmark.py peers      # transformers and CTranslate2 on the same weights
    python benchmark.py server     # throughput and latency of server.py
    python benchmark.py report     # one row about this machine, to paste, in under five minutes

`sweep` and `peers` need requirements/benchmark.txt, `server` needs requirements/server.txt.
"""

from mlx_t5.benchmark import main

if __name__ == "__main__":
    raise SystemExit(main())
