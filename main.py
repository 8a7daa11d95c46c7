"""Command line: reads prompts, and writes texts and statistics.

    python main.py                                  # the default prompt, the bundled models
    python main.py --prompt "fix grammar: She have two cat."
    python main.py --model t5-11b --draft-model t5-small --input-file prompts.txt

Generated text goes to standard output or --output-file, and everything else to standard error. The
exit status is 0 if all is done, 2 for bad input (one line `error: …`), and 130 after Ctrl-C.
"""

from mlx_t5.generate import main

if __name__ == "__main__":
    raise SystemExit(main())
