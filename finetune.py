"""Command line: fine-tunes a T5, or adapters for it, on pairs of a prompt and a completion.

    python finetune.py --model google/flan-t5-base --data train.jsonl --output my-lora

Other programs can read the result: adapters have PEFT's format, and a whole model has the format of
Hugging Face. At regular intervals, the held-out prompts are decoded with the current weights, and
the weights that write the best texts are kept (mlx_t5/training). --resume continues an interrupted
run. distill.py makes a draft for the result.

Only the commands to run next go to standard output. Everything else goes to standard error.
"""

from mlx_t5.finetune import main

if __name__ == "__main__":
    raise SystemExit(main())
