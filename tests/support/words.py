"""A tokenizer of words."""


class Words:
    """A tokenizer whose tokens are the given words; a text is their concatenation."""

    def __init__(self, words):
        self.words = words

    def encode(self, text):
        return [self.words.index(character) for character in text]

    def decode(self, tokens, **_):
        return "".join(self.words[token] for token in tokens)

    def convert_ids_to_tokens(self, token):
        return self.words[token]

    def get_vocab(self):
        return {f"{i}{word}": i for i, word in enumerate(self.words)}
