"""Command line: makes a draft for a T5 from prompts alone, and measures whether it saves time.

    python distill.py --model my-t5 --data prompts.txt --output models/my-t5-draft

The target answers the prompts, and a draft learns to guess these answers (mlx_t5/training). At the
end, the best version of the draft is compared with the draft that the target had before (if any)
and with copying tokens of the prompt. A bad draft cannot change the target's output, because the
target verifies every proposal. --resume continues an interrupted run. The table at the end goes to
standard output, and everything else to standard error.
"""

from mlx_t5.distill import main

if __name__ == "__main__":
    raise SystemExit(main())
