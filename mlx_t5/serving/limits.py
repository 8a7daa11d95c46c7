"""The limits of what a request may ask for."""

from dataclasses import dataclass

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 8, 200
MAX_SAMPLES = 16  # texts per prompt
MAX_PROMPTS = 64  # prompts per request
MAX_BEAMS = 16  # hypotheses per prompt; each costs as much as a text
MAX_NUM_DRAFT = 16  # rows are verified together, so the proposals of one row slow all rows
MAX_SEED = 2**53 - 1  # the largest integer that every JSON library reads exactly
MAX_ALTERNATIVES = 20  # log-probabilities per token
MAX_PARTS = 64  # parts of a chat message
MAX_LANGUAGE = 16  # characters of a language's code
MAX_INPUTS = 2048  # per request, as in OpenAI's API
MAX_TARGETS = MAX_DOCUMENTS = 1024


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a request that the server's options set."""

    prompt_tokens: int
    max_tokens: int  # in a generated text, or in a target to score
    rows: int  # texts that a request may ask for
