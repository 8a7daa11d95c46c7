"""Makes a model of a real size that computes the same as a small one (mlx_t5/benchmarks/grow.py).

python -m demo.grow --shape t5-base --from demo/target --path models/demo-base
"""

from mlx_t5.benchmarks.grow import main

if __name__ == "__main__":
    raise SystemExit(main())
